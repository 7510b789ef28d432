"""The optimizer step and the gradient kernels: time per parameter against memory, torch, DeepSpeed and others.

    python examples/bench/adam.py [--sections step path ...] [--sizes 1M 100M ...] [--json FILE] [--plot FILE.png]

More than `python -m lightning_cxl bench adam` shows: the optimizers of others where they are installed (torch foreach
and compiled, DeepSpeed, bitsandbytes, torchao), the whole way from bf16 gradients to new bf16 weights, many small
tensors, extra memory, and a goal for each of CPUAdam's numbers. Contenders take turns in one process; tables show
medians, the spread of all rounds, and the median of the rounds' ratios.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from adam_bench.memory import memory_section
from adam_bench.path import check_section, path_section
from adam_bench.plot import plot
from adam_bench.step import Curves, state_section, step_section

from lightning_cxl.commands.bench.adam import begin, make_parser
from lightning_cxl.commands.bench.contenders import Options
from lightning_cxl.commands.measuring.files import check_target
from lightning_cxl.commands.measuring.pictures import check_matplotlib
from lightning_cxl.commands.measuring.results import Results

_SECTIONS: dict[str, Callable[[Results, Options], Curves | None]] = {
    "step": step_section,
    "path": path_section,
    "states": state_section,
    "check": check_section,
    "memory": memory_section,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("python examples/bench/adam.py", __doc__, "python examples/bench/adam.py --sections step")
    parser.add_argument(
        "--sections", nargs="+", choices=list(_SECTIONS), default=list(_SECTIONS), help="default: all of them"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw time against size")
    args = parser.parse_args(arguments)
    if args.plot:
        if "step" not in args.sections:
            parser.error("--plot draws the section `step`: add it to --sections")
        check_matplotlib()
        check_target(args.plot)
    options, results = begin(parser, args)
    curves: Curves = {}
    for name in args.sections:
        start = time.perf_counter()
        curves = _SECTIONS[name](results, options) or curves
        print(f"\nsection {name}: {time.perf_counter() - start:.0f} s")
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)
    if args.plot:
        plot(curves, args.plot, f"{results.machine['cpu']}, {args.threads} threads")


if __name__ == "__main__":
    main()
