"""`HostMemory`: the host memory of one process, by tier and role, with spilling and accounts."""

import ctypes
import itertools
import mmap
import os
import threading
import time
from bisect import bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from lightning_cxl import timing
from lightning_cxl.devices import process_device_type
from lightning_cxl.errors import LightningCXLError, SpillWarning, StorageError, TierFullError, UnsupportedError, warn
from lightning_cxl.machine.topology import Tier, TierKind, Topology
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.memory.resource import (
    Budget,
    BudgetFullError,
    BudgetResource,
    Buffer,
    MemoryResource,
    NumaResource,
    PageNodes,
    PageSource,
    PinnedResource,
    PoolResource,
    ShareFullError,
    Span,
    StripedResource,
    ask_nodes,
    cut_spans,
    num_nodes,
    stripe_bytes_for,
)
from lightning_cxl.native._numa import NOWHERE, page_nodes
from lightning_cxl.text import format_bytes

SplitKey = tuple[tuple[str, float], ...]  # tiers and their shares of a buffer; equal splits are equal tuples


class _Account(NamedTuple):
    nbytes: int
    spans: tuple[Span, ...]
    role: TensorRole
    split: SplitKey | None


class Ledger(MemoryResource):
    """Counts bytes by their spans from `record` until the returned buffer dies, and finds the buffer at an address.

    Thread-safe. Deaths are noted without a lock and booked at the next call, see [Note: Life of a Buffer].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[int] = deque()
        self._starts: list[int] = []  # addresses of living buffers, sorted
        self._entries: dict[int, _Account] = {}  # by address
        # bytes by role and tier; of all roles together under None
        self._live = Counter[tuple[TensorRole | None, str]]()
        self._peak = Counter[tuple[TensorRole | None, str]]()

    def record(self, inner: Buffer, role: TensorRole, split: SplitKey | None) -> Buffer:
        """Count `inner`, which was meant to be divided by `split`; return the buffer to hand out in its place."""
        entry = _Account(inner.nbytes, inner.spans, role, split)
        with self._lock:
            self._settle()
            self._entries[inner.address] = entry
            insort(self._starts, inner.address)
            self._count(entry, 1)
        return Buffer(inner.address, inner.nbytes, inner.spans, self, inner)

    def deallocate(self, buffer: Buffer) -> None:
        self._dead.append(buffer.address)

    def tier_bytes(self, tier: str) -> tuple[int, int]:
        with self._lock:
            self._settle()
            return self._live[None, tier], self._peak[None, tier]

    def begin(self) -> None:
        with self._lock:
            self._settle()
            for key, nbytes in self._live.items():
                if key[0] is not None:
                    self._peak[key] = nbytes

    def role_bytes(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        live: dict[str, dict[str, int]] = {}
        peak: dict[str, dict[str, int]] = {}
        with self._lock:
            self._settle()
            for (role, tier), nbytes in self._live.items():
                if role is not None:
                    live.setdefault(role.value, {})[tier] = nbytes
                    peak.setdefault(role.value, {})[tier] = self._peak[role, tier]
        return live, peak

    def find(self, address: int) -> tuple[int, _Account | None]:
        """Return the start of the living buffer that has `address`, and its entry."""
        with self._lock:
            self._settle()
            index = bisect_right(self._starts, address) - 1
            start = self._starts[index] if index >= 0 else address
            entry = self._entries.get(start)
            return start, entry if entry is not None and address < start + entry.nbytes else None

    def _count(self, entry: _Account, sign: int) -> None:
        for span in entry.spans:
            for key in ((None, span.tier), (entry.role, span.tier)):
                self._live[key] += sign * span.nbytes
                self._peak[key] = max(self._peak[key], self._live[key])

    def _settle(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            del self._starts[bisect_right(self._starts, address) - 1]
            self._count(self._entries.pop(address), -1)


_FREE_MAX_AGE_S = 0.5  # reading /proc for every placement would cost more than the allocation

MakeLeaf = Callable[[Tier, bool], PageSource]
"""Makes the source of a tier's pages, which forked children inherit or not."""
Pinner = Callable[[MemoryResource], PinnedResource]  # puts page-locking on a resource


