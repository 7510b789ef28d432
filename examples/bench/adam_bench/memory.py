"""Section of the Adam benchmark about memory: how far a step lifts the peak of the process, as the kernel counts it."""

import gc
from collections.abc import Sequence
from pathlib import Path as File

import torch
from results import Results, print_columns
from timing import Contender, reason

from adam_bench.contenders import MEASURE, OURS, PLAIN, ROOF, Options, state_contenders
from adam_bench.path import Path, all_check_contenders, path_contenders
from adam_bench.problems import Problem, fits, one_tensor
from adam_bench.step import all_step_contenders
from lightning_cxl.memory.host_memory import HeapTrimmer

_SIZE = 20_000_000
_GOAL_MIB = 1.0


def peak_bytes() -> int:
    """Return the highest resident memory since the last `reset_peak`."""
    for line in File("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def reset_peak() -> None:
    """Make the peak what is resident now."""
    File("/proc/self/clear_refs").write_text("5")


def extra_bytes(contender: Contender) -> int:
    """Return by how much a run lifts the peak above what is resident before it, when state and threads exist."""
    run = contender.make()
    run()
    gc.collect()
    HeapTrimmer().trim_now()  # else the heap serves the run with pages that are resident already, and nothing is seen
    reset_peak()
    before = peak_bytes()
    run()
    return peak_bytes() - before


def memory_section(results: Results, options: Options) -> None:
    """Measure the extra memory of every contender of the other sections."""
    size = min(_SIZE, options.main_size)
    layout = one_tensor(size)
    if not fits(60 * size, f"extra memory on {layout.label}"):
        return
    try:
        reset_peak()
    except OSError as error:
        print(f"skipped: the peak of the process cannot be reset here ({reason(error)})")
        return
    threads = options.num_threads
    _group(results, f"fp32 step, {layout.label}", all_step_contenders(Problem.make(layout), threads), threads)
    _group(results, f"state formats, {layout.label}", state_contenders(Problem.make(layout), threads), threads)
    bf16 = Problem.make(layout, torch.bfloat16)
    _group(results, f"full path, {layout.label}", path_contenders(Path(bf16, threads)), threads)
    _group(results, f"gradient check, bf16, {layout.label}", all_check_contenders(bf16.gradients, threads), threads)


def _group(results: Results, title: str, contenders: Sequence[Contender], num_threads: int) -> None:
    title = f"extra memory, {title}"
    print(f"\n{title}")
    found: dict[str, float] = {}
    for contender in contenders:
        try:
            found[contender.name] = extra_bytes(contender) / num_threads / 2**20
        except Exception as error:
            if not contender.optional:
                raise
            print(f"  {contender.name}: skipped, {reason(error)}")
    print_columns([("", "MiB/thread"), *((name, f"{value:.2f}") for name, value in found.items())])
    for name, value in found.items():
        if name in (ROOF, PLAIN):
            continue
        if name in (OURS, MEASURE) or title.startswith("extra memory, state formats"):
            results.at_most(f"{title}: {name}", value, "MiB/thread", _GOAL_MIB)
        else:
            results.add(f"{title}: {name}", value, "MiB/thread")
