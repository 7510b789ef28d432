"""The leaf resource: memory of one NUMA node, placed so that it is really there and nothing is ever killed for it.

[Note: Placing Pages Safely]
``MPOL_BIND`` to a node that is too full ends a process with SIGKILL, and ``MPOL_PREFERRED`` goes elsewhere without a
word. So every range of pages goes through `NumaResource.commit`: compare the request with what the node has free,
prefer the node, populate in steps, and after each step ask the kernel where the pages are. Pages that lie elsewhere
are moved over (that makes the kernel drop file cache on the node, and never kills); if some still do, the whole range
is given back and `TierFullError` raised. Pinning comes after all this, see `memory/numa.py`.
"""

import contextlib
import errno
import mmap
import os
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from lightning_cxl.errors import LightningCXLWarning, PinnedMemoryError, PlacementError, TierFullError
from lightning_cxl.machine.topology import Tier, Topology
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


def allocate_pages(source: PageSource, nbytes: int, alignment: int) -> Buffer:
    """Map `nbytes`, back them from `source`, and return the buffer that owns the mapping; `source` gets it back.

    From 2 MiB on the start is aligned to a transparent huge page. Zero bytes need no memory.
    """
    if nbytes == 0:
        return Buffer(0, 0, (), None)
    whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    page = HUGE_PAGE_BYTES if whole >= HUGE_PAGE_BYTES else PAGE_BYTES
    mapping = reserve(whole, max(alignment, page), source)
    spans = source.commit(mapping, 0, whole)
    last = spans[-1]
    spans = (*spans[:-1], Span(last.tier, last.node_id, last.offset, nbytes - last.offset))
    return Buffer(mapping.address, nbytes, spans, source, mapping)


def reserve(nbytes: int, alignment: int, source: PageSource) -> Mapping:
    """Reserve addresses for `source` to back."""
    try:
        return Mapping(nbytes, alignment, source.inherit)
    except (OSError, OverflowError) as error:
        raise TierFullError(
            f"cannot reserve {format_bytes(nbytes)} of addresses for tier `{source.tier_name}` ({error}). Use a "
            f"smaller job, raise `ulimit -v` and `vm.overcommit_memory`, or lower the budget of `{source.tier_name}`."
        ) from error


def node_at(address: int) -> int | None:
    """Return the node of the page at an address; None where no page backs it yet."""
    return next((node for node in page_nodes(address, 1) if node != NOWHERE), None)


# ----------------------------------------------------------------------------------------------------
# Stripe contiguous memory by weight over several nodes or tiers, so that their bandwidths add up.

Parts = list[tuple[int, int]]
"""(offset, nbytes) of parts of a mapping, in order."""


class _Thread(threading.local):
    full: set[str] | None = None  # what `lending` was given on this thread


