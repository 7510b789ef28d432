"""The machine of arXiv 2507.03305, replayed without a GPU: real threads and real data on simulated links.

    python examples/lab/replay.py [--json FILE] [--plot FILE.png] [--trace FILE.json]

The machine and its memory classes are scaled down, under the package's own policies: `interleave`, `latency_first` (the
paper's) and `bandwidth` (ours). The device computes by waiting, for as long as its flops take; threads, copies and
updates are real.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import bench_path  # noqa: F401  # where `results` is
import torch
from results import Results, check_matplotlib, machine
from schedule.picture import draw
from schedule.tables import replay_section


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: shows whether it runs, not how well")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw timelines of one step each")
    parser.add_argument("--trace", type=Path, metavar="FILE.json", help="write the first of them for Chrome, Perfetto")
    parser.add_argument("--tflops", type=float, default=150.0, help="of the device, sustained (150)")
    parser.add_argument("--dram-gib", type=float, default=128.0, help="of the machine (128)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step (8)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each (4096)")
    args = parser.parse_args(arguments)
    if args.plot:
        check_matplotlib()
    torch.set_num_threads(1)  # the other threads are the links and the host step
    results = Results(machine(1))
    drawn = replay_section(
        results,
        quick=args.quick,
        flops_per_s=args.tflops * 1e12,
        dram_bytes=int(args.dram_gib * 2**30),
        batch=args.batch,
        context=args.context,
        step_s=0.05 if args.quick else 1.2,
    )
    print(f"\n{results.summary()}")
    if args.json:
        results.write(args.json)
    if args.plot:
        draw(drawn, args.plot)
    if args.trace:
        next(iter(drawn.values())).write_chrome_trace(args.trace)


if __name__ == "__main__":
    main()
