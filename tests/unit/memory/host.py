"""Real memory of this machine under the allocator hook, for tests."""

import torch
from torch import nn

from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.hook import HostAllocationMode
from lightning_cxl.memory.host_memory import HostMemory, residency
from lightning_cxl.memory.placement import Placer, TensorRole
from lightning_cxl.memory.resource import PinnedResource

LIMIT = 64 * 2**20


class Host:
    """Real memory of this machine under the hook, and what tests ask about it."""

    def __init__(self, **options) -> None:
        self.topology = Topology.detect()
        self.pinned: list[int] = []
        options = {"budgets": {"dram": LIMIT, "cxl": LIMIT}, "pin": True, "pinner": self._pinner, **options}
        self.memory = HostMemory(self.topology, **options)

    def mode(self, **options) -> HostAllocationMode:
        placer = Placer(self.topology, self.memory.free_bytes)
        return HostAllocationMode(self.memory, placer, **options)

    def tier(self, tensor: torch.Tensor) -> str | None:
        """Return the one tier that holds all of a tensor, None when its memory is not ours."""
        if self.memory.tier_at(tensor.data_ptr()) is None:
            return None
        ((name, nbytes),) = residency(tensor, self.topology, self.memory).items()
        assert nbytes == tensor.numel() * tensor.element_size()
        return name

    def bytes_of(self, role: TensorRole) -> dict[str, int]:
        return {name: size for name, size in self.memory.stats()["roles"].get(role.value, {}).items() if size}

    def _pinner(self, upstream):
        register = lambda address, nbytes: self.pinned.append(address)  # noqa: E731
        return PinnedResource(upstream, register=register, unregister=lambda address: None, where=None)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.embedding = nn.Embedding(5, 6, padding_idx=0)
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.scale = nn.Parameter(torch.randn(4) * 0.02)
