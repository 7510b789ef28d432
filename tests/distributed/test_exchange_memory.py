"""FSDP2 gathers and reduces in pages that serve one unit after another."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_cxl.memory.resource import Buffer, PoolResource
from lightning_cxl.run.session import Session
from lightning_cxl.sharding import fsdp
from lightning_cxl.sharding.fsdp import PooledCollective, cut, pooled_exchanges
from lightning_cxl.streaming.units import find_units
from lightning_cxl.torch_private import collectives_of, has_default_collectives
from tests.distributed.training import Job, make_model

CPU = torch.device("cpu")


class Counting(fsdp._Pages):
    """Counts the bytes that it has been asked for."""

    nbytes = 0

    def allocate(self, nbytes: int, *, alignment: int = 4096) -> Buffer:
        Counting.nbytes += nbytes
        return super().allocate(nbytes, alignment=alignment)


class Own(PooledCollective):
    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.collective.allocate(*args, **kwargs)


def test_memory_is_used_again() -> None:
    collective = PooledCollective(None, PoolResource(fsdp._Pages()))
    first = collective.allocate((3, 5), dtype=torch.bfloat16, device=CPU)
    assert (first.shape, first.dtype) == ((3, 5), torch.bfloat16)
    view, address = first[1:], first.data_ptr()
    del first
    assert collective.allocate((15,), dtype=torch.bfloat16, device=CPU).data_ptr() != address, view
    del view
    assert collective.allocate((15,), dtype=torch.bfloat16, device=CPU).data_ptr() == address


def test_a_forked_child_does_not_keep_what_is_given_back() -> None:
    """Pages that processes share have a file in the kernel's list; those of this process alone have none."""
    pages = fsdp._Pages().allocate(1 << 20)
    (line,) = (
        each for each in Path("/proc/self/maps").read_text().splitlines()
        if int(each.split("-")[0], 16) <= pages.address < int(each.split("-")[1].split()[0], 16)
    )  # fmt: skip
    assert line.split()[1] == "rw-p", line


def train(steps: int) -> dict[str, Any]:
    """Return what a model asks the OS for in its first step and later, and its collectives inside and outside."""
    fsdp._Pages, Counting.nbytes = Counting, 0  # type: ignore[misc]
    model = make_model(Job())
    cut(model, find_units(model), init_device_mesh("cpu", (2,)), Session().host_on(CPU).engine)
    units = [each for each in model.modules() if isinstance(each, FSDPModule) and collectives_of(each)[0]]
    own = Own(collectives_of(units[0])[1], PoolResource(fsdp._Pages()))
    units[0].set_custom_reduce_scatter(own)
    asked = []
    with pooled_exchanges(model):
        inside = [type(collectives_of(unit)[0]).__name__ for unit in units]
        for _ in range(steps):
            tokens = torch.ones(1, 8, dtype=torch.long)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            model.zero_grad()
            asked.append(Counting.nbytes)
    after = collectives_of(units[0])[1] is own and all(map(has_default_collectives, units[1:]))
    return {"inside": inside, "after": after, "asked": asked}


def test_what_a_user_has_replaced_stays_and_the_rest_comes_back(ranks) -> None:
    for each in ranks.of(2).run(train, 3):
        assert each["inside"][0] == "DefaultAllGather"
        assert set(each["inside"][1:]) == {"PooledCollective"}
        assert each["after"]
        assert each["asked"][0] == each["asked"][-1] > 0
