"""The canonical stacks of one split, built in this one place: what lies over what, and which budgets are charged."""

import threading
from collections.abc import Callable, Mapping

from lightning_cxl.devices.device_type import process_device_type
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.adaptors import BudgetResource
from lightning_cxl.memory.arena import STEP_BYTES, ArenaResource
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, PageNodes, PageSource, allocate_pages
from lightning_cxl.memory.pinned import PinnedResource
from lightning_cxl.memory.pool import PoolResource
from lightning_cxl.memory.resource import Buffer, MemoryResource
from lightning_cxl.memory.striped import StripedResource
from lightning_cxl.memory.tier_pages import TierPages
from lightning_cxl.native._numa import page_nodes
from lightning_cxl.placement.placement import TensorRole

Pinner = Callable[[MemoryResource], PinnedResource]
"""Puts page-locking on a resource."""

_KINDS = {
    TensorRole.ACTIVATIONS: "activations",
    TensorRole.COMPUTE_WEIGHTS: "inherited",
    TensorRole.STAGING: "inherited",
}


class SplitStacks:
    """Serves one tier, or several of which each holds its share of every buffer, in stripes.

    Up to four stacks, built when first asked for. Their source is the tier's leaf under its budget, or a strict
    `StripedResource` over several of those; so every byte is charged to the budget of the tier that holds it.

    ==========  =========================  ==========================================================
    inherited   ``Pool(source)``           pageable weights and staging; forked children see them
    pageable    ``Pool(source)``           masters, moments and gradients of the CPU
    pinned      ``Pool(Pinned(source))``   what a device copies from or to
    activations ``Arena(source)``          pageable activations; pinned ones come from the pinned pool,
                                           because a copy must not cross two registrations
    ==========  =========================  ==========================================================

    A file of memory gets pages of ``source`` itself. Forked children do not see them: what they write there would be
    written for all processes.

    Args:
        tiers: the tiers' pages by name.
        shares: the fraction of each of `tiers`.
        pinner: how memory is page-locked.
        stripe_bytes: granularity, see `StripedResource`.
        reuse_below: buffers of this size and more have pages of their own, which go back to the OS when the buffer
            dies. None: every stack keeps what was given back. The pinned one always does: the driver must not let go of
            memory that a copy may still read, and page-locking is slow.
    """

    def __init__(
        self,
        tiers: Mapping[str, TierPages],
        shares: Mapping[str, float],
        pinner: Pinner,
        stripe_bytes: int = HUGE_PAGE_BYTES,
        reuse_below: int | None = None,
    ) -> None:
        self.tiers = frozenset(tiers)
        self._limit_bytes = sum(pages.budget.limit_bytes for pages in tiers.values())
        self._sources = {inherit: _source(tiers, shares, stripe_bytes, inherit) for inherit in (False, True)}
        self._pinner = pinner
        self._stripe_bytes = stripe_bytes
        self._reuse_below = reuse_below
        self._stacks: dict[str, PoolResource | ArenaResource] = {}
        self._pinned: PinnedResource | None = None
        self._lock = threading.Lock()

    def stack(self, role: TensorRole, pinned: bool, nbytes: int, fd: int = -1) -> MemoryResource:
        """Return what serves a request of `nbytes` for a role, or for a file of memory."""
        kind = _kind(role, pinned)
        if fd >= 0:
            return _FilePages(self._sources[False], fd)
        with self._lock:
            if self._reuse_below is not None and nbytes >= self._reuse_below and kind != "pinned":
                return self._sources[kind == "inherited"]
            if kind not in self._stacks:
                self._stacks[kind] = self._build(kind)
            return self._stacks[kind]

    def lend(self, nbytes: int, role: TensorRole, pinned: bool, alignment: int, full: set[str], fd: int = -1) -> Buffer:
        """Allocate where one of several tiers may have no room for its share, which the others then take.

        Args:
            nbytes: exact size.
            role: what for.
            pinned: page-locked or not.
            alignment: of the first byte.
            full: gets the tiers without room. OUT.
            fd: of the file of memory whose bytes it gets; -1 for none.
        """
        source = self._sources[fd < 0 and _kind(role, pinned) == "inherited"]
        assert isinstance(source, StripedResource)
        with source.lending(full):
            return self.stack(role, pinned, nbytes, fd).allocate(nbytes, alignment=alignment)

    @property
    def pin_failure(self) -> str:
        """Why memory that should be pinned is pageable; empty if none is."""
        return "" if self._pinned is None else self._pinned.failure

    def trim(self) -> None:
        """Give everything unused back to the OS."""
        for stack in self._all():
            stack.trim()

    def end_step(self) -> None:
        """Tell the arena, if there is one, that a training step is over."""
        for stack in self._all():
            if isinstance(stack, ArenaResource):
                stack.end_step()

    def close(self) -> None:
        """Give everything back as soon as its last user is gone."""
        for stack in self._all():
            stack.close()

    def _all(self) -> list[PoolResource | ArenaResource]:
        with self._lock:
            return list(self._stacks.values())

    def _build(self, kind: str) -> PoolResource | ArenaResource:
        if kind == "pinned":
            self._pinned = self._pinner(self._sources[False])
            return PoolResource(self._pinned)
        source = self._sources[kind == "inherited"]
        if kind == "activations":
            # it grows by whole stripes: a stripe cut in two would be two entries of the kernel's table
            step, least = (-(-n // self._stripe_bytes) * self._stripe_bytes for n in (STEP_BYTES, HUGE_PAGE_BYTES))
            return ArenaResource(source, max(1, self._limit_bytes), step_bytes=step, least_bytes=least)
        return PoolResource(source)


class _FilePages:
    """Pages of `source` for one file of memory, straight from the OS: no pool could give them to another file."""

    def __init__(self, source: PageSource, fd: int) -> None:
        self._source = source
        self._fd = fd

    def allocate(self, nbytes: int, *, alignment: int = HUGE_PAGE_BYTES) -> Buffer:
        """Return the bytes of the file; `source` gets them back."""
        return allocate_pages(self._source, nbytes, alignment, self._fd)

    def deallocate(self, buffer: Buffer) -> None:
        """Nothing to do: `source` is asked."""


def _kind(role: TensorRole, pinned: bool) -> str:
    return "pinned" if pinned else _KINDS.get(role, "pageable")


def _source(
    tiers: Mapping[str, TierPages], shares: Mapping[str, float], stripe_bytes: int, inherit: bool
) -> BudgetResource | StripedResource:
    if len(tiers) == 1:
        return next(iter(tiers.values())).source(inherit=inherit)
    children = []
    for name, pages in tiers.items():
        nodes = set(pages.tier.node_ids)
        on_same = sum(shares[other] for other in tiers if nodes.intersection(tiers[other].tier.node_ids))
        children.append((pages.source(inherit=inherit, node_fraction=shares[name] / on_same), shares[name]))
    return StripedResource(children, stripe_bytes, strict=True)


def make_pinner(topology: Topology, *, required: bool = False) -> Pinner:
    """Return what page-locks memory on this machine; pages can move only where there are several nodes."""
    where = where_pages_move(topology)

    def pin(upstream: MemoryResource) -> PinnedResource:
        driver = process_device_type()
        return PinnedResource(upstream, driver.register, driver.unregister, required=required, where=where)

    return pin


def where_pages_move(topology: Topology) -> PageNodes | None:
    """Return what says where pages are; None on a machine with one node, where they cannot move."""
    several = len({node for tier in topology.tiers for node in tier.node_ids}) > 1
    return page_nodes if several else None
