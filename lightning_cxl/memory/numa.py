"""The leaf resource: memory of one NUMA node, placed so that it is really there and nothing is ever killed for it.

[Note: Placing Pages Safely]
``MPOL_BIND`` to a node that is too full ends a process with SIGKILL, and ``MPOL_PREFERRED`` goes elsewhere without a
word. So every range of pages goes through `NumaResource.commit`: compare the request with what the node has free,
prefer the node, populate in steps, and after each step ask the kernel where the pages are. Pages that lie elsewhere
are moved over (that makes the kernel drop file cache on the node, and never kills); if some still do, the whole range
is given back and `TierFullError` raised. Pinning comes after all this, see `memory/pinned.py`.
"""

import contextlib
import errno
import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_cxl.errors import PlacementError, TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.resource import Buffer, MemoryResource, Span
from lightning_cxl.native._numa import NOWHERE, Mapping, gather_pages, page_nodes
from lightning_cxl.units import format_bytes

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 * 2**20
_STEP_BYTES = 256 * 2**20
_NUM_MOVES = 2

PageNodes = Callable[[int, int], dict[int, int]]
"""Where the pages of (address, nbytes) are: bytes per node id."""


class PageSource(MemoryResource, Protocol):
    """What backs ranges of a mapping with memory: one node, or several in stripes."""

    tier_name: str
    inherit: bool

    def free_bytes(self) -> int:
        """Return how much could be committed now without hurting anyone."""

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Back ``[offset, offset + nbytes)`` of `mapping` now, or leave it unbacked and raise.

        Returns:
            Which node got which part, offsets relative to the mapping. Whoever discards or unmaps it calls `release`.

        Raises:
            TierFullError: not enough free memory, or the pages landed elsewhere.
            PlacementError: the kernel refuses to place pages.
        """

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Do what `commit` does for several (offset, nbytes), which the caller has just compared with what is free.

        Parts that were backed before one failed may stay so, and do not count as committed.
        """

    def release(self, spans: Sequence[Span]) -> None:
        """Note that what was committed is not backed any more. Takes no lock, see [Note: Life of a Buffer]."""