class _TierPages:
    def __init__(self, tier: Tier, leaf: MakeLeaf, budget_bytes: int) -> None:
        self.tier = tier
        self.budget = Budget(tier.name, budget_bytes)
        self.leaves = {inherit: leaf(tier, inherit) for inherit in (False, True)}
        self._os_free = (float("-inf"), 0)  # when, bytes
        self._held_then = 0

    def free_bytes(self, used_bytes: int, held_by_neighbours: int) -> int:
        # the budget's rest or the nodes', and what pools keep unused. The OS is asked twice a second at most; in
        # between, what all tiers on the same nodes have taken since is subtracted from its last answer
        now = time.monotonic()
        if now - self._os_free[0] > _FREE_MAX_AGE_S:
            self._os_free = (now, self.leaves[False].free_bytes())
            self._held_then = held_by_neighbours
        os_free = self._os_free[1] - (held_by_neighbours - self._held_then)
        held = self.budget.held_bytes
        return max(0, min(self.budget.limit_bytes - held, os_free)) + held - used_bytes


class _Pools:
    """Serves one tier, or several of which each holds its share of every buffer, charged to its budget."""

    def __init__(
        self,
        tiers: Mapping[str, _TierPages],
        shares: Mapping[str, float],
        pinner: Pinner,
        stripe_bytes: int,
        reuse_below: int | None,
    ) -> None:
        def source(inherit: bool) -> PageSource:
            children: list[tuple[PageSource, float]] = []
            for name, pages in tiers.items():
                nodes = set(pages.tier.node_ids)
                on_same = sum(shares[other] for other in tiers if nodes.intersection(tiers[other].tier.node_ids))
                fraction = shares[name] / on_same
                children.append((BudgetResource(pages.leaves[inherit], pages.budget, fraction), shares[name]))
            return children[0][0] if len(children) == 1 else StripedResource(children, stripe_bytes, strict=True)

        self.tiers = frozenset(tiers)
        self._inherited, self._private = source(True), source(False)
        self.pinned = pinner(self._private)
        self._reuse_below = reuse_below
        self.pools = {
            "inherited": PoolResource(self._inherited),  # pageable weights and staging; forked children see them
            "pageable": PoolResource(self._private),  # the rest of what only the CPU reads
            "pinned": PoolResource(self.pinned),  # what a device copies from or to
        }

    def allocate(self, nbytes: int, role: TensorRole, pinned: bool, alignment: int) -> Buffer:
        inherited = role in (TensorRole.COMPUTE_WEIGHTS, TensorRole.STAGING)
        # but pinned ones: the driver must not let go of memory that a copy may still read
        if self._reuse_below is not None and nbytes >= self._reuse_below and not pinned:
            return (self._inherited if inherited else self._private).allocate(nbytes, alignment=alignment)
        kind = "pinned" if pinned else "inherited" if inherited else "pageable"
        return self.pools[kind].allocate(nbytes, alignment=alignment)

    def trim(self) -> None:
        for pool in self.pools.values():
            pool.trim()


def make_leaf(topology: Topology, stripe_bytes: int, tier: Tier, inherit: bool) -> PageSource:
    """Return the source of a tier's pages: its node, or its nodes striped by their rated bandwidth (evenly if unknown).

    Of a tier that fills its nearest nodes first, nodes at equal distance are striped.
    """
    leaves = [NumaResource(tier.name, node.node_id, topology, inherit=inherit) for node in tier.nodes]
    if len(leaves) == 1:
        return leaves[0]
    speeds = [node.read_bytes_per_s for node in tier.nodes]
    weights = [speed or 1.0 for speed in speeds] if all(speeds) else [1.0] * len(leaves)
    turns = [node.distance if tier.nearest_first else 0 for node in tier.nodes]
    return StripedResource(list(zip(leaves, weights, strict=True)), stripe_bytes, turns=turns)