class StripedResource:
    """One contiguous range per buffer; each child backs its weighted share of the stripes.

    The kernel's own weighted interleave needs root and one system-wide set of weights; binding sub-ranges needs
    neither, but each border costs the kernel an entry of a limited table (see `stripe_bytes_for`). The children's turns
    run on from one range to the next, so small ranges are spread too.

    Args:
        children: what backs the stripes, and weights. They share inheritance. Those of one tier have nothing to
            release; those that have are of a tier each.
        strict: refuse where a child has no room for its share, except in `lending`. Otherwise it leaves its share to
            the others.
        turns: not for strict ones, a number for each child: those with a higher one get a stripe when all with a lower
            one have no room for it. None: all take part from the start.
    """

    def __init__(
        self,
        children: Sequence[tuple[PageSource, float]],
        stripe_bytes: int = HUGE_PAGE_BYTES,
        *,
        strict: bool = False,
        turns: Sequence[int] | None = None,
    ) -> None:
        if not children or any(not weight > 0 for _, weight in children):
            raise ValueError("a StripedResource needs at least one child, and weights above zero")
        if stripe_bytes < HUGE_PAGE_BYTES or stripe_bytes % HUGE_PAGE_BYTES:
            raise ValueError(f"stripe_bytes must be a multiple of {HUGE_PAGE_BYTES}, got {stripe_bytes}")
        self._children = [child for child, _ in children]
        self._of_tier = {child.tier_name: child for child in self._children}
        self.tier_name = "` and `".join(self._of_tier)
        self.inherit = self._children[0].inherit
        total = sum(weight for _, weight in children)
        self._shares = [weight / total for _, weight in children]
        self._stripe_bytes = stripe_bytes
        self._strict = strict
        self._turns = [0] * len(children) if turns is None else list(turns)
        self._thread = _Thread()
        self._credit = [0.0] * len(children)  # bytes each child is behind its share, over all ranges so far
        self._lock = threading.Lock()

    @contextmanager
    def lending(self, full: set[str]) -> Iterator[None]:
        """Let children without room leave their share to the others, in this thread, until exit.

        It reaches through the pools and adaptors that lie between whoever decides this and here.
        """
        self._thread.full = full
        try:
            yield
        finally:
            self._thread.full = None

    def free_bytes(self) -> int:
        """Return what all children have free together."""
        return sum(child.free_bytes() for child in self._children)

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return `nbytes` of contiguous memory striped over the children."""
        return allocate_pages(self, nbytes, alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Tell the children what they do not back any more; the mapping dies with its buffer."""
        self.release(buffer.spans)

    def release(self, spans: Sequence[Span]) -> None:
        """Tell the children what they do not back any more."""
        for span in spans:
            self._of_tier[span.tier].release((span,))

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Back a range stripe by stripe."""
        return self.back(mapping, [(offset, nbytes)])

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Back parts of a range stripe by stripe."""
        lend = not self._strict or self._thread.full is not None
        free = [child.free_bytes() for child in self._children]
        while True:
            plan, gained, full = self._plan(parts, free, lend)
            child, spans = 0, list[Span]()
            try:
                for child, own in enumerate(plan):
                    spans += self._children[child].back(mapping, own) if own else ()
            except BaseException as error:
                for offset, nbytes in parts:
                    mapping.discard(offset, nbytes)
                self.release(spans)
                if not lend or not isinstance(error, TierFullError):
                    raise
                free[child] = 0  # one child fewer each time, so this ends
            else:
                break
        with self._lock:
            self._credit = [before + more for before, more in zip(self._credit, gained, strict=True)]
        if self._thread.full is not None:
            self._thread.full.update(self._children[child].tier_name for child in full)
        return tuple(sorted(spans, key=lambda span: span.offset))

    def _plan(
        self, parts: Sequence[tuple[int, int]], free: Sequence[int], lend: bool
    ) -> tuple[list[Parts], list[float], set[int]]:
        """Give each stripe to the child furthest behind its share.

        Returns:
            The parts of each child; how far each falls behind by that; the children that had no room for a stripe.
        """
        left, start = list(free), self._credit
        credit = list(start)
        plan: list[Parts] = [[] for _ in left]
        full: set[int] = set()
        everyone = range(len(left))
        for position, end in ((offset, offset + nbytes) for offset, nbytes in parts):
            while position < end:
                size = min(self._stripe_bytes - position % self._stripe_bytes, end - position)
                able = [child for child in everyone if left[child] >= size] if lend else everyone
                turn = min((self._turns[child] for child in able), default=0)
                able = [child for child in able if self._turns[child] == turn]
                full.update(child for child in everyone if left[child] < size)
                share = sum(self._shares[child] for child in able)
                for index in able:
                    credit[index] += size * self._shares[index] / share
                child = max(able, key=credit.__getitem__, default=0)
                if left[child] < size:
                    raise TierFullError(self._full_message(sum(nbytes for _, nbytes in parts), free))
                credit[child] -= size
                left[child] -= size
                if plan[child] and sum(plan[child][-1]) == position:
                    plan[child][-1] = (plan[child][-1][0], plan[child][-1][1] + size)
                else:
                    plan[child].append((position, size))
                position += size
        return plan, [after - before for after, before in zip(credit, start, strict=True)], full

    def _full_message(self, nbytes: int, free: Sequence[int]) -> str:
        return (
            f"cannot place {format_bytes(nbytes)} on tier `{self.tier_name}`: its parts have "
            f"{', '.join(format_bytes(room) for room in free)} free. Use a smaller job, or allow another tier."
        )


