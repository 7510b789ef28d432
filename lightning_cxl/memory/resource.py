"""Host memory as small resources that stack: pages of a node, striped, within a budget, page-locked, pooled.

[Note: Life of a Buffer]
A tensor made by `Buffer.tensor` holds a small native object (`_numa.Range`) that exports the bytes and holds the
`Buffer`; the `Buffer` holds its resource. When the last tensor dies the `Buffer` dies and hands its bytes back with
`resource.deallocate`. That may happen on any thread and inside the garbage collector, so `deallocate` must not take
a lock that user code can hold: pools only append to a deque there and drain it at the next `allocate`. Nothing is
ever closed under a living tensor: closing a resource gives back what is free and lets the rest follow by itself.

[Note: Placing Pages Safely]
Every range of pages goes through `NumaResource.back`: compare the request with what the node has free, prefer the
node, populate in steps, and after each step ask the kernel where the pages are. Pages that lie elsewhere are moved
over (that makes the kernel drop file cache on the node, and never kills); if some still do, the whole range is given
back and `TierFullError` raised. Memory is page-locked after all this. `DECISIONS.md` has the alternatives.
"""

import contextlib
import errno
import mmap
import os
import sys
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from operator import attrgetter

import torch

from lightning_cxl import timing
from lightning_cxl.errors import PinnedMemoryError, PlacementError, TierFullError, warn
from lightning_cxl.machine.topology import Topology
from lightning_cxl.native._numa import NOWHERE, Mapping, Range, gather_pages, page_nodes
from lightning_cxl.text import format_bytes

PAGE_BYTES = mmap.PAGESIZE
HUGE_PAGE_BYTES = 2 * 2**20

PageNodes = Callable[[int, int], dict[int, int]]  # where the pages of (address, nbytes) are: bytes per node id
Parts = list[tuple[int, int]]  # (offset, nbytes) of parts of a mapping, in order


@dataclass(frozen=True, slots=True)
class Span:
    tier: str
    node_id: int
    offset: int
    nbytes: int


class MemoryResource:
    """Owns or adapts byte-addressable memory."""

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> "Buffer":
        """Return a buffer of exactly `nbytes` bytes, with undefined contents."""
        raise NotImplementedError

    def deallocate(self, buffer: "Buffer") -> None:
        """Take the bytes of a dying buffer back. See [Note: Life of a Buffer]."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Buffer:
    """One contiguous range of host memory, covered by its spans in order; keeps alive what it was cut from."""

    address: int
    nbytes: int
    spans: tuple[Span, ...]
    resource: MemoryResource | None
    parent: object = None

    def __del__(self, _finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Hand the bytes back to the resource they came from; while the interpreter ends, leave that to the OS."""
        resource = getattr(self, "resource", None)
        if resource is not None and not _finalizing():
            resource.deallocate(self)

    def slice(self, offset: int, nbytes: int) -> "Buffer":
        """Return a view of ``[offset, offset + nbytes)`` that keeps this buffer alive and owns nothing itself."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"slice [{offset}, {offset + nbytes}) is outside a buffer of {self.nbytes} bytes")
        return Buffer(self.address + offset, nbytes, cut_spans(self.spans, offset, nbytes), None, self)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """Return a contiguous tensor over the bytes from `offset` on, sharing memory and keeping this buffer alive."""
        num_elements = prod(shape)
        needed = num_elements * dtype.itemsize
        if offset < 0 or offset + needed > self.nbytes:
            where = f"{needed} bytes from {offset} on, of {self.nbytes}"
            raise ValueError(f"a tensor of shape {tuple(shape)} and {dtype} needs {where}")
        if num_elements == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(Range(self.address + offset, needed, self), dtype=dtype).view(tuple(shape))


def cut_spans(spans: Sequence[Span], offset: int, nbytes: int) -> tuple[Span, ...]:
    """Return the spans of ``[offset, offset + nbytes)``, with offsets relative to its start."""
    cut = []
    for index in range(max(0, bisect_right(spans, offset, key=attrgetter("offset")) - 1), len(spans)):
        span = spans[index]
        begin, end = max(span.offset, offset), min(span.offset + span.nbytes, offset + nbytes)
        if begin >= end:
            break
        cut.append(Span(span.tier, span.node_id, begin - offset, end - begin))
    return tuple(cut)


def pages_of_file(fd: int, nbytes: int) -> Buffer:
    """Return a buffer that shows a file; what is written to it becomes memory of this process, and never the file's."""
    # other than by ``torch.from_file``, the kernel is not asked to keep memory for writes: the file may be larger
    mapping = Mapping(nbytes, inherit=True)
    mapping.show(0, mapping.nbytes, fd, 0)
    return Buffer(mapping.address, nbytes, (), None, mapping)


