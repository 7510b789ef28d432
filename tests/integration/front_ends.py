"""`examples/bench/front_ends.py` on the device under test.

    python -m tests.integration.front_ends FOLDER [--device NAME] [--rounds N]

runs that program on the device that is apart, or another one that `tests/training_device.py` knows.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from tests import training_device
from tests.integration.accelerate_loop import forget_accelerators

_PATH = Path(__file__).parents[2] / "examples" / "bench" / "front_ends.py"
_SPEC = importlib.util.spec_from_file_location("front_ends_bench", _PATH)
bench = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = bench  # dataclasses look it up
_SPEC.loader.exec_module(bench)


def job_here(folder, **given):
    forget_accelerators()
    return bench.Job(folder, device=training_device.current, accelerator=training_device.accelerator(), **given)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=training_device.NAMES, default="apart")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    training_device.choose(options.device)
    with training_device.on_chosen():
        bench.run(job_here(options.folder), bench.there_are(), options.rounds)


if __name__ == "__main__":
    main()
