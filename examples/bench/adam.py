"""The optimizer step and the gradient kernels: time per parameter against memory, torch, DeepSpeed and others.

    python examples/bench/adam.py [--sections step path ...] [--sizes 1M 100M ...] [--json FILE] [--plot FILE]

The same as `python -m lightning_cxl bench adam`.
"""

from lightning_cxl.commands.bench.adam import main

if __name__ == "__main__":
    main()
