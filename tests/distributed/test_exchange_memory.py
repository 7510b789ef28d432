from pathlib import Path

import torch

from lightning_cxl.memory.resource import PoolResource
from lightning_cxl.sharding import fsdp
from lightning_cxl.sharding.fsdp import PooledCollective

CPU = torch.device("cpu")


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
