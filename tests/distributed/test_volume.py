"""A step with us moves the bytes that `exchanges` says, to the byte, and the numbers that ranks agree on.

All that it gives to torch.distributed is counted below its Python functions.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cxl.inventory.tensors import Mesh
from lightning_cxl.planning.job import COLLECTIVES, exchanges, groups_of
from lightning_cxl.sharding.fsdp import root_of
from lightning_cxl.streaming.units import find_units
from tests.distributed.training import Job, Training, loss_of, make_model, place

NORM = ("all_reduce", "float64", 8)
SKIP = ("all_reduce", "int64", 8)
_MOVES = ("c10d", "_c10d_functional")


@dataclass
class Traffic(TorchDispatchMode):
    """Counts what this rank receives, and what goes beside gathers and reductions, while it is active."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: float = 0.0
    """As rings do it."""
    others: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """How often: numbers that ranks agree on, as `NORM` and `SKIP`; operators that nothing here knows."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _MOVES:
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "_allgather_base_":
            output, part = args[:2]
            self.all_gather += output.nbytes - part.nbytes
        elif name == "_reduce_scatter_base_":
            part, whole = args[:2]
            self.reduce_scatter += whole.nbytes - part.nbytes
        elif name == "allreduce_" and [(each.numel(), each.itemsize) for each in args[0]] != [(1, 8)]:
            ranks = dist.ProcessGroup.unbox(args[1]).size()
            self.all_reduce += sum(2 * (ranks - 1) / ranks * each.nbytes for each in args[0])
        else:
            tensor = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
            kind = str(tensor.dtype).removeprefix("torch.") if isinstance(tensor, torch.Tensor) else ""
            self.others["all_reduce" if name == "allreduce_" else name, kind, getattr(tensor, "nbytes", 0)] += 1


def traffic(job: Job) -> tuple[list[Traffic], Any]:
    """Train with us in a loop of the user's own; return what each step has moved, and what the formula says."""
    model, world = make_model(job), place()[1]
    if job.bf16:
        model = model.to(torch.bfloat16)
    ranks = Mesh(num_devices=world // job.replicas, num_machines=job.replicas, replicates=job.replicas > 1)
    collectives = exchanges(groups_of(model, find_units(model), ranks), ranks, job.micro_batches, no_sync=job.no_sync)
    found = []
    with Training(job, reads_gradients=False) as ours:
        root: Any = root_of(ours.model)
        for number in range(job.steps):
            with Traffic() as moved:
                for index in range(job.micro_batches):
                    is_last = index == job.micro_batches - 1
                    root.set_requires_gradient_sync(is_last or not job.no_sync)
                    seed = torch.Generator().manual_seed(100 * ours.rank + 10 * number + index)
                    loss = loss_of(ours.model, torch.randint(0, 61, (1, 16), generator=seed))
                    with ours.loop.backward(is_last=is_last):
                        loss.backward()
                if job.clip is not None:
                    ours.optimizer.clip_grad_norm_(job.clip)  # type: ignore[attr-defined]
                ours.optimizer.step()
                ours.optimizer.zero_grad()
            found.append(moved)
    return found, {each.name: each.nbytes for each in collectives}


JOBS = {
    "accumulated and clipped": Job(steps=2, micro_batches=3, clip=0.5),
    "bf16, not tied": Job(steps=2, tied=False, bf16=True, clip=0.5),
    "uneven shards": Job(steps=2, sizes={"vocab_size": 61, "intermediate_size": 45}),
    "frozen weights": Job(steps=2, frozen=("mlp", "embed")),
    "lora": Job(steps=2, lora=True, micro_batches=2),
    "reduced by the last micro-batch": Job(steps=2, micro_batches=3, clip=0.5, no_sync=True),
    "two replicas, accumulated and clipped": Job(steps=2, micro_batches=2, clip=0.5, replicas=2),
    "two replicas, reduced by the last micro-batch": Job(steps=2, micro_batches=3, clip=0.5, replicas=2, no_sync=True),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_step_moves_what_the_formula_says(ranks, name):
    job = JOBS[name]
    for steps, expected in ranks.of(4 if job.replicas > 1 or "uneven" in name else 2).run(traffic, job):
        forward, backward, scatter, all_reduce = (expected.get(name, 0.0) for name in COLLECTIVES)
        for moved in steps:
            assert moved.all_gather == forward + backward
            assert moved.reduce_scatter == scatter > 0
            assert moved.all_reduce == all_reduce
            assert moved.others == ({SKIP: 1, NORM: 1} if job.clip is not None else {SKIP: 1})
        assert (all_reduce > 0) == (job.replicas > 1)
        assert forward > 0
