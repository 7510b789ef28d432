"""Memory of this machine for tests: real, under the allocator hook, or in the role of other nodes."""

import os
import resource
import signal

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.hook import HostAllocationMode
from lightning_cxl.memory.host_memory import HostMemory, residency
from lightning_cxl.memory.placement import Placer
from lightning_cxl.memory.resource import NumaResource, PinnedResource, Span
from tests.fakes import fake_topology

MIB = 2**20
LIMIT = 64 * MIB


class Leaf(NumaResource):
    """Pretends to be node `label` and really uses node 0; where it is `full`, it fails when it has backed memory."""

    def __init__(self, tier="dram", label=0, *, free=2**30, full=False, inherit=False):
        super().__init__(tier, 0, fake_topology(("64GiB",), ()), inherit=inherit, free_bytes=lambda: free)
        self.label, self.full = label, full
        self.sizes: list[int] = []

    def back(self, mapping, parts):
        spans = super().back(mapping, parts)
        if self.full:
            raise TierFullError(f"node {self.label} is full")
        self.sizes += [nbytes for _, nbytes in parts]
        return tuple(Span(span.tier, self.label, span.offset, span.nbytes) for span in spans)


class Host:
    """Real memory of this machine under the hook, and what tests ask about it."""

    def __init__(self, **options):
        self.topology = Topology.detect()
        self.pinned: dict[int, int] = {}
        options = {"budgets": {"dram": LIMIT, "cxl": LIMIT}, "pin": True, **options}
        self.memory = HostMemory(self.topology, pinner=self.pinner, **options)
        self.placer = Placer(self.topology, self.memory.free_bytes)

    def mode(self, **options):
        return HostAllocationMode(self.memory, self.placer, **options)

    def tier(self, tensor):
        """Return the one tier that holds all of a tensor, None when its memory is not ours."""
        if self.memory.tier_at(tensor.data_ptr()) is None:
            return None
        ((name, nbytes),) = residency(tensor, self.topology, self.memory).items()
        assert nbytes == tensor.numel() * tensor.element_size()
        return name

    def bytes_of(self, role):
        return {name: size for name, size in self.memory.stats()["roles"].get(role.value, {}).items() if size}

    def pinner(self, upstream):
        return PinnedResource(upstream, register=self.pinned.__setitem__, unregister=self.pinned.pop, where=None)


def used(memory, key="used_bytes"):
    return {name: tier[key] for name, tier in memory.stats()["tiers"].items() if tier[key]}


def ends_in_child(call):
    """Return how a forked child ends: 0 where the call is true, or the negative number of a signal; SIGALRM at last."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if call() else 1)
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