def make_pinner(topology: Topology, *, required: bool = False) -> Pinner:
    driver = cache(process_device_type)  # not asked for before memory is pinned
    return partial(
        PinnedResource,
        register=lambda address, nbytes: driver().register(address, nbytes),
        unregister=lambda address: driver().unregister(address),
        required=required,
        where=page_nodes if num_nodes(topology) > 1 else None,
    )


_SHARE_DIGITS = 4  # splits that differ less share their pools


class HostMemory:
    """Serves host buffers and tensors by `Placement`; where a tier is full it spills, or raises. Thread-safe.

    A forked child starts with empty pools of its own. It sees the parent's weights and staging buffers, which user code
    may hand to it (`DataLoader` workers), but not the rest: the child would double the memory of everything the parent
    writes afterwards.

    Args:
        budgets: most bytes to hold from the OS, per tier name; a tier without one may use its whole capacity.
        room: less than that, of tiers without a budget, where other processes share the machine.
        reuse_below: pageable buffers of this size and more go back to the OS when they die, for new pages each time: on
            a busy machine of two cores, 13 to 25 ms instead of 0.06 ms for 64 MiB.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        budgets: Mapping[str, int] | None = None,
        room: Mapping[str, int] | None = None,
        on_tier_full: Literal["spill", "error"] = "spill",
        pin: bool = False,
        reuse_below: int | None = None,
        leaf: MakeLeaf | None = None,
        pinner: Pinner | None = None,
    ) -> None:
        self._budgets, self._room = dict(budgets or {}), dict(room or {})
        for name in self._budgets:
            topology.tier(name)
        self.topology = topology
        self.on_tier_full = on_tier_full
        self.pins = pin  # whether ``Placement.pinned`` is honoured
        self._reuse_below = reuse_below
        most = sum(min(self._limit(tier), tier.capacity_bytes) for tier in topology.tiers)
        self._stripe_bytes = stripe_bytes_for(most)
        self._leaf = leaf or partial(make_leaf, topology, self._stripe_bytes)
        self._pinner = pinner or make_pinner(topology)
        self._warned: set[tuple[TensorRole, str]] = set()
        self.is_closed = False  # whether `close` has been called
        self._start()

    def _limit(self, tier: Tier) -> int:
        """Return the most bytes of a tier; of one that DRAM stands in for, as of DRAM."""
        if tier.name in self._budgets:
            return self._budgets[tier.name]
        behind = self.topology.node_tier(tier.node_ids[0]) if tier.emulated else tier
        return self._room.get(tier.name if behind is None else behind.name, tier.capacity_bytes)

    def allocate(self, nbytes: int, placement: Placement, role: TensorRole, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes` (contents undefined) on the tiers of `placement` by its shares, or where they fit."""
        if self.is_closed:
            raise LightningCXLError("this HostMemory is closed: its run is over")
        if self._pid != os.getpid():
            self._start()
        for name in placement.tiers:
            if self.topology.tier(name).kind is TierKind.SSD:
                raise UnsupportedError(
                    f"cannot make a tensor for {role.value} on tier {name!r}: it is made of files, and tensors live in "
                    f"memory. Choose one of the tiers {', '.join(map(repr, self.topology.names))}"
                )
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        self._all_pages()
        wanted, pinned = self._key(placement.split()), placement.pinned and self.pins
        spill = [] if self.on_tier_full == "error" else [name for name in placement.tiers if name not in dict(wanted)]
        attempts, full = deque([wanted, *(((name, 1.0),) for name in spill)]), list[str]()
        reason = ""  # as text: an exception kept here would keep this frame and so the buffer alive
        while attempts:
            split = attempts.popleft()
            try:
                inner = self._allocate_on(split, nbytes, role, pinned, alignment)
            except TierFullError as error:
                reason = "" if isinstance(error, BudgetFullError) else f" ({error})"
                if isinstance(error, ShareFullError) and len(split) > 1:
                    full.append(error.tier)
                    if self.on_tier_full == "spill":
                        rest = {name: share for name, share in split if name != error.tier}
                        total = sum(rest.values())
                        attempts.appendleft(self._key({name: share / total for name, share in rest.items()}))
                elif split[0][0] in dict(wanted):
                    full.append(split[0][0])
                continue
            buffer = self._ledger.record(inner, role, split)
            if split != wanted:
                timing.add("spilled_bytes", buffer.nbytes)
                self._warn_spill(buffer, role, wanted, full)
            return buffer
        tiers = [name for name, _ in wanted] if self.on_tier_full == "error" else placement.tiers
        rooms = ", nor on ".join(f"tier `{name}`: {self._room_text(name)}" for name in tiers)
        raise TierFullError(
            f"cannot place {role.value} ({format_bytes(nbytes)}) on {rooms}. Raise the budget of `{tiers[0]}`, "
            f"allow another tier, or see `python -m lightning_cxl env` for what this machine has.{reason}"
        )

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, placement: Placement, role: TensorRole) -> torch.Tensor:
        if any(size < 0 for size in shape):
            raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
        return self.allocate(prod(shape) * dtype.itemsize, placement, role).tensor(shape, dtype)

    def notes(self) -> list[str]:
        """Return what is not as it was asked for, for a report: memory that should be page-locked and is pageable."""
        failures = {" and ".join(sorted(pools.tiers)): pools.pinned.failure for pools in self._all_pools()}
        return [f"memory of {tiers} is pageable, so copies wait: {why}" for tiers, why in failures.items() if why]

    def free_bytes(self) -> dict[str, int]:
        """Return what each tier could still hold; tiers on the same nodes each count what they share."""
        return {name: self._free(name) for name in self._all_pages()}

    def stats(self) -> dict[str, Any]:
        """Return bytes of tiers (used: of living buffers) and of roles on them, at most: since `begin`. JSON-able."""
        tiers = {}
        for name, pages in self._all_pages().items():
            used, peak = self._ledger.tier_bytes(name)
            tiers[name] = {
                "capacity_bytes": pages.tier.capacity_bytes,
                "budget_bytes": pages.budget.limit_bytes,
                "used_bytes": used,
                "peak_bytes": peak,
                "held_bytes": pages.budget.held_bytes,
            }
        live, peaks = self._ledger.role_bytes()
        return {"tiers": tiers, "roles": live, "peak_roles": peaks}

    def begin(self) -> None:
        self._ledger.begin()

    def tier_at(self, address: int) -> Tier | None:
        return next(self.tiers_of(address, 1))[0]

    def tiers_of(self, address: int, nbytes: int) -> Iterator[tuple[Tier | None, int]]:
        start, entry = self._ledger.find(address)
        size = 0 if entry is None else min(nbytes, start + entry.nbytes - address)
        spans = () if entry is None else cut_spans(entry.spans, address - start, size)
        for name, parts in itertools.groupby(spans, key=lambda span: span.tier):
            yield self.topology.tier(name), sum(span.nbytes for span in parts)
        if size < nbytes:
            yield None, nbytes - size

    def is_placed(self, address: int, placement: Placement) -> bool:
        """Whether the buffer that has `address` was allocated as `placement` wants it: same tiers, same shares."""
        entry = self._ledger.find(address)[1]
        return entry is not None and entry.split == self._key(placement.split())

    def trim(self) -> None:
        for pools in self._all_pools():
            pools.trim()

    def close(self) -> None:
        """Serve nothing any more and give everything back: now, or when its last user dies. May be called again."""
        self.is_closed = True
        for pool in (pool for pools in self._all_pools() for pool in pools.pools.values()):
            pool.close()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._ledger = Ledger()
        self._pages: dict[str, _TierPages] = {}
        self._pools: dict[SplitKey, _Pools] = {}
        self._lock = threading.Lock()
        self._all_pages()

    def _all_pages(self) -> dict[str, _TierPages]:
        if len(self._pages) < len(self.topology.tiers):  # which may have got one more since
            with self._lock:
                new = [tier for tier in self.topology.tiers if tier.name not in self._pages]
                made = {tier.name: _TierPages(tier, self._leaf, self._limit(tier)) for tier in new}
                self._pages = {**self._pages, **made}  # others may be reading the old one
        return self._pages

    def _key(self, shares: Mapping[str, float]) -> SplitKey:
        rounded = {name: round(share, _SHARE_DIGITS) for name, share in shares.items()}
        return tuple((name, rounded[name]) for name in self.topology.names if rounded.get(name))

    def _all_pools(self) -> list[_Pools]:
        with self._lock:
            return list(self._pools.values())

    def _neighbours(self, names: Iterable[str]) -> set[str]:
        nodes = {node for name in names for node in self._pages[name].tier.node_ids}
        return {name for name, pages in self._pages.items() if nodes.intersection(pages.tier.node_ids)}

    def _held(self, names: Iterable[str]) -> int:
        return sum(self._pages[name].budget.held_bytes for name in names)

    def _free(self, name: str) -> int:
        used, _ = self._ledger.tier_bytes(name)
        return self._pages[name].free_bytes(used, self._held(self._neighbours([name])))

    def _allocate_on(self, split: SplitKey, nbytes: int, role: TensorRole, pinned: bool, alignment: int) -> Buffer:
        with self._lock:
            if split not in self._pools:
                pages = {name: self._pages[name] for name, _ in split}
                self._pools[split] = _Pools(pages, dict(split), self._pinner, self._stripe_bytes, self._reuse_below)
            pools = self._pools[split]
        try:
            return pools.allocate(nbytes, role, pinned, alignment)
        except TierFullError:
            if not self._reclaim(split, nbytes):
                raise
            return pools.allocate(nbytes, role, pinned, alignment)

    def _reclaim(self, split: SplitKey, nbytes: int) -> bool:
        """Give back what pools keep unused on tiers that had no room, or on their nodes; return whether that helped."""
        budgets = {name: self._pages[name].budget for name, _ in split}
        over = {name for name, share in split if budgets[name].held_bytes + share * nbytes > budgets[name].limit_bytes}
        tiers = over or self._neighbours(budgets)
        before = self._held(tiers)
        for pools in self._all_pools():
            if pools.tiers & tiers:
                pools.trim()
        return self._held(tiers) < before

    def _warn_spill(self, buffer: Buffer, role: TensorRole, wanted: SplitKey, full: Iterable[str]) -> None:
        names = [name for name in full if (role, name) not in self._warned]
        if not names:
            return
        self._warned.update((role, name) for name in names)
        got = defaultdict[str, float](float)
        for span in buffer.spans:
            got[span.tier] += span.nbytes / buffer.nbytes
        split = f"{_fractions(got)} instead of {_fractions(dict(wanted))}"
        went = f"tier `{next(iter(got))}`" if len(wanted) == 1 else split
        tiers = ", ".join(f"`{name}` has {self._room_text(name)}" for name in names)
        warn(
            f"{role.value} ({format_bytes(buffer.nbytes)}) went to {went}: {tiers}. More may follow without a warning, "
            f"the memory report counts them. Raise the budget of {' and '.join(f'`{name}`' for name in names)}, or set "
            f"on_tier_full='error' to refuse instead.",
            SpillWarning,
            level=4,
        )

    def _room_text(self, name: str) -> str:
        budget = self._pages[name].budget
        in_gaps = budget.held_bytes - self._ledger.tier_bytes(name)[0]  # pools gave back what they could
        gaps = f", but {format_bytes(in_gaps)} of that in gaps between other tensors" if in_gaps > 0 else ""
        return f"{format_bytes(self._free(name))} of {format_bytes(budget.limit_bytes)} free{gaps}"