def stripe_bytes_for(capacity_bytes: int, max_stripes: int = 32768) -> int:
    """Return the smallest stripe that keeps memory of `capacity_bytes` within `max_stripes` stripes.

    Each stripe is a mapping entry of the process, and ``vm.max_map_count`` is 65530 by default. So the capacity is that
    of all tiers together, however buffers are divided over them; half of the table is left for everything else.
    """
    return max(1, -(-capacity_bytes // (max_stripes * HUGE_PAGE_BYTES))) * HUGE_PAGE_BYTES


# ----------------------------------------------------------------------------------------------------
# Page-lock memory and register it with the device's driver, so that copies can run beside compute.
#
# Pin after placing: see [Note: Placing Pages Safely]. A long-term pin moves pages out of a zone of movable memory,
# which CXL memory often is, silently to another node; so the kernel is asked again afterwards.

# One copy must not cross the border of two registrations, so a chunk is larger than any sane tensor; the driver fails
# above 128 GiB, where the size of its page tables no longer fits an int (open-gpu-kernel-modules, PR 1234).
_CHUNK_BYTES = 16 * 2**30


class PinnedResource:
    """Page-locks every buffer of `upstream`; put a pool above it, for this is slow.

    The first failure makes it pass on pageable memory from then on, with one warning.

    Args:
        where: asks where pages are, after pinning; None on a machine where they can only be in one place.
    """

    def __init__(
        self,
        upstream: MemoryResource,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        required: bool = False,
        where: PageNodes | None = page_nodes,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self.failure = ""
        """Why memory stays pageable from now on; empty as long as it is page-locked."""
        self._upstream = upstream
        self._required = required
        self._register = register
        self._unregister = unregister
        self._where = where
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[int, list[int]] = {}  # buffer address -> addresses registered
        self._pid = os.getpid()

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return a pinned buffer, or a pageable one after a failure."""
        if not self.failure and nbytes:
            try:
                return self._allocate_pinned(nbytes, alignment)
            except PinnedMemoryError as error:
                if self._required:
                    raise
                self.failure = str(error)
            warnings.warn(
                f"{self.failure} Memory stays pageable: copies to and from it wait.", LightningCXLWarning, stacklevel=2
            )
        return self._upstream.allocate(nbytes, alignment=alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Unregister a dying buffer; `upstream` gets its own buffer back afterwards by itself."""
        for address in self._chunks.pop(buffer.address, ()):
            if os.getpid() == self._pid:  # a forked child has neither the memory nor the driver
                self._unregister(address)

    def _allocate_pinned(self, nbytes: int, alignment: int) -> Buffer:
        inner = self._upstream.allocate(nbytes, alignment=max(alignment, PAGE_BYTES))
        # from here on the new buffer's death unregisters what was registered
        chunks = self._chunks[inner.address] = []
        buffer = Buffer(inner.address, nbytes, inner.spans, self, inner)
        for offset in range(0, nbytes, self._chunk_bytes):
            with page_locking(nbytes):
                self._register(buffer.address + offset, min(self._chunk_bytes, nbytes - offset))
            chunks.append(buffer.address + offset)
        check_nodes(buffer, self._where)
        return buffer


@contextmanager
def page_locking(nbytes: int) -> Iterator[None]:
    """Return a region in which `nbytes` are page-locked: a refusal says there how much, and what to do."""
    try:
        yield
    except PinnedMemoryError as error:
        raise PinnedMemoryError(
            f"cannot page-lock {format_bytes(nbytes)} for the device: {error}. Raise the limit `ulimit -l` (of a "
            "container `--ulimit memlock=-1`) or the memory of the container or of WSL, or set pin_memory=False."
        ) from error


def check_nodes(buffer: Buffer, where: PageNodes | None) -> None:
    """Check that a buffer that has been page-locked lies where it did before.

    Args:
        where: asks where pages are; None where they can only be in one place.
    """
    if where is None:
        return
    nodes = Counter[int]()
    for span in buffer.spans:
        nodes[span.node_id] += span.nbytes
    found = where(buffer.address, buffer.nbytes)
    moved = {node: size - nodes[node] for node, size in found.items() if size > nodes[node]}
    if moved:
        raise PinnedMemoryError(
            f"page-locking moved {format_bytes(sum(moved.values()))} of {format_bytes(buffer.nbytes)} on nodes "
            f"{sorted(nodes)} to nodes {sorted(moved)}: their memory is online as movable. Bring it online with "
            f"`daxctl online-memory --no-movable`, or set pin_memory=False."
        )


# ----------------------------------------------------------------------------------------------------
# Adaptors over a resource that keep count: the byte budget of a tier.


class BudgetFullError(TierFullError):
    """A tier's budget is what a request does not fit in."""


class Budget:
    """How many bytes of one tier may be held from the OS, and are; shared by every stack of the tier.

    Thread-safe. `credit` takes no lock: it is called by dying buffers, see [Note: Life of a Buffer].
    """

    def __init__(self, tier: str, limit_bytes: int) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self._held_bytes = 0
        self._returned: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def held_bytes(self) -> int:
        """Bytes held from the OS now."""
        with self._lock:
            return self._settle()

    def charge(self, nbytes: int) -> None:
        """Count `nbytes` as held."""
        with self._lock:
            held = self._settle()
            if held + nbytes <= self.limit_bytes:
                self._held_bytes = held + nbytes
                return
        raise BudgetFullError(
            f"cannot place {format_bytes(nbytes)} on tier `{self.tier}`: {format_bytes(self.limit_bytes - held)} of "
            f"{format_bytes(self.limit_bytes)} free. Raise the budget of `{self.tier}`, or allow another tier."
        )

    def credit(self, nbytes: int) -> None:
        """Count `nbytes` as given back."""
        self._returned.append(nbytes)

    def _settle(self) -> int:
        while self._returned:
            self._held_bytes -= self._returned.popleft()
        return self._held_bytes


class BudgetResource:
    """Charges a budget for all that `upstream` backs, in whole pages.

    Args:
        node_fraction: of the free memory of `upstream`, what this may use: tiers on the same nodes divide it.
    """

    def __init__(self, upstream: PageSource, budget: Budget, node_fraction: float = 1.0) -> None:
        self.tier_name = upstream.tier_name
        self.inherit = upstream.inherit
        self._upstream = upstream
        self._budget = budget
        self._node_fraction = node_fraction

    def free_bytes(self) -> int:
        """Return what both the budget and `upstream` have free."""
        rest = self._budget.limit_bytes - self._budget.held_bytes
        return min(rest, int(self._upstream.free_bytes() * self._node_fraction))

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return memory of `upstream` if the budget allows it."""
        return allocate_pages(self, nbytes, alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Return the bytes of a dying buffer to the budget; its mapping dies with it."""
        self.release(buffer.spans)

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Charge and back a range."""
        with self._charged(nbytes):
            return self._upstream.commit(mapping, offset, nbytes)

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Charge and back parts of a range that were compared with what is free."""
        with self._charged(sum(nbytes for _, nbytes in parts)):
            return self._upstream.back(mapping, parts)

    def release(self, spans: Sequence[Span]) -> None:
        """Return what was committed to the budget."""
        self._budget.credit(sum(whole_pages(span.nbytes) for span in spans))

    @contextmanager
    def _charged(self, nbytes: int) -> Iterator[None]:
        self._budget.charge(nbytes)
        try:
            yield
        except BaseException:
            self._budget.credit(nbytes)
            raise


def whole_pages(nbytes: int) -> int:
    """Return `nbytes` rounded up to whole 4 KiB pages, what the OS really gives."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


# ----------------------------------------------------------------------------------------------------
# One tier as stacks use it: where its pages come from, its one budget, and what it still has free.

_FREE_MAX_AGE_S = 0.5  # reading /proc for every placement would cost more than the allocation


class MakeLeaf(Protocol):
    """Makes the leaf of a tier."""

    def __call__(self, tier: Tier, *, inherit: bool = False) -> PageSource:
        """Return a leaf whose memory forked children inherit or not."""


class TierPages:
    """Gives sources of a tier's pages, which all charge its one budget.

    Args:
        leaf: makes the `NumaResource` or `StripedResource` of the tier, whose memory forked children inherit or not.
    """

    def __init__(self, tier: Tier, leaf: MakeLeaf, budget_bytes: int) -> None:
        self.tier = tier
        self.budget = Budget(tier.name, budget_bytes)
        self._leaves = {inherit: leaf(tier, inherit=inherit) for inherit in (False, True)}
        self._os_free = (float("-inf"), 0)  # when, bytes
        self._held_then = 0

    def source(self, *, inherit: bool, node_fraction: float = 1.0) -> BudgetResource:
        """Return a source of pages; see `BudgetResource` for `node_fraction`."""
        return BudgetResource(self._leaves[inherit], self.budget, node_fraction)

    def free_bytes(self, used_bytes: int, held_by_neighbours: int) -> int:
        """Return what could still be allocated: the budget's rest or the nodes', and what stacks keep unused.

        Args:
            held_by_neighbours: bytes held by all tiers on the same nodes, this one included. The OS is asked twice a
                second at most; in between, growth of this number is subtracted from its last answer.
        """
        now = time.monotonic()
        if now - self._os_free[0] > _FREE_MAX_AGE_S:
            self._os_free = (now, self._leaves[False].free_bytes())
            self._held_then = held_by_neighbours
        os_free = self._os_free[1] - (held_by_neighbours - self._held_then)
        held = self.budget.held_bytes
        return max(0, min(self.budget.limit_bytes - held, os_free)) + held - used_bytes


def make_leaf(tier: Tier, topology: Topology, stripe_bytes: int, *, inherit: bool = False) -> PageSource:
    """Return the leaf of a tier: its node, or its nodes striped by their rated bandwidth (evenly when unknown).

    Of a tier that fills its nearest nodes first, nodes at equal distance are striped.
    """
    leaves = [NumaResource(tier.name, node.node_id, topology, inherit=inherit) for node in tier.nodes]
    if len(leaves) == 1:
        return leaves[0]
    speeds = [node.read_bytes_per_s for node in tier.nodes]
    weights = [speed or 1.0 for speed in speeds] if all(speeds) else [1.0] * len(leaves)
    turns = [node.distance if tier.nearest_first else 0 for node in tier.nodes]
    return StripedResource(list(zip(leaves, weights, strict=True)), stripe_bytes, turns=turns)
