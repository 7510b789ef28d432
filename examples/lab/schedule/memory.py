"""Host memory whose tiers are said, not had: for simulated links."""

from collections import deque
from collections.abc import Callable, Mapping

import torch
from simulation.addresses import AddressMap

from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.memory.resource import Buffer, Span

Shares = Mapping[str, float]
SharesOf = Callable[[TensorRole, str], Shares]
"""Role and unit to the fraction of each tier."""


class LabelledMemory:
    """Gives memory by role and unit, and notes for the links on which tiers it lies. What dies is given out again."""

    def __init__(self, shares_of: SharesOf) -> None:
        self.addresses = AddressMap()
        self.shares_of = shares_of
        self._free: dict[int, deque[torch.Tensor]] = {}

    def allocate(self, nbytes: int, role: TensorRole, unit: str) -> Buffer:
        free = self._free.setdefault(nbytes, deque())
        try:
            memory = free.popleft()
        except IndexError:
            memory = torch.zeros(nbytes + 64, dtype=torch.uint8)  # written once: its pages are there
        start = memory.data_ptr()
        buffer = Buffer(start + -start % 64, nbytes, (Span("", 0, 0, nbytes),), self, memory)
        return self.addresses.note(buffer, f"{unit} {role.value}", self.shares_of(role, unit))

    def deallocate(self, buffer: Buffer) -> None:
        self._free[buffer.nbytes].append(buffer.parent)
