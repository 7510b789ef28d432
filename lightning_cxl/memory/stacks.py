"""The host memory of one process: the stacks of tiers and splits, spilling from one to the next, and the accounts."""

import os
import threading
import warnings
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch

from lightning_cxl.devices.device_type import process_device_type
from lightning_cxl.errors import ConfigError, LightningCXLError, SpillWarning, TierFullError, UnsupportedError
from lightning_cxl.machine.topology import Tier, TierKind, Topology
from lightning_cxl.memory.numa import (
    HUGE_PAGE_BYTES,
    BudgetFullError,
    BudgetResource,
    MakeLeaf,
    PinnedResource,
    StripedResource,
    TierPages,
    make_leaf,
    stripe_bytes_for,
)
from lightning_cxl.memory.pool import STEP_BYTES, ArenaResource, PoolResource
from lightning_cxl.memory.resource import Buffer, MemoryResource, Span, cut_spans
from lightning_cxl.native._numa import page_nodes
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# Who holds what: the living buffers of a `HostMemory`, counted by tensor role and tier.

SplitKey = tuple[tuple[str, float], ...]
"""Tiers and their shares of a buffer; equal splits are equal tuples."""


@dataclass(slots=True)
class _Count:
    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@dataclass(frozen=True, slots=True)
class _Entry:
    nbytes: int
    spans: tuple[Span, ...]
    tiers: tuple[tuple[str, int], ...]  # bytes by tier
    role: TensorRole
    split: SplitKey | None


class Counted:
    """Bytes that a `Ledger` counts while this lives; nobody owns them here."""

    __slots__ = ("_gone", "_what")

    def __init__(self, gone: deque[tuple[TensorRole, str, int]], what: tuple[TensorRole, str, int]) -> None:
        self._gone = gone
        self._what = what

    def __del__(self) -> None:
        """Note the death; without a lock, as of a buffer."""
        self._gone.append(self._what)