def _fractions(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())


UNBACKED = "unbacked"  # key of bytes that no page backs yet: memory that was never written


def residency(
    tensor: torch.Tensor, topology: Topology, memory: HostMemory | None = None, *, where: PageNodes = page_nodes
) -> dict[str, int]:
    """Return how many of a tensor's bytes each tier holds now, see `hook.residency`; of a view, what it shows.

    A page counts for the tier that has its node; where `memory` handed the bytes out for an emulated tier on that node,
    for that one.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"only a strided tensor has addresses, this one has layout {tensor.layout}")
    if tensor.device.type != "cpu":
        return {str(tensor.device): tensor.numel() * tensor.element_size()} if tensor.numel() else {}
    found: dict[str, int] = {}
    for begin, length in _runs(tensor):
        address = begin
        for asked, nbytes in memory.tiers_of(begin, length) if memory is not None else ((None, length),):
            for node, size in ask_nodes(where, address, nbytes).items():
                if node == NOWHERE:
                    name = UNBACKED
                elif asked is not None and node in asked.node_ids:
                    name = asked.name
                else:
                    tier = topology.node_tier(node)
                    name = tier.name if tier is not None else f"node {node}"
                found[name] = found.get(name, 0) + size
            address += nbytes
    return found


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    if tensor.numel() and is_dense(tensor):
        yield tensor.data_ptr(), tensor.nbytes
    elif tensor.numel():
        for part in tensor.unbind():
            yield from _runs(part)


# Host tensors that mirror a parameter: same shape and memory layout, on memory of ours.

FlatAllocate = Callable[[int, torch.dtype], torch.Tensor]
"""Returns an uninitialised 1-D host tensor of that many elements."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` covers its memory without gaps or overlaps, in any dimension order."""
    if tensor.is_contiguous():  # asked first: a step asks about each gradient
        return True
    expected = 1
    for stride, size in sorted((st, si) for st, si in zip(tensor.stride(), tensor.shape, strict=True) if si != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def laid_out_as(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return dense memory as a tensor of `parameter`'s shape: its element order where that is dense, else row-major."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.as_strided((parameter.numel(),), (1,)).view(parameter.shape)


def mirror(tensor: torch.Tensor, dtype: torch.dtype, allocate: FlatAllocate) -> torch.Tensor:
    """Return an uninitialised host tensor of `tensor`'s shape, with its strides where it is dense.

    Equal strides make element i of the flat memory the same element in every mirror, which is what a flat kernel needs.
    """
    return laid_out_as(allocate(tensor.numel(), dtype), tensor)


def is_ordinary(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not is_lazy(tensor)


def storage_extent(tensor: torch.Tensor) -> int:
    """Return how many elements lie from the first to the last one that a non-empty strided tensor touches."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


_ALIGNMENT = 256  # bytes: torch's own of tensors on CUDA, by which libraries choose kernels


def aligned_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


@torch.no_grad()
def copy_bytes(source: Buffer, destination: Buffer) -> None:
    into = destination.tensor((source.nbytes,), torch.uint8)
    into.copy_(source.tensor((source.nbytes,), torch.uint8))


def anonymous_bytes(tensors: Iterable[torch.Tensor], default_node: int) -> dict[int, int]:
    """Return bytes by node id, `default_node` if the kernel refuses to say; tensors that share memory count once.

    Untouched memory has no pages, and pages of mapped files count as free already.
    """
    files = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, inode, *_ = line.split()
        if inode != "0":
            begin, end = addresses.split("-")
            files.append((int(begin, 16), int(end, 16)))
    files.sort()
    found: dict[int, int] = {}
    seen = set()
    for tensor in tensors:
        if not is_ordinary(tensor) or not tensor.numel():
            continue
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        index = bisect_right(files, (address, 1 << 64)) - 1
        in_file = index >= 0 and address < files[index][1]
        if address in seen or in_file:
            continue
        seen.add(address)
        try:
            nodes = page_nodes(address, nbytes)
        except OSError:
            nodes = {default_node: nbytes}
        for node, size in nodes.items():
            if node != NOWHERE:
                found[node] = found.get(node, 0) + size
    return found


# Give the C library's free memory back to the OS between forward and backward.
#
# glibc often cannot reuse the aligned blocks that torch frees: for such a block it cuts a larger one, and keeps the
# small rests in its thread cache. Trimming before and after a backward, and before memory for a gradient is taken,
# bounds that and costs page faults (`DECISIONS.md` has a run).

_STATM = "/proc/self/statm"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in <malloc.h>
_FIRST_LIMIT_BYTES = 128 * 2**10  # what glibc begins with
_LAST_LIMIT_BYTES = 32 * 2**20  # and what it never goes beyond
_USERS_CHOICE = (("MALLOC_MMAP_THRESHOLD_", ""), ("GLIBC_TUNABLES", "mmap_threshold"))
_lock = threading.Lock()
_num_inside = 0
_MIN_GROWTH_BYTES = 64 * 2**20  # less is not worth the system calls and the page faults afterwards


class HeapTrimmer:
    """Trims the heap when the process has grown since the last time; does nothing where the C library cannot."""

    def __init__(self) -> None:
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._lowest_bytes = self._resident_bytes()

    def trim(self) -> None:
        resident = self._resident_bytes()
        if resident - self._lowest_bytes >= _MIN_GROWTH_BYTES:
            self.trim_now()
            self._lowest_bytes = self._resident_bytes()
        else:
            self._lowest_bytes = min(self._lowest_bytes, resident)

    def trim_now(self) -> None:
        if self._malloc_trim is not None:
            self._malloc_trim(0)

    def _resident_bytes(self) -> int:
        with open(_STATM, "rb", buffering=0) as statm:  # in each backward, for each gradient
            return int(statm.read().split()[1]) * self._page_bytes


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Inside, every block of 128 KiB and more has pages of its own, which go back to the OS when the block is freed."""
    # glibc begins so, and then raises the limit to the largest block that was freed, up to 32 MiB: what it is
    # afterwards. Blocks below the limit leave holes in the heap: with QLoRA on the CPU (`examples/bench/qlora.py`) as
    # large as the model. New pages cost a tenth of the CPU time there. A limit that users have set stays
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ and text in os.environ[name] for name, text in _USERS_CHOICE):
        yield
        return

    def count(change: int) -> None:
        global _num_inside
        with _lock:
            before, _num_inside = _num_inside, _num_inside + change
            if bool(before) != bool(_num_inside):
                limit = _FIRST_LIMIT_BYTES if _num_inside else _LAST_LIMIT_BYTES
                mallopt(_MMAP_THRESHOLD, limit)
                mallopt(_TRIM_THRESHOLD, limit if _num_inside else 2 * limit)
                HeapTrimmer().trim_now()  # holes that there are: blocks would be cut from them

    count(+1)
    try:
        yield
    finally:
        count(-1)


_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
_FLAGS_SHIFT = 61  # of an entry: bit 61 says "of a file", 62 "swapped", 63 "present"
_CHUNK_ENTRIES = 2**17


def has_private_pages(address: int, nbytes: int) -> bool:
    """Return whether pages of a private mapping of a file are no longer those of the file."""
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    try:
        with open(_PAGEMAP, "rb", buffering=0) as pagemap:
            for start in range(first, last, _CHUNK_ENTRIES):
                nbytes = min(_CHUNK_ENTRIES, last - start) * _ENTRY_BYTES
                pagemap.seek(start * _ENTRY_BYTES)
                entries = pagemap.read(nbytes)
                if len(entries) != nbytes:
                    raise OSError(0, f"{len(entries)} bytes came instead of {nbytes}")
                flags = (torch.frombuffer(bytearray(entries), dtype=torch.int64) >> _FLAGS_SHIFT) & 7
                if bool(((flags != 0) & (flags & 1 == 0)).any()):
                    return True
    except OSError as error:
        raise StorageError(
            f"`{_PAGEMAP}` does not say which pages were written to: {error.strerror}. Weights on tier `ssd` need it; "
            "keep weights in memory here",
            errno=error.errno,
        ) from None
    return False