class NumaResource:
    """Allocates from one node, straight from the OS: whole pages, populated, verified.

    Args:
        tier_name: tier the bytes are accounted to.
        node_id: NUMA node of the pages.
        topology: answers how much is free.
        inherit: whether forked children see the memory.
        free_bytes: replaces the topology's answer to "how much is free on the node".
        where: replaces the kernel's answer to "where are these pages"; by default it is asked only when the machine
            has more than one node.
    """

    def __init__(
        self,
        tier_name: str,
        node_id: int,
        topology: Topology,
        *,
        inherit: bool = False,
        free_bytes: Callable[[], int] | None = None,
        where: PageNodes | None = None,
    ) -> None:
        self.tier_name = tier_name
        self.node_id = node_id
        self.inherit = inherit
        self._topology = topology
        self._free_bytes = free_bytes
        self._single_node = len({node for tier in topology.tiers for node in tier.node_ids}) == 1
        self._where = where if where is not None else (None if self._single_node else page_nodes)

    def free_bytes(self) -> int:
        """Return what the node and the process's limits leave, head-room subtracted."""
        if self._free_bytes is not None:
            return self._free_bytes()
        return self._topology.node_free_bytes(self.node_id)

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return `nbytes` of this node's memory, see `allocate_pages`."""
        return allocate_pages(self, nbytes, alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Nothing to do: the mapping dies with its buffer."""

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Back a range with this node's pages. See [Note: Placing Pages Safely]."""
        free = self.free_bytes()
        if nbytes > free:
            raise TierFullError(
                f"cannot place {format_bytes(nbytes)} on node {self.node_id} of tier `{self.tier_name}`: "
                f"{format_bytes(free)} free. Use a smaller job, or allow another tier."
            )
        return self.back(mapping, [(offset, nbytes)])

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Back parts of a range that were compared with what is free."""
        return tuple(self._back_part(mapping, offset, nbytes) for offset, nbytes in parts)

    def release(self, spans: Sequence[Span]) -> None:
        """Nothing to do: the kernel counts what is free."""

    def _back_part(self, mapping: Mapping, offset: int, nbytes: int) -> Span:
        self._prefer(mapping, offset, nbytes)
        huge = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if huge:
            mapping.advise_huge(offset, huge)
        try:
            for begin in range(offset, offset + nbytes, _STEP_BYTES):
                self._populate(mapping, begin, min(_STEP_BYTES, offset + nbytes - begin))
        except BaseException:
            mapping.discard(offset, nbytes)
            raise
        return Span(self.tier_name, self.node_id, offset, nbytes)

    def _prefer(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        try:
            mapping.prefer(offset, nbytes, self.node_id)
        except OSError as error:
            if self._single_node:
                return  # a container without mbind: there is only one place the pages can go
            raise PlacementError(
                f"the kernel refused to place memory on node {self.node_id} of tier `{self.tier_name}` ({error}). In a "
                f"container allow the system calls mbind and move_pages (CAP_SYS_NICE), and check the cpuset."
            ) from error

    def _populate(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        self._back(mapping, offset, nbytes)
        if self._where is None:
            return
        misplaced = self._misplaced(mapping, offset, nbytes)
        # Linux 6.12 splits a huge page that it could not move and leaves its zero-filled pages unbacked; as small pages
        # they can be moved in a second round, which drops as much file cache as it needs
        for _ in range(_NUM_MOVES if misplaced else 0):
            with contextlib.suppress(OSError):  # a best effort: the next look decides
                gather_pages(mapping.address + offset, nbytes, self.node_id)
            self._back(mapping, offset, nbytes)
            misplaced = self._misplaced(mapping, offset, nbytes)
            if not misplaced:
                return
        if misplaced:
            nodes = ", ".join(
                f"{format_bytes(size)} {'nowhere' if node == NOWHERE else f'on node {node}'}"
                for node, size in sorted(misplaced.items())
            )
            raise TierFullError(
                f"node {self.node_id} of tier `{self.tier_name}` is full: of {format_bytes(nbytes)} the kernel put "
                f"{nodes}. They were given back. Free memory on that node, or allow another tier."
            )

    def _back(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        try:
            mapping.populate(offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOMEM, errno.EFAULT):
                raise
            raise TierFullError(
                f"the kernel has no memory for {format_bytes(nbytes)} on tier `{self.tier_name}` ({error}). "
                f"Use a smaller job, or raise the memory limit of this process (ulimit, cgroup)."
            ) from error

    def _misplaced(self, mapping: Mapping, offset: int, nbytes: int) -> dict[int, int]:
        """Return the bytes that are not on the node, per node they are on."""
        assert self._where is not None
        try:
            nodes = self._where(mapping.address + offset, nbytes)
        except OSError as error:
            raise PlacementError(
                f"the kernel refuses to say where pages are ({error}). In a container allow the system call move_pages."
            ) from error
        return {node: size for node, size in nodes.items() if node != self.node_id}


def allocate_pages(source: PageSource, nbytes: int, alignment: int, fd: int = -1) -> Buffer:
    """Map `nbytes`, back them from `source`, and return the buffer that owns the mapping; `source` gets it back.

    From 2 MiB on the start is aligned to a transparent huge page. Zero bytes need no memory. With `fd`, a file of
    memory in whole pages, the bytes are those of the file, which other processes may map, too.

    Raises:
        TierFullError: no addresses or not enough free memory; nothing stays mapped.
    """
    if nbytes == 0:
        return Buffer(0, 0, (), None)
    whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    page = HUGE_PAGE_BYTES if whole >= HUGE_PAGE_BYTES else PAGE_BYTES
    mapping = reserve(whole, max(alignment, page), source, fd)
    spans = source.commit(mapping, 0, whole)
    last = spans[-1]
    spans = (*spans[:-1], Span(last.tier, last.node_id, last.offset, nbytes - last.offset))
    return Buffer(mapping.address, nbytes, spans, source, mapping)


def reserve(nbytes: int, alignment: int, source: PageSource, fd: int = -1) -> Mapping:
    """Reserve addresses for `source` to back, those of a file of memory where there is one.

    Raises:
        TierFullError: the address space of the process is limited or full.
    """
    try:
        return Mapping(nbytes, alignment, source.inherit, fd)
    except (OSError, OverflowError) as error:
        raise TierFullError(
            f"cannot reserve {format_bytes(nbytes)} of addresses for tier `{source.tier_name}` ({error}). Use a "
            f"smaller job, raise `ulimit -v` and `vm.overcommit_memory`, or lower the budget of `{source.tier_name}`."
        ) from error


def node_at(address: int) -> int | None:
    """Return the node of the page at an address; None where no page backs it yet."""
    return next((node for node in page_nodes(address, 1) if node != NOWHERE), None)
