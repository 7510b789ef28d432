"""A float32 step of `CPUAdam` beside torch's fused AdamW, right after torch's operators or after a rest.

    [OMP_WAIT_POLICY=passive] python examples/bench/adam_threads.py [--rest SECONDS] [--sizes 1 10 ...]

OpenMP's threads wait in loops for milliseconds after an operator, and the threads of `CPUAdam` share the cores with
them. The contenders take turns; the table shows medians and the median of the rounds' ratios.
"""

import argparse
import statistics
import time

import torch

from lightning_cxl import CPUAdam


def steps(kind: type[torch.optim.Optimizer], numel: int, **options: bool) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.randn(numel // 4)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return kind(parameters, lr=1e-3, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rest", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--sizes", nargs="+", type=float, default=[1, 10, 40, 120], help="million parameters")
    args = parser.parse_args()
    for numel in (int(size * 1e6) for size in args.sizes):
        contenders = [steps(CPUAdam, numel), steps(torch.optim.AdamW, numel, fused=True)]
        seconds: list[list[float]] = [[], []]
        for turn in range(max(12, min(100, 3 * 10**8 // numel))):
            for place in (turn % 2, 1 - turn % 2):
                time.sleep(args.rest)
                start = time.perf_counter()
                contenders[place].step()
                seconds[place].append(time.perf_counter() - start)
        ours, fused = (times[3:] for times in seconds)  # the first steps make the state
        ratio = statistics.median(one / other for one, other in zip(ours, fused, strict=True))
        print(
            f"{numel / 1e6:6.1f} M parameters: CPUAdam {statistics.median(ours) * 1e3:7.2f} ms, "
            f"torch {statistics.median(fused) * 1e3:7.2f} ms, ratio {ratio:.2f}"
        )


if __name__ == "__main__":
    main()
