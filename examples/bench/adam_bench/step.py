"""Sections of the Adam benchmark about the step alone: float32 by size and shape, and formats of the state."""

from collections.abc import Callable

import torch
from results import Results
from timing import Contender, measure

from adam_bench import peers
from adam_bench.contenders import (
    FUSED,
    OURS,
    ROOF,
    Options,
    cpu_adam,
    state_contenders,
    step_contenders,
    torch_adamw,
)
from adam_bench.problems import Layout, Problem, fits, format_count, one_tensor
from adam_bench.tensors import llama_tensors, small_tensors

# nanoseconds per parameter, by number of parameters and contender
Curves = dict[int, dict[str, float]]

# with fewer parameters everything fits into a cache
_MEMORY_BOUND = 20_000_000
_PEER_STATE_SIZE = 4_000_000


# -- float32 by size and shape -----------------------------------------------------------------------------------------


def all_step_contenders(problem: Problem, num_threads: int) -> list[Contender]:
    """Return all that update float32 parameters: CPUAdam, and others."""

    def compiled() -> Callable[[], None]:
        step = peers.compiled_step(problem, problem.parameters)
        return lambda: step(1.0)

    found, nbytes = step_contenders(problem, num_threads), 28 * problem.numel
    found.append(Contender("DeepSpeed CPUAdam", lambda: peers.deepspeed_adam(problem), True, nbytes))
    if len(problem.parameters) == 1:
        found.append(Contender("torch.compile", compiled, True, nbytes))
    if fits(8 * problem.numel, f"torch foreach on {problem.layout.label} (temporaries)"):
        found.append(Contender("torch foreach", lambda: torch_adamw(problem, foreach=True), False, nbytes))
    return found


def step_section(results: Results, options: Options) -> Curves:
    """Measure float32 steps; return the curves of a plot."""
    curves: Curves = {}
    for size in options.sizes:
        curve = _step(results, options, one_tensor(size))
        if curve is not None:
            curves[size] = curve
    if max(options.sizes) >= _MEMORY_BOUND:
        _step(results, options, llama_tensors())
        _step(results, options, small_tensors())
    return curves


def _step(results: Results, options: Options, layout: Layout) -> dict[str, float] | None:
    # CPUAdam makes momentum and variance of its own
    if not fits(24 * layout.numel, f"the fp32 step on {layout.label}"):
        return None
    problem = Problem.make(layout)
    timings = measure(all_step_contenders(problem, options.num_threads), options.rounds)
    title = f"fp32 step, {layout.label}"
    results.table(title, timings, layout.numel, ROOF)
    ratio = timings.ratio(OURS, ROOF)
    if layout.numel >= _MEMORY_BOUND and len(layout.shapes) == 1:
        results.at_most(f"{title}: {OURS} / {ROOF}", ratio, "x roof", 1.03)
    else:
        results.add(f"{title}: {OURS} / {ROOF}", ratio, "x roof")
    results.at_most(f"{title}: {OURS} / {FUSED}", timings.ratio(OURS, FUSED), "x", 1.0)
    if "torch.compile" in timings:
        results.add(f"{title}: torch.compile, first run", timings.first_seconds["torch.compile"], "s")
    return {name: timings.median(name) / layout.numel * 1e9 for name in timings.seconds}


# -- formats of the state ----------------------------------------------------------------------------------------------


def state_section(results: Results, options: Options) -> None:
    """Measure steps by format of the state, and other people's 8-bit optimizers on fewer parameters."""
    for dtype, name in ((torch.float32, "fp32 weights"), (torch.bfloat16, "split bf16 weights")):
        layout = one_tensor(options.main_size)
        if not fits(38 * layout.numel, f"state formats on {layout.label}"):
            return
        problem = Problem.make(layout, dtype)
        timings = measure(state_contenders(problem, options.num_threads), options.rounds)
        title = f"state formats, {name}, {layout.label}"
        results.table(title, timings, layout.numel, "fp32")
        results.at_most(f"{title}: 8bit / fp32", timings.ratio("8bit", "fp32"), "x", 1.0)
        results.at_least(f"{title}: fp32 / bf16", timings.ratio("fp32", "bf16"), "x faster", 1.3)
    _eight_bit_peers(results, options)


def _eight_bit_peers(results: Results, options: Options) -> None:
    size = min(options.main_size, _PEER_STATE_SIZE)
    problem = Problem.make(one_tensor(size))
    contenders = [
        Contender(FUSED, lambda: torch_adamw(problem, fused=True)),
        Contender(f"{OURS}, fp32", lambda: cpu_adam(problem, options.num_threads, state="fp32").step),
        Contender(f"{OURS}, 8bit", lambda: cpu_adam(problem, options.num_threads, state="8bit").step),
        Contender("bitsandbytes AdamW8bit", lambda: peers.bitsandbytes_adamw8bit(problem), optional=True),
        Contender("torchao AdamW8bit", lambda: peers.torchao_adamw8bit(problem), optional=True),
    ]
    title = f"8-bit optimizers, {format_count(size)}"
    results.table(title, measure(contenders, options.rounds), size, FUSED)
