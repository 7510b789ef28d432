"""Sections of the Adam benchmark about the way from bf16 gradients to bf16 weights: all of it, and the check alone."""

from collections.abc import Callable, Sequence

import torch
from results import Results
from timing import Contender, measure

from adam_bench import chains, peers
from adam_bench.contenders import (
    MEASURE,
    OURS,
    PLAIN,
    ROOF,
    Options,
    check_contenders,
    cpu_adam,
    renew,
)
from adam_bench.problems import Problem, filled, fits, one_tensor
from adam_bench.tensors import zeroed
from lightning_cxl.commands.calibrate import Sweep, read, update

TORCH, DEEPSPEED, COMPILED = "torch", "DeepSpeed", "torch.compile"
# read gradients; read and write weights, remainders, momentum and variance
_UPDATE_BYTES = 2 + 4 + 4 + 16


class Path:
    """A bf16 problem and everything that contenders share.

    The norm that gradients are clipped to is a little below their own: everyone multiplies, and rounding to bf16 leaves
    the gradients as they are where they are multiplied in place.
    """

    def __init__(self, problem: Problem, num_threads: int) -> None:
        self.problem = problem
        self.num_threads = num_threads
        self.masters = chains.MasterChain(problem)
        self.remainders = zeroed(problem.parameters, torch.int16)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in problem.gradients]
        self.max_norm = 0.9999 * float(torch.linalg.vector_norm(torch.stack(norms)))

    def check_roof(self) -> Sweep:
        """Return one read of the gradients."""
        return Sweep([[read(gradient)] for gradient in self.problem.gradients], self.num_threads)

    def update_roof(self) -> Sweep:
        """Return one pass over what the update moves."""
        p = self.problem
        tensors = zip(p.gradients, p.parameters, self.remainders, p.momentum, p.variance, strict=True)
        return Sweep([[read(g), *(update(tensor) for tensor in rest)] for g, *rest in tensors], self.num_threads)

    def ours(self) -> Callable[[], object]:
        """Return our measuring of the gradients, then the step that clips on the way."""
        optimizer = cpu_adam(self.problem, self.num_threads)

        def run() -> None:
            renew(self.problem.gradients)
            optimizer.clip_grad_norm_(self.max_norm)
            optimizer.step()

        return run


def path_contenders(path: Path) -> list[Contender]:
    """Return all that go the whole way."""
    gradients, masters, limit = path.problem.gradients, path.masters, path.max_norm
    traffic_bytes = path.problem.numel * (2 + _UPDATE_BYTES)

    def torch_chain() -> Callable[[], object]:
        return chains.in_turn(chains.torch_prepare(gradients, limit), chains.torch_update(masters))

    def deepspeed_chain() -> Callable[[], object]:
        return chains.in_turn(chains.deepspeed_prepare(gradients, limit), chains.deepspeed_update(masters))

    return [
        Contender(ROOF, lambda: chains.in_turn(path.check_roof(), path.update_roof()), traffic_bytes=traffic_bytes),
        Contender(OURS, path.ours, traffic_bytes=traffic_bytes),
        Contender(COMPILED, lambda: chains.compiled_chain(masters, limit), optional=True),
        Contender(TORCH, torch_chain),
        Contender(DEEPSPEED, deepspeed_chain, optional=True),
    ]


def update_contenders(path: Path) -> list[Contender]:
    """Return the second half alone: bf16 gradients as they are to new masters and bf16 weights."""
    masters, traffic_bytes = path.masters, path.problem.numel * _UPDATE_BYTES

    def compiled() -> Callable[[], object]:
        step = chains.compiled_update(masters)
        return lambda: step(1.0)

    def ours() -> Callable[[], object]:
        return cpu_adam(path.problem, path.num_threads).step

    return [
        Contender(ROOF, path.update_roof, traffic_bytes=traffic_bytes),
        Contender(OURS, ours, traffic_bytes=traffic_bytes),
        Contender(COMPILED, compiled, optional=True),
        Contender(TORCH, lambda: chains.torch_update(masters)),
        Contender(DEEPSPEED, lambda: chains.deepspeed_update(masters), optional=True),
    ]


def path_section(results: Results, options: Options) -> None:
    """Measure the whole path, and the update alone."""
    layout = one_tensor(options.main_size)
    if not fits(42 * layout.numel, f"the full path on {layout.label}"):
        return
    path = Path(Problem.make(layout, torch.bfloat16), options.num_threads)
    title = f"full path, {layout.label}"
    timings = measure(path_contenders(path), options.rounds)
    results.table(title, timings, layout.numel, ROOF)
    results.at_most(f"{title}: {OURS} / {ROOF}", timings.ratio(OURS, ROOF), "x roof", 1.05)
    best = timings.fastest([TORCH, DEEPSPEED])
    assert best is not None
    results.at_least(f"{title}: {best} / {OURS}", timings.ratio(best, OURS), "x faster", 2.4)

    title = f"update of the full path, {layout.label}"
    timings = measure(update_contenders(path), options.rounds)
    results.table(title, timings, layout.numel, ROOF)
    results.add(f"{title}: {OURS} / {ROOF}", timings.ratio(OURS, ROOF), "x roof")
    if COMPILED in timings:
        results.add(f"{title}: {OURS} / {COMPILED}", timings.ratio(OURS, COMPILED), "x")
        results.add(f"{title}: {COMPILED}, first run", timings.first_seconds[COMPILED], "s")


# -- the check alone ---------------------------------------------------------------------------------------------------


def all_check_contenders(gradients: Sequence[torch.Tensor], num_threads: int) -> list[Contender]:
    """Return all that look for non-finite gradients and compute their norm: the measuring of gradients, and others."""
    return [
        *check_contenders(gradients, num_threads),
        Contender(COMPILED, lambda: peers.compiled_check(gradients), optional=True),
        Contender(TORCH, lambda: chains.torch_check(gradients)),
        Contender(DEEPSPEED, lambda: chains.deepspeed_check(gradients), optional=True),
    ]


def check_section(results: Results, options: Options) -> None:
    """Measure the gradient check on bf16 and float32 gradients."""
    layout = one_tensor(options.main_size)
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        # DeepSpeed's norm makes a float64 copy, and torch's norm of that may make another
        if not fits((dtype.itemsize + 16) * layout.numel, f"the gradient check on {layout.label}"):
            return
        gradients = filled(layout, dtype, 0.01)
        title = f"gradient check, {name}, {layout.label}"
        timings = measure(all_check_contenders(gradients, options.num_threads), options.rounds)
        results.table(title, timings, layout.numel, ROOF)
        results.at_most(f"{title}: {MEASURE} / {ROOF}", timings.ratio(MEASURE, ROOF), "x roof", 1.05)
        results.add(f"{title}: {MEASURE} / {PLAIN}", timings.ratio(MEASURE, PLAIN), "x read")
