"""Full fine-tuning of a large model on one GPU: `cxl_offload` against FSDP2 and DeepSpeed with everything on the host.

    python examples/bench/gpu.py --shape llama-3.1-8b --seq 16384 [--batch 1] [--steps 6] [--only NAME ...]
                                 [--json FILE] [--plot FILE.png]

Random weights of the given shape, bfloat16 compute, float32-quality master weights, AdamW, activations checkpointed,
the same chunked loss for all. Every contender is a process of its own, one after the other, since a model of this size
fills the GPU's or the host's memory: compare runs on a quiet machine. After the timed steps one more is profiled: how
long the GPU computed and copied each way, and how long the host worked on updates and gradients.

The goal is a step of at most 1.05 times the longest of these. `--device cpu` runs the same code without a GPU, as tests
of this script do; its times mean nothing.
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_bench import child
from gpu_bench.job import SHAPE_NAMES, flops_per_step

WARM_UP = 2
GOAL = 1.05


def measure(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Run a contender in a child process; None, with the reason printed, if it cannot."""
    options = ["--shape", args.shape, "--seq", args.seq, "--batch", args.batch, "--steps", args.steps]
    options += ["--device", args.device, "--state", args.state, "--on-overflow", args.on_overflow]
    options += [] if args.clip is None else ["--clip", args.clip]
    options += ["--units-on-device", args.units_on_device] + ["--state-on-device"] * args.state_on_device
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"{name} did not run: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
        return None
    result: dict[str, Any] = json.loads(lines[-1])
    result["seconds"] = result["seconds"][WARM_UP:]
    return result


def rows_of(name: str, result: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of a contender as rows of the benchmark's file."""
    seconds = statistics.median(result["seconds"])
    profile = result["profile"]
    parts = [profile[key] for key in ("compute", "h2d", "d2h", "host step") if profile.get(key)]
    rows: list[tuple[str, float | None, str, float | None]] = [
        ("step", seconds, "s", None),
        ("throughput", args.seq * args.batch / seconds, "tokens/s", None),
        ("arithmetic", flops_per_step(args.shape, args.seq, args.batch) / seconds / 1e12, "TFLOP/s", None),
        ("GPU peak", result["gpu_peak_bytes"], "B", None),
        ("host peak", result["host_peak_bytes"], "B", None),
        ("last loss", result["losses"][-1], "", None),
    ]
    rows += [(f"profiled: {key}", value, "s", None) for key, value in profile.items()]
    if profile.get("compute"):
        rows.append(("busy", profile["compute"] / profile["profiled step"], "fraction", None))
    if parts:
        rows.append(("step / longest part", seconds / max(parts), "x ideal", GOAL if name == "cxl_offload" else None))
    return [
        {"name": f"{name}: {what}", "value": value, "unit": unit, "goal": goal,
         "holds": None if goal is None or value is None else value <= goal}
        for what, value, unit, goal in rows
    ]  # fmt: skip


def machine() -> dict[str, Any]:
    """Return what the figures were taken on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "memory_bytes": memory,
            "python": platform.python_version()}  # fmt: skip


def plot(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """Draw tokens per second and host memory of every contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    names = list(results)
    left.bar(names, [args.seq * args.batch / statistics.median(results[name]["seconds"]) for name in names])
    left.set_ylabel("tokens/s")
    right.bar(names, [results[name]["host_peak_bytes"] / 2**30 for name in names])
    right.set_ylabel("host peak, GiB")
    figure.suptitle(f"{args.shape}, {args.seq} tokens x {args.batch}, {next(iter(results.values()))['device']}")
    figure.tight_layout()
    figure.savefig(args.plot, dpi=120)


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="llama-3.1-8b")
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help=f"timed steps, the first {WARM_UP} not counted")
    parser.add_argument("--state", choices=["fp32", "bf16", "8bit"], default="fp32", help="of cxl_offload's CPUAdam")
    parser.add_argument("--on-overflow", choices=["ignore", "error", "skip"], default="ignore", help="of cxl_offload")
    parser.add_argument("--clip", type=float, metavar="NORM", help="gradients of cxl_offload")
    parser.add_argument("--units-on-device", type=int, default=0, metavar="K", help="of cxl_offload")
    parser.add_argument("--state-on-device", action="store_true", help="of cxl_offload")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=child.CONTENDERS, help="default: all that can be imported")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--child", choices=child.CONTENDERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that are not counted")
    return args


def main() -> None:
    """Run, print, write."""
    args = parse()
    if args.child:
        child.run(args.child, args)
        return
    names = args.only or [
        name for name in child.CONTENDERS if "deepspeed" not in name or importlib.util.find_spec("deepspeed")
    ]
    results = {name: result for name in names if (result := measure(name, args)) is not None}
    rows = [row for name, result in results.items() for row in rows_of(name, result, args)]
    for row in rows:
        goal = "" if row["goal"] is None else f"  goal at most {row['goal']}: {'holds' if row['holds'] else 'MISSED'}"
        value = "-" if row["value"] is None else f"{row['value']:,.4g}"
        print(f"{row['name']:44} {value:>14} {row['unit']}{goal}")
    if args.json:
        about = {**machine(), "device": next((result["device"] for result in results.values()), None)}
        args.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
    if args.plot and results:
        plot(results, args)
    if not results:
        raise SystemExit("no contender ran")


if __name__ == "__main__":
    main()