class Ledger:
    """Counts bytes by their spans from `record` until the returned buffer dies, and finds the buffer at an address.

    Thread-safe. Deaths are noted without a lock and booked at the next call, see [Note: Life of a Buffer].
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[int] = deque()
        self._gone: deque[tuple[TensorRole, str, int]] = deque()
        self._starts: list[int] = []  # addresses of living buffers, sorted
        self._entries: dict[int, _Entry] = {}  # by address
        self._tiers: dict[str, _Count] = {}
        self._roles: dict[tuple[TensorRole, str], _Count] = {}

    def record(self, inner: Buffer, role: TensorRole, split: SplitKey | None) -> Buffer:
        """Count `inner` and return the buffer to hand out in its place.

        Args:
            split: how it was meant to be divided over tiers; None when it was not possible.
        """
        counts = Counter[str]()
        for span in inner.spans:
            counts[span.tier] += span.nbytes
        entry = _Entry(inner.nbytes, inner.spans, tuple(counts.items()), role, split)
        with self._lock:
            self._settle()
            self._entries[inner.address] = entry
            insort(self._starts, inner.address)
            self._count(entry, 1)
        return Buffer(inner.address, inner.nbytes, inner.spans, self, inner)

    def count(self, nbytes: int, role: TensorRole, tier: str) -> "Counted":
        """Count bytes of a role that lie on a tier in memory of others, until what is returned dies."""
        with self._lock:
            self._settle()
            self._roles.setdefault((role, tier), _Count()).add(nbytes)
        return Counted(self._gone, (role, tier, nbytes))

    def deallocate(self, buffer: Buffer) -> None:
        """Note a dying buffer."""
        self._dead.append(buffer.address)

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Refuse: a ledger owns no memory, it only counts what others hand out."""
        raise NotImplementedError("a Ledger counts buffers, allocate from a MemoryResource and record the buffer here")

    def tier_at(self, address: int) -> str | None:
        """Return the tier of the byte at `address`, None when no living buffer has it."""
        return next(self.tiers_of(address, 1))[0]

    def tiers_of(self, address: int, nbytes: int) -> Iterator[tuple[str | None, int]]:
        """Yield (tier, bytes) of neighbouring parts that are ``[address, address + nbytes)`` together.

        What lies beyond the living buffer that has `address` has the tier None.
        """
        start, entry = self._find(address)
        size = 0 if entry is None else min(nbytes, start + entry.nbytes - address)
        tier, length = None, 0
        for span in cut_spans(entry.spans, address - start, size) if entry is not None else ():
            if span.tier != tier and length:
                yield tier, length
                length = 0
            tier, length = span.tier, length + span.nbytes
        if length:
            yield tier, length
        if size < nbytes:
            yield None, nbytes - size

    def split_at(self, address: int) -> SplitKey | None:
        """Return how the living buffer that has `address` was meant to be divided; None when there is none."""
        entry = self._find(address)[1]
        return None if entry is None else entry.split

    def tier_bytes(self, tier: str) -> tuple[int, int]:
        """Return the bytes living on a tier now, and their peak."""
        with self._lock:
            self._settle()
            count = self._tiers.get(tier, _Count())
            return count.live_bytes, count.peak_bytes

    def begin(self) -> None:
        """Let the peaks of roles begin anew, with what lives now."""
        with self._lock:
            self._settle()
            for count in self._roles.values():
                count.peak_bytes = count.live_bytes

    def role_bytes(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        """Return the bytes per role and tier, now and at their peaks; roles and tiers never used are left out."""
        with self._lock:
            self._settle()
            live: dict[str, dict[str, int]] = {}
            peak: dict[str, dict[str, int]] = {}
            for (role, tier), count in self._roles.items():
                live.setdefault(role.value, {})[tier] = count.live_bytes
                peak.setdefault(role.value, {})[tier] = count.peak_bytes
            return live, peak

    def _find(self, address: int) -> tuple[int, _Entry | None]:
        """Return the start of the living buffer that has `address`, and its entry."""
        with self._lock:
            self._settle()
            index = bisect_right(self._starts, address) - 1
            start = self._starts[index] if index >= 0 else address
            entry = self._entries.get(start)
            return start, entry if entry is not None and address < start + entry.nbytes else None

    def _count(self, entry: _Entry, sign: int) -> None:
        for tier, nbytes in entry.tiers:
            self._tiers.setdefault(tier, _Count()).add(sign * nbytes)
            self._roles.setdefault((entry.role, tier), _Count()).add(sign * nbytes)

    def _settle(self) -> None:
        while self._dead:
            address = self._dead.popleft()
            del self._starts[bisect_right(self._starts, address) - 1]
            self._count(self._entries.pop(address), -1)
        while self._gone:
            role, tier, nbytes = self._gone.popleft()
            self._roles[role, tier].add(-nbytes)


# ----------------------------------------------------------------------------------------------------
# `TierLimits`: the most bytes that one process holds of each tier, and which of these limits a user has set.


class TierLimits:
    """Limits by tier.

    Args:
        room: what this process may take of a tier without a budget, where others share the machine; None: all.
    """

    def __init__(
        self, topology: Topology, budgets: Mapping[str, int] | None = None, room: Mapping[str, int] | None = None
    ) -> None:
        self._topology = topology
        self._budgets = dict(budgets or {})
        self._room = dict(room or {})
        for name, budget in self._budgets.items():
            topology.tier(name)
            if budget < 0:
                raise ConfigError(f"the budget of tier `{name}` must not be negative, got {budget}")

    def has_budget(self, tier: Tier) -> bool:
        """Return whether the user has limited a tier."""
        return tier.name in self._budgets

    def of(self, tier: Tier) -> int:
        """Return the most bytes of a tier; of one that DRAM stands in for, as of DRAM."""
        if tier.name in self._budgets:
            return self._budgets[tier.name]
        behind = self._topology.node_tier(tier.node_ids[0]) if tier.emulated else tier
        return self._room.get(tier.name if behind is None else behind.name, tier.capacity_bytes)


# ----------------------------------------------------------------------------------------------------
# The canonical stacks of one split, built in this one place: what lies over what, and which budgets are charged.

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

    def stack(self, role: TensorRole, pinned: bool, nbytes: int) -> MemoryResource:
        """Return what serves a request of `nbytes` for a role."""
        kind = _kind(role, pinned)
        with self._lock:
            if self._reuse_below is not None and nbytes >= self._reuse_below and kind != "pinned":
                return self._sources[kind == "inherited"]
            if kind not in self._stacks:
                self._stacks[kind] = self._build(kind)
            return self._stacks[kind]

    def lend(self, nbytes: int, role: TensorRole, pinned: bool, alignment: int, full: set[str]) -> Buffer:
        """Allocate where one of several tiers may have no room for its share, which the others then take."""
        source = self._sources[_kind(role, pinned) == "inherited"]
        assert isinstance(source, StripedResource)
        with source.lending(full):
            return self.stack(role, pinned, nbytes).allocate(nbytes, alignment=alignment)

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
    several = len({node for tier in topology.tiers for node in tier.node_ids}) > 1
    where = page_nodes if several else None

    def pin(upstream: MemoryResource) -> PinnedResource:
        driver = process_device_type()
        return PinnedResource(upstream, driver.register, driver.unregister, required=required, where=where)

    return pin


_SHARE_DIGITS = 4  # splits that differ less share their stacks


class HostMemory:
    """Serves host buffers and tensors by `Placement`.

    Thread-safe. A forked child starts with empty stacks of its own. It sees the parent's weights and staging buffers,
    which user code may hand to it (`DataLoader` workers), but not the rest: the child would double the memory of
    everything the parent writes afterwards.

    Args:
        budgets: most bytes to hold from the OS, per tier name; a tier without one may use its whole capacity.
        room: less than that, of tiers without a budget, where other processes share the machine.
        on_tier_full: ``"spill"`` to the other tiers of a split, then to the next one of the placement, with one warning
            per role and tier, or ``"error"``.
        reuse_below: pageable buffers of this size and more go back to the OS when they die; None: they are kept for the
            next. The price is new pages each time. To make one and let it go took, on a busy machine of two cores,
            0.6 to 1.0 ms instead of 0.06 ms for 4 MiB, and 13 to 25 ms instead of 0.06 ms for 64 MiB.
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
        if on_tier_full not in ("spill", "error"):
            raise ConfigError(f'on_tier_full must be "spill" or "error", got {on_tier_full!r}')
        self._limits = TierLimits(topology, budgets, room)
        self.topology = topology
        self.on_tier_full = on_tier_full
        self._pin = pin
        self._reuse_below = reuse_below
        most = sum(min(self._limits.of(tier), tier.capacity_bytes) for tier in topology.tiers)
        self._stripe_bytes = stripe_bytes_for(most)
        self._leaf = leaf or partial(make_leaf, topology=topology, stripe_bytes=self._stripe_bytes)
        self._pinner = pinner or make_pinner(topology)
        self._warned: set[tuple[TensorRole, str]] = set()
        self.is_closed = False
        """Whether `close` has been called."""
        self._start()

    def allocate(self, nbytes: int, placement: Placement, role: TensorRole, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes` (contents undefined) on the tiers of `placement` by its shares, or where they fit."""
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
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
        wanted, pinned = self._split(placement), placement.pinned and self._pin
        reason = ""  # as text: an exception kept here would keep this frame and so the buffer alive
        for split, full in self._attempts(wanted, placement):
            try:
                inner = self._allocate_on(split, nbytes, role, pinned, alignment, full)
            except TierFullError as error:
                reason = "" if isinstance(error, BudgetFullError) else f" ({error})"
                continue
            buffer = self._ledger.record(inner, role, None if full else split)
            if full or split != wanted:
                self._warn_spill(buffer, role, wanted, full or [name for name, _ in wanted])
            return buffer
        tiers = [name for name, _ in wanted] if self.on_tier_full == "error" else placement.tiers
        raise TierFullError(self._full_message(nbytes, role, tiers, reason))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, placement: Placement, role: TensorRole) -> torch.Tensor:
        """Return an uninitialised contiguous tensor of exact size; see `allocate` for what it raises."""
        if any(size < 0 for size in shape):
            raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
        return self.allocate(prod(shape) * dtype.itemsize, placement, role).tensor(shape, dtype)

    def count_in_place(self, address: int, nbytes: int, placement: Placement, role: TensorRole) -> Counted | None:
        """Count bytes in memory of torch's own as being where `placement` wants them, until what is returned dies.

        They are part of ``roles`` in `stats`, not of ``tiers``: nothing is held from the OS for them.

        Returns:
            None where that is not known (`is_everywhere`), and where the memory is this one's.
        """
        if not self.is_everywhere(placement) or self.tier_at(address) is not None:
            return None
        return self._ledger.count(nbytes, role, self._split(placement)[0][0])

    def is_everywhere(self, placement: Placement) -> bool:
        """Return whether all memory of this process is where `placement` wants it.

        So it is where all nodes of this machine are of the one DRAM tier that the placement asks for first. Not where
        it asks for page-locked memory, nor where the tier has a budget or is to be filled nearest nodes first.
        """
        wanted = self._split(placement)
        if len(wanted) != 1 or self.is_closed or self._pid != os.getpid() or (placement.pinned and self._pin):
            return False
        tier = self.topology.tier(wanted[0][0])
        nodes = {node for each in self.topology.tiers for node in each.node_ids}
        is_all = tier.kind is TierKind.DRAM and nodes.issubset(tier.node_ids) and not tier.nearest_first
        return is_all and not self._limits.has_budget(tier)

    @property
    def pins(self) -> bool:
        """Whether ``Placement.pinned`` is honoured."""
        return self._pin

    def notes(self) -> list[str]:
        """Return what is not as it was asked for, for a report: memory that should be page-locked and is pageable."""
        failures = {" and ".join(sorted(stacks.tiers)): stacks.pin_failure for stacks in self._all_stacks()}
        return [f"memory of {tiers} is pageable, so copies wait: {why}" for tiers, why in failures.items() if why]

    def free_bytes(self) -> dict[str, int]:
        """Return what each tier could still hold; tiers on the same nodes each count what they share."""
        return {name: self._free(name) for name in self._all_pages()}

    def stats(self) -> dict[str, Any]:
        """Return the accounts, JSON-able.

        ``tiers``: per tier ``capacity_bytes``, ``budget_bytes``, ``used_bytes`` (living buffers), ``peak_bytes`` (of
        those) and ``held_bytes`` (from the OS). ``roles`` and ``peak_roles``: bytes per role and tier, now and at most
        since `begin`; with those of `count_in_place`.
        """
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
        """Let ``peak_roles`` begin anew, with what lives now."""
        self._ledger.begin()

    def tier_at(self, address: int) -> Tier | None:
        """Return the tier of the byte at `address`, None when the memory is not ours."""
        name = self._ledger.tier_at(address)
        return None if name is None else self.topology.tier(name)

    def tiers_of(self, address: int, nbytes: int) -> Iterator[tuple[Tier | None, int]]:
        """Yield (tier, bytes) of neighbouring parts of a range; None from where it is not in one of our buffers on."""
        for name, size in self._ledger.tiers_of(address, nbytes):
            yield None if name is None else self.topology.tier(name), size

    def is_placed(self, address: int, placement: Placement) -> bool:
        """Whether the buffer that has `address` was allocated as `placement` wants it: same tiers, same shares."""
        return self._ledger.split_at(address) == self._split(placement)

    def end_step(self) -> None:
        """Say that a training step is over, so that activation arenas can shrink."""
        for stacks in self._all_stacks():
            stacks.end_step()

    def trim(self) -> None:
        """Give everything unused back to the OS."""
        for stacks in self._all_stacks():
            stacks.trim()

    def close(self) -> None:
        """Serve nothing any more and give everything back: now, or when its last user dies. May be called again."""
        self.is_closed = True
        for stacks in self._all_stacks():
            stacks.close()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._ledger = Ledger()
        self._pages: dict[str, TierPages] = {}
        self._stacks: dict[SplitKey, SplitStacks] = {}
        self._lock = threading.Lock()
        self._all_pages()

    def _all_pages(self) -> dict[str, TierPages]:
        """Return the pages of every tier; the topology may have one more than at the last call."""
        if len(self._pages) < len(self.topology.tiers):
            with self._lock:
                new = [tier for tier in self.topology.tiers if tier.name not in self._pages]
                made = {tier.name: TierPages(tier, self._leaf, self._limits.of(tier)) for tier in new}
                self._pages = {**self._pages, **made}  # others may be reading the old one
        return self._pages

    def _split(self, placement: Placement) -> SplitKey:
        """Return tiers and shares in a form that is equal for splits that are."""
        shares = {name: round(share, _SHARE_DIGITS) for name, share in placement.split().items()}
        return tuple((name, shares[name]) for name in self.topology.names if shares.get(name))

    def _attempts(self, wanted: SplitKey, placement: Placement) -> Iterator[tuple[SplitKey, set[str] | None]]:
        """Yield what to try in turn: a split, and where its tiers may lend each other room, a set for the full ones."""
        yield wanted, None
        if self.on_tier_full == "error":
            return
        if len(wanted) > 1:
            yield wanted, set()
        for name in placement.tiers:
            if name not in dict(wanted):
                yield ((name, 1.0),), None

    def _stacks_of(self, split: SplitKey) -> SplitStacks:
        with self._lock:
            if split not in self._stacks:
                pages = {name: self._pages[name] for name, _ in split}
                self._stacks[split] = SplitStacks(
                    pages, dict(split), self._pinner, self._stripe_bytes, self._reuse_below
                )
            return self._stacks[split]

    def _all_stacks(self) -> list[SplitStacks]:
        with self._lock:
            return list(self._stacks.values())

    def _neighbours(self, names: Iterable[str]) -> set[str]:
        """Return the tiers that share nodes with some, these included."""
        nodes = {node for name in names for node in self._pages[name].tier.node_ids}
        return {name for name, pages in self._pages.items() if nodes.intersection(pages.tier.node_ids)}

    def _held(self, names: Iterable[str]) -> int:
        return sum(self._pages[name].budget.held_bytes for name in names)

    def _free(self, name: str) -> int:
        used, _ = self._ledger.tier_bytes(name)
        return self._pages[name].free_bytes(used, self._held(self._neighbours([name])))

    def _allocate_on(
        self, split: SplitKey, nbytes: int, role: TensorRole, pinned: bool, align: int, full: set[str] | None
    ) -> Buffer:
        stacks = self._stacks_of(split)

        def attempt() -> Buffer:
            if full is None:
                return stacks.stack(role, pinned, nbytes).allocate(nbytes, alignment=align)
            full.clear()
            return stacks.lend(nbytes, role, pinned, align, full)

        try:
            return attempt()
        except TierFullError:
            if not self._reclaim(split, nbytes, lending=full is not None):
                raise
            return attempt()

    def _reclaim(self, split: SplitKey, nbytes: int, *, lending: bool) -> bool:
        """Give back what stacks keep unused on tiers that had no room; return whether there was anything.

        So may those of a tier on the same nodes, which is no help where a budget is exhausted.
        """
        budgets = {name: self._pages[name].budget for name, _ in split}
        over = {name for name, share in split if budgets[name].held_bytes + share * nbytes > budgets[name].limit_bytes}
        tiers = over if over and not lending else self._neighbours(budgets)
        before = self._held(tiers)
        for stacks in self._all_stacks():
            if stacks.tiers & tiers:
                stacks.trim()
        return self._held(tiers) < before

    def _warn_spill(self, buffer: Buffer, role: TensorRole, wanted: SplitKey, full: Iterable[str]) -> None:
        names = [name for name in full if (role, name) not in self._warned]
        if not names:
            return
        self._warned.update((role, name) for name in names)
        got = dict.fromkeys((span.tier for span in buffer.spans), 0.0)
        for span in buffer.spans:
            got[span.tier] += span.nbytes / buffer.nbytes
        if len(wanted) == 1:
            went = f"tier `{next(iter(got))}`"
        else:
            went = f"{_fractions(got)} instead of {_fractions(dict(wanted))}"
        tiers = ", ".join(f"`{name}` has {self._room(name)}" for name in names)
        warnings.warn(
            f"{role.value} ({format_bytes(buffer.nbytes)}) went to {went}: {tiers}. More may follow without a warning, "
            f"the memory report counts them. Raise the budget of {' and '.join(f'`{name}`' for name in names)}, or set "
            f"on_tier_full='error' to refuse instead.",
            SpillWarning,
            stacklevel=4,
        )

    def _room(self, name: str) -> str:
        return f"{format_bytes(self._free(name))} of {format_bytes(self._pages[name].budget.limit_bytes)} free"

    def _full_message(self, nbytes: int, role: TensorRole, tiers: Sequence[str], reason: str) -> str:
        full = ", nor on ".join(f"tier `{name}`: {self._room(name)}{self._gaps(name)}" for name in tiers)
        return (
            f"cannot place {role.value} ({format_bytes(nbytes)}) on {full}. Raise the budget of `{tiers[0]}`, "
            f"allow another tier, or see `python -m lightning_cxl env` for what this machine has.{reason}"
        )

    def _gaps(self, name: str) -> str:
        """Say how much of a tier's free bytes lies in what is held for others; stacks gave back what they could."""
        used, _ = self._ledger.tier_bytes(name)
        nbytes = self._pages[name].budget.held_bytes - used
        return f", but {format_bytes(nbytes)} of that in gaps between other tensors" if nbytes > 0 else ""


def _fractions(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())