class PageSource(MemoryResource):
    """Backs ranges of a mapping with pages of one node, or of several in stripes."""

    tier_name: str
    inherit: bool  # whether forked children see the pages

    def free_bytes(self) -> int:
        """Return how much could be backed now without hurting anyone."""
        raise NotImplementedError

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Back several (offset, nbytes) of `mapping` now, or raise; then parts may stay backed and count for nobody."""
        raise NotImplementedError

    def release(self, spans: Sequence[Span]) -> None:
        """Note that what was backed is not any more. Takes no lock, see [Note: Life of a Buffer]."""

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> "Buffer":
        """Return a mapping of its own, backed; from 2 MiB on it is aligned to a transparent huge page."""
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        whole = whole_pages(nbytes)
        page = HUGE_PAGE_BYTES if whole >= HUGE_PAGE_BYTES else PAGE_BYTES
        try:
            mapping = Mapping(whole, max(alignment, page), self.inherit)
        except (OSError, OverflowError) as error:
            raise TierFullError(
                f"cannot reserve {format_bytes(whole)} of addresses for tier `{self.tier_name}` ({error}). Use a "
                f"smaller job, raise `ulimit -v` and `vm.overcommit_memory`, or lower the budget of `{self.tier_name}`."
            ) from error
        spans = self.back(mapping, [(0, whole)])
        last = spans[-1]
        spans = (*spans[:-1], Span(last.tier, last.node_id, last.offset, nbytes - last.offset))
        return Buffer(mapping.address, nbytes, spans, self, mapping)

    def deallocate(self, buffer: "Buffer") -> None:
        self.release(buffer.spans)  # the mapping dies with its buffer


_STEP_BYTES = 256 * 2**20
_NUM_MOVES = 2


class NumaResource(PageSource):
    """Pages of one node, populated and verified where there are several. See [Note: Placing Pages Safely]."""

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
        self._free_bytes = free_bytes or partial(topology.node_free_bytes, node_id)
        self._single_node = num_nodes(topology) == 1
        self._where = where if where is not None else (None if self._single_node else page_nodes)

    def free_bytes(self) -> int:
        return self._free_bytes()

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        wanted, free = sum(nbytes for _, nbytes in parts), self.free_bytes()
        if wanted > free:
            raise TierFullError(
                f"cannot place {format_bytes(wanted)} on node {self.node_id} of tier `{self.tier_name}`: "
                f"{format_bytes(free)} free. Use a smaller job, or allow another tier."
            )
        for offset, nbytes in parts:
            try:
                mapping.prefer(offset, nbytes, self.node_id)
            except OSError as error:
                if not self._single_node:  # else a container without mbind: there is only one place the pages can go
                    raise PlacementError(
                        f"the kernel refused to place memory on node {self.node_id} of tier `{self.tier_name}` "
                        f"({error}). In a container allow mbind and move_pages (CAP_SYS_NICE), and check the cpuset."
                    ) from error
            huge = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if huge:
                mapping.advise_huge(offset, huge)
            try:
                for begin in range(offset, offset + nbytes, _STEP_BYTES):
                    self._populate(mapping, begin, min(_STEP_BYTES, offset + nbytes - begin))
            except BaseException:
                mapping.discard(offset, nbytes)
                raise
        return tuple(Span(self.tier_name, self.node_id, offset, nbytes) for offset, nbytes in parts)

    def _populate(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        # Linux 6.12 splits a huge page that it could not move and leaves its zero-filled pages unbacked; as small pages
        # they can be moved in a second round, which drops as much file cache as it needs
        for moves_left in range(_NUM_MOVES, -1, -1):
            try:
                mapping.populate(offset, nbytes)
            except OSError as error:
                if error.errno not in (errno.ENOMEM, errno.EFAULT):
                    raise
                raise TierFullError(
                    f"the kernel has no memory for {format_bytes(nbytes)} on tier `{self.tier_name}` ({error}). "
                    f"Use a smaller job, or raise the memory limit of this process (ulimit, cgroup)."
                ) from error
            nodes = {} if self._where is None else ask_nodes(self._where, mapping.address + offset, nbytes)
            misplaced = {node: size for node, size in nodes.items() if node != self.node_id}
            if not misplaced:
                return
            if moves_left:
                with contextlib.suppress(OSError):  # a best effort: the next question to the kernel decides
                    gather_pages(mapping.address + offset, nbytes, self.node_id)
        places = ", ".join(
            f"{format_bytes(size)} {'nowhere' if node == NOWHERE else f'on node {node}'}"
            for node, size in sorted(misplaced.items())
        )
        raise TierFullError(
            f"node {self.node_id} of tier `{self.tier_name}` is full: of {format_bytes(nbytes)} the kernel put "
            f"{places}. They were given back. Free memory on that node, or allow another tier."
        )


def ask_nodes(where: PageNodes, address: int, nbytes: int) -> dict[int, int]:
    """Return what the kernel says about pages; raises PlacementError where it may not be asked."""
    try:
        return where(address, nbytes)
    except OSError as error:
        raise PlacementError(
            f"the kernel refuses to say where pages are ({error}). In a container allow the system call move_pages."
        ) from error


def node_at(address: int) -> int | None:
    return next((node for node in page_nodes(address, 1) if node != NOWHERE), None)


def num_nodes(topology: Topology) -> int:
    return len({node for tier in topology.tiers for node in tier.node_ids})


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class ShareFullError(TierFullError):
    def __init__(self, message: str, tier: str) -> None:
        super().__init__(message)
        self.tier = tier


class StripedResource(PageSource):
    """One contiguous range per buffer; each child backs its weighted share of the stripes.

    The shares run on from one range to the next, so small ranges are spread too. Where a child has no room for its
    share, the others take it, or with `strict` `ShareFullError` is raised. Children with a higher number in `turns` get
    a stripe when all with a lower one are full.
    """

    def __init__(
        self,
        children: Sequence[tuple[PageSource, float]],
        stripe_bytes: int = HUGE_PAGE_BYTES,
        *,
        strict: bool = False,
        turns: Sequence[int] | None = None,
    ) -> None:
        self._children = [child for child, _ in children]
        self._of_tier = {child.tier_name: child for child in self._children}
        self.tier_name = "` and `".join(self._of_tier)
        self.inherit = self._children[0].inherit
        total = sum(weight for _, weight in children)
        self._shares = [weight / total for _, weight in children]
        self._stripe_bytes = stripe_bytes
        self._strict = strict
        self._turns = [0] * len(children) if turns is None else list(turns)
        self._credit = [0.0] * len(children)  # bytes each child is behind its share, over all ranges so far
        self._lock = threading.Lock()

    def free_bytes(self) -> int:
        return sum(child.free_bytes() for child in self._children)

    def release(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._of_tier[span.tier].release((span,))

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        free = [child.free_bytes() for child in self._children]
        while True:
            plan, gained = self._plan(parts, free)
            child, spans = 0, list[Span]()
            try:
                for child, own in enumerate(plan):
                    spans += self._children[child].back(mapping, own) if own else ()
            except BaseException as error:
                for offset, nbytes in parts:
                    mapping.discard(offset, nbytes)
                self.release(spans)
                if not isinstance(error, TierFullError):
                    raise
                if self._strict:
                    raise ShareFullError(str(error), self._children[child].tier_name) from error
                free[child] = 0  # one child fewer each time, so this ends
            else:
                break
        with self._lock:
            self._credit = [before + more for before, more in zip(self._credit, gained, strict=True)]
        return tuple(sorted(spans, key=lambda span: span.offset))

    def _plan(self, parts: Sequence[tuple[int, int]], free: Sequence[int]) -> tuple[list[Parts], list[float]]:
        # each stripe goes to the child furthest behind its share; also returned: how far each falls behind by that
        left, start = list(free), self._credit
        credit = list(start)
        plan: list[Parts] = [[] for _ in left]
        for position, end in ((offset, offset + nbytes) for offset, nbytes in parts):
            while position < end:
                size = min(self._stripe_bytes - position % self._stripe_bytes, end - position)
                able = [child for child in range(len(left)) if self._strict or left[child] >= size]
                turn = min((self._turns[child] for child in able), default=0)
                able = [child for child in able if self._turns[child] == turn]
                share = sum(self._shares[child] for child in able)
                for index in able:
                    credit[index] += size * self._shares[index] / share
                child = max(able, key=credit.__getitem__, default=0)
                if left[child] < size:
                    raise ShareFullError(
                        f"cannot place {format_bytes(sum(nbytes for _, nbytes in parts))} on tier `{self.tier_name}`: "
                        f"its parts have {', '.join(format_bytes(room) for room in free)} free. Use a smaller job, or "
                        "allow another tier.",
                        self._children[child].tier_name,
                    )
                credit[child] -= size
                left[child] -= size
                if plan[child] and sum(plan[child][-1]) == position:
                    plan[child][-1] = (plan[child][-1][0], plan[child][-1][1] + size)
                else:
                    plan[child].append((position, size))
                position += size
        return plan, [after - before for after, before in zip(credit, start, strict=True)]


def stripe_bytes_for(capacity_bytes: int, max_stripes: int = 32768) -> int:
    """Return the smallest stripe that keeps memory of `capacity_bytes` within `max_stripes` stripes.

    Each stripe is a mapping entry of the process, and ``vm.max_map_count`` is 65530 by default. So the capacity is that
    of all tiers together, however buffers are divided over them; half of the table is left for everything else.
    """
    return max(1, -(-capacity_bytes // (max_stripes * HUGE_PAGE_BYTES))) * HUGE_PAGE_BYTES


class BudgetFullError(TierFullError):
    pass


class Budget:
    """How many bytes of one tier may be held from the OS, and are; shared by all resources of the tier. Thread-safe."""

    def __init__(self, tier: str, limit_bytes: int) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._drain()

    def charge(self, nbytes: int) -> None:
        with self._lock:
            held = self._drain()
            if held + nbytes <= self.limit_bytes:
                self._held_bytes = held + nbytes
                return
        raise BudgetFullError(
            f"cannot place {format_bytes(nbytes)} on tier `{self.tier}`: {format_bytes(self.limit_bytes - held)} of "
            f"{format_bytes(self.limit_bytes)} free. Raise the budget of `{self.tier}`, or allow another tier."
        )

    def credit(self, nbytes: int) -> None:
        self._returned.append(nbytes)  # without a lock, see [Note: Life of a Buffer]

    def _drain(self) -> int:
        while self._returned:
            self._held_bytes -= self._returned.popleft()
        return self._held_bytes


class BudgetResource(PageSource):
    """Charges a budget for all that `upstream` backs, in whole pages. Tiers on the same nodes divide their memory."""

    def __init__(self, upstream: PageSource, budget: Budget, node_fraction: float = 1.0) -> None:
        self.tier_name = upstream.tier_name
        self.inherit = upstream.inherit
        self._upstream = upstream
        self._budget = budget
        self._node_fraction = node_fraction

    def free_bytes(self) -> int:
        rest = self._budget.limit_bytes - self._budget.held_bytes
        return min(rest, int(self._upstream.free_bytes() * self._node_fraction))

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        nbytes = sum(nbytes for _, nbytes in parts)
        self._budget.charge(nbytes)
        try:
            return self._upstream.back(mapping, parts)
        except BaseException:
            self._budget.credit(nbytes)
            raise

    def release(self, spans: Sequence[Span]) -> None:
        self._budget.credit(sum(whole_pages(span.nbytes) for span in spans))


# Page-lock memory and register it with the device's driver, so that copies can run beside compute.
#
# Pin after placing: see [Note: Placing Pages Safely]. A long-term pin moves pages out of a zone of movable memory,
# which CXL memory often is, silently to another node; so the kernel is asked again afterwards.
# One copy must not cross the border of two registrations, so a buffer is one. The driver fails above 128 GiB, where the
# size of its page tables no longer fits an int (open-gpu-kernel-modules, PR 1234); no tensor is as large.


class PinnedResource(MemoryResource):
    """Page-locks every buffer of `upstream`; put a pool above it, for this is slow.

    The first failure makes it pass on pageable memory from then on, with one warning.
    """

    def __init__(
        self,
        upstream: MemoryResource,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        required: bool = False,
        where: PageNodes | None = page_nodes,
    ) -> None:
        self.failure = ""  # why memory stays pageable from now on; empty as long as it is page-locked
        self._upstream = upstream
        self._required = required
        self._register = register
        self._unregister = unregister
        self._where = where
        self._pid = os.getpid()

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        if not self.failure and nbytes:
            try:
                return self._allocate_pinned(nbytes, alignment)
            except PinnedMemoryError as error:
                if self._required:
                    raise
                self.failure = str(error)
            warn(f"{self.failure} Memory stays pageable: copies to and from it wait.")
        return self._upstream.allocate(nbytes, alignment=alignment)

    def deallocate(self, buffer: Buffer) -> None:
        if os.getpid() == self._pid:  # a forked child has neither the memory nor the driver
            self._unregister(buffer.address)
            timing.add("pinned_bytes", -buffer.nbytes)

    def _allocate_pinned(self, nbytes: int, alignment: int) -> Buffer:
        inner = self._upstream.allocate(nbytes, alignment=max(alignment, PAGE_BYTES))
        try:
            self._register(inner.address, nbytes)
        except PinnedMemoryError as error:
            raise PinnedMemoryError(
                f"cannot page-lock {format_bytes(nbytes)} for the device: {error}. Raise the limit `ulimit -l` (of a "
                "container `--ulimit memlock=-1`) or the memory of the container or of WSL, or set pin_memory=False."
            ) from error
        timing.add("pinned_bytes", nbytes)
        buffer = Buffer(inner.address, nbytes, inner.spans, self, inner)
        nodes = Counter[int]()
        for span in buffer.spans:
            nodes[span.node_id] += span.nbytes
        found = {} if self._where is None else self._where(buffer.address, nbytes)
        moved = {node: size - nodes[node] for node, size in found.items() if size > nodes[node]}
        if moved:
            raise PinnedMemoryError(
                f"page-locking moved {format_bytes(sum(moved.values()))} of {format_bytes(nbytes)} on nodes "
                f"{sorted(nodes)} to nodes {sorted(moved)}: their memory is online as movable. Bring it online with "
                f"`daxctl online-memory --no-movable`, or set pin_memory=False."
            )
        return buffer


# Pools, and which parts of their address ranges are free.

_GRANULE_BYTES = 64  # a cache line; without it gaps of a few bytes would pile up between blocks


class BlockList:
    """Offsets handed out from ranges in multiples of 64 bytes, coalesced when they come back.

    Neighbouring ranges are never merged: a block always lies in one range. Not thread-safe.
    """

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (nbytes, offset) of free blocks, sorted
        self._size_at: dict[int, int] = {}  # free block: offset -> nbytes
        self._start_of: dict[int, int] = {}  # free block: end -> offset
        self._used: dict[int, int] = {}  # handed out: offset -> nbytes
        self._ranges: dict[int, int] = {}  # offset -> nbytes

    def add_range(self, offset: int, nbytes: int) -> None:
        self._ranges[offset] = nbytes
        self._insert(offset, nbytes)

    def free_ranges(self) -> list[int]:
        return [offset for offset, nbytes in self._ranges.items() if self._size_at.get(offset) == nbytes]

    def drop_range(self, offset: int) -> int:
        nbytes = self._ranges[offset]
        if self._size_at.get(offset) != nbytes:
            raise ValueError(f"the range at {offset} is in use")
        self._remove(offset, nbytes)
        return self._ranges.pop(offset)

    def allocate(self, nbytes: int, alignment: int) -> int | None:
        """Take at least 1 byte from the tightest free block; None when no free block is large enough."""
        nbytes = -(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES
        for index in range(bisect_left(self._by_size, (nbytes, -1)), len(self._by_size)):
            size, block = self._by_size[index]
            offset = -(-block // alignment) * alignment
            if offset + nbytes <= block + size:
                break
        else:
            return None
        self._remove(block, size)
        if offset > block:
            self._insert(block, offset - block)
        if block + size > offset + nbytes:
            self._insert(offset + nbytes, block + size - offset - nbytes)
        self._used[offset] = nbytes
        return offset

    def free(self, offset: int) -> None:
        nbytes = self._used.pop(offset)
        before = self._start_of.get(offset)
        if before is not None and offset not in self._ranges:
            size = self._size_at[before]
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        end = offset + nbytes
        after = self._size_at.get(end)
        if after is not None and end not in self._ranges:
            self._remove(end, after)
            nbytes += after
        self._insert(offset, nbytes)

    def _insert(self, offset: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, offset))
        self._size_at[offset] = nbytes
        self._start_of[offset + nbytes] = offset

    def _remove(self, offset: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, offset))]
        del self._size_at[offset]
        del self._start_of[offset + nbytes]


class _Slabs(BlockList):
    """Cuts requests from the tightest free block of any slab; offsets are addresses."""

    def __init__(self) -> None:
        super().__init__()
        self._slabs: dict[int, Buffer] = {}  # by address
        self._starts: list[int] = []  # sorted

    def add(self, slab: Buffer) -> None:
        self._slabs[slab.address] = slab
        insort(self._starts, slab.address)
        self.add_range(slab.address, slab.nbytes)

    def take(self, nbytes: int, alignment: int, resource: MemoryResource) -> Buffer | None:
        address = self.allocate(nbytes, alignment)
        if address is None:
            return None
        slab = self._slabs[self._starts[bisect_right(self._starts, address) - 1]]
        return Buffer(address, nbytes, cut_spans(slab.spans, address - slab.address, nbytes), resource)

    def drop_largest(self) -> int:
        """Let go of the largest slab of which nothing is in use and return its size; 0 where there is none."""
        free = self.free_ranges()
        if not free:
            return 0
        address = max(free, key=lambda address: self._slabs[address].nbytes)
        self._starts.remove(address)
        del self._slabs[address]
        return self.drop_range(address)


_SLACK_FRACTION = 0.125
_UNLUCKY_FRACTION = 0.5  # the slack below the peak: see `PoolResource`


class PoolResource(MemoryResource):
    """Pools the buffers ("slabs") of `upstream`. Thread-safe.

    Small requests are cut from shared slabs. One of at least a quarter of `slab_bytes` is cut from the tightest free
    block that earlier large ones have left behind, and gets a slab of exactly its size where none is large enough.

    Free slabs are kept. At a new peak of use they give way to a new slab where the pool would otherwise hold more than
    12.5 % and one shared slab above that peak. Below it a new slab means that the free ones were cut unluckily, and
    they give way at 50 % only: less would give back and take the same slabs in every step. `trim` gives all of them
    back, and so does a request that `upstream` could not serve otherwise.
    """

    def __init__(self, upstream: MemoryResource, slab_bytes: int = 16 * 2**20) -> None:
        self._lock = threading.Lock()
        self._dead: deque[tuple[int, int]] = deque()  # (address, nbytes); noted without the lock
        self._closed = False
        self._upstream = upstream
        self._slab_bytes = slab_bytes
        self._large_bytes = slab_bytes // 4
        self._small, self._large = _Slabs(), _Slabs()
        self._used_bytes = self._held_bytes = self._peak_bytes = 0

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        with self._lock:
            self._drain()
            is_large = nbytes >= self._large_bytes
            slabs = self._large if is_large else self._small
            buffer = slabs.take(nbytes, alignment, self)
            if buffer is None:
                slabs.add(self._new_slab(nbytes, alignment) if is_large else self._new_shared_slab(nbytes, alignment))
                buffer = slabs.take(nbytes, alignment, self)
                assert buffer is not None
            self._used_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            return buffer

    def deallocate(self, buffer: Buffer) -> None:
        self._dead.append((buffer.address, buffer.nbytes))
        if self._closed:  # nobody may ever call again
            self._reclaim_late()

    def trim(self) -> None:
        with self._lock:
            self._drain()
            self._release_free()

    def close(self) -> None:
        """Give back what is free now, and the rest as its last buffers die. Living buffers stay valid."""
        self._closed = True
        self.trim()
        self._reclaim_late()

    def _reclaim_late(self) -> None:
        # A thread that holds the lock reads the deque again after letting go, so a failed attempt loses nothing;
        # waiting here could wait for this very thread.
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._drain()
                self._release_free()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._dead:
            address, nbytes = self._dead.popleft()
            self._used_bytes -= nbytes
            (self._large if nbytes >= self._large_bytes else self._small).free(address)

    def _new_shared_slab(self, nbytes: int, alignment: int) -> Buffer:
        for size in (self._slab_bytes, self._large_bytes):
            try:
                return self._new_slab(size, max(alignment, PAGE_BYTES))
            except TierFullError:
                continue
        return self._new_slab(nbytes, max(alignment, PAGE_BYTES))  # the end of a budget may still hold the request

    def _new_slab(self, nbytes: int, alignment: int) -> Buffer:
        nbytes = whole_pages(nbytes)
        wanted = self._used_bytes + nbytes
        slack = _SLACK_FRACTION if wanted > self._peak_bytes else _UNLUCKY_FRACTION
        allowed = int(max(self._peak_bytes, wanted) * (1 + slack)) + self._slab_bytes
        while self._held_bytes + nbytes > allowed and self._release_one():
            pass
        try:
            slab = self._upstream.allocate(nbytes, alignment=alignment)
        except TierFullError:
            held = self._held_bytes
            self._release_free()
            if self._held_bytes == held:
                raise
            slab = self._upstream.allocate(nbytes, alignment=alignment)
        self._held_bytes += slab.nbytes
        return slab

    def _release_one(self) -> bool:
        """Give the largest free slab back, shared ones last; return whether there was one."""
        nbytes = self._large.drop_largest() or self._small.drop_largest()
        self._held_bytes -= nbytes
        return nbytes > 0

    def _release_free(self) -> None:
        while self._release_one():
            pass
