"""Policies that place a whole job: `PlanningPolicy`, the built-in ones, and any other by name or import path."""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lightning_cxl.config import SSD
from lightning_cxl.errors import ConfigError, TierFullError
from lightning_cxl.machine.speeds import Machine, MachineSsd, MachineTier, Split
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole, preferred_kinds
from lightning_cxl.planning.job import Job, MemoryClass, StepModel, StepTime, predict_step
from lightning_cxl.text import format_bytes


@dataclass(frozen=True, slots=True)
class Decision:
    """A split over tiers for every role of a job that no decorator or rule places."""

    splits: Mapping[TensorRole, Split]
    reasons: Mapping[TensorRole, str]
    """Why, one line per role."""


class PlanningPolicy(Protocol):
    """Places a job's memory classes once, before anything is allocated. Must not keep state.

    A class of your own is named by its import path, e.g. ``policy="my_package.placement.MyPolicy"``; it is constructed
    without arguments. One that does not look at speeds says so with a class attribute ``needs_speeds = False``, and may
    then be used on machines whose speeds are not known.
    """

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return a split for every role that `job` leaves open.

        Args:
            job: every class of it; those with a tier are fixed, and their bytes are taken from that tier first.
            machine: `capacity_bytes` of its tiers is what the job may use.

        Raises:
            TierFullError: it does not fit.
        """


LEVELS: tuple[tuple[TensorRole, ...], ...] = (
    (TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_GRADS, TensorRole.MASTER_WEIGHTS),
    (TensorRole.COMPUTE_WEIGHTS,),
    (TensorRole.ACTIVATIONS,),
    (TensorRole.COMPUTE_GRADS,),
    (TensorRole.STAGING,),  # not in the paper
)
"""The order in which arXiv 2507.03305 hands out local memory.

Source: utils/numa_allocation_patch.py of the authors' repository CXL-Aware-LLM-Finetuning.
"""


def in_order(job: Job) -> list[MemoryClass]:
    """Return the classes that a job leaves open, in the order of `LEVELS`."""
    classes = job.free_classes()
    return [classes[role] for level in LEVELS for role in level if role in classes]


class Room:
    """Counts down the capacities of a machine's memory tiers, and what they may hold together."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.machine = machine
        self._left = {tier.name: tier.capacity_bytes for tier in machine.tiers}
        self.together = machine.memory_bytes  # bytes that all tiers together still have
        for each in job.classes:
            if each.tier not in (None, SSD):
                self.take(each.role, each.nbytes, {each.tier: 1.0})

    def left(self, tier: str) -> int:
        return min(self._left[tier], self.together)

    def take(self, role: TensorRole, nbytes: int, split: Split) -> None:
        # fractions are cut off; the bytes that this leaves go, one to a tier, first to those that have room
        parts = {tier: math.floor(share * nbytes) for tier, share in split.items()}
        in_turn = sorted(parts, key=lambda tier: parts[tier] >= self._left[tier])
        for tier in in_turn[: nbytes - sum(parts.values())]:
            parts[tier] += 1
        over = [tier for tier, part in parts.items() if part > self._left[tier]]
        if over or nbytes > self.together:
            raise self.full(role.value, nbytes, over[0] if over else "` and `".join(split))
        for tier, part in parts.items():
            self._left[tier] -= part
        self.together -= nbytes

    def full(self, what: str, nbytes: int, tier: str) -> TierFullError:
        have = ", ".join(f"`{name}` {format_bytes(left)}" for name, left in self._left.items())
        if self.together < sum(self._left.values()):
            have += f", {format_bytes(self.together)} together"
        return TierFullError(
            f"cannot place {what} ({format_bytes(nbytes)}) on tier `{tier}`: machine `{self.machine.name}` has left "
            f"{have}. Add memory or a tier, raise the budget in `tiers`, or use a smaller model, batch or sequence."
        )


def spread(role: TensorRole, nbytes: int, tiers: Sequence[MachineTier], room: Room) -> Split:
    """Return the split of `nbytes` that are interleaved by pages over all nodes of some tiers; nothing is taken."""
    left = {tier.name: float(room.left(tier.name)) for tier in tiers}
    bytes_on, rest = fill(nbytes, {tier.name: float(tier.num_nodes) for tier in tiers}, left)
    if nbytes and rest > 0.5:
        raise room.full(role.value, nbytes, "` and `".join(bytes_on) or "cxl")
    total = sum(bytes_on.values())
    if not total:  # no bytes: where they would go
        able = [tier for tier in tiers if left[tier.name] > 0] or [*tiers, *room.machine.tiers][:1]
        return {tier.name: tier.num_nodes / sum(each.num_nodes for each in able) for tier in able}
    return {name: size / total for name, size in bytes_on.items() if size}


def fill(nbytes: float, weights: Mapping[str, float], left: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Return how bytes lie on tiers in proportion to weights, a full one leaving its part to others; and the rest."""
    bytes_on = dict.fromkeys(weights, 0.0)
    room, to_place = dict(left), float(nbytes)
    while to_place > 0.5 and (able := [name for name in weights if room[name] > 0]):
        total = sum(weights[name] for name in able)
        # as much as can go to all of them before the first is full
        part = min([to_place, *(room[name] * total / weights[name] for name in able)])
        for name in able:
            bytes_on[name] += part * weights[name] / total
            room[name] = max(0.0, room[name] - part * weights[name] / total)
        to_place -= part
    return bytes_on, to_place


class _RoleByRole:
    """Places one role after the other, each with what those before have left."""

    needs_speeds = False

    def decide(self, job: Job, machine: Machine) -> Decision:
        room = Room(job, machine)
        splits: dict[TensorRole, Split] = {}
        reasons: dict[TensorRole, str] = {}
        for each in self.order(job):
            splits[each.role], reasons[each.role] = self.split_of(each, room)
            room.take(each.role, each.nbytes, splits[each.role])
        return Decision(splits, reasons)

    def order(self, job: Job) -> Iterable[MemoryClass]:
        return in_order(job)

    def split_of(self, each: MemoryClass, room: Room) -> tuple[Split, str]:
        raise NotImplementedError


class LatencyFirst(_RoleByRole):
    """The rule of arXiv 2507.03305, exactly as coded in its authors' utils/numa_allocation_patch.py.

    In the order of `LEVELS`: a class that fits in what is left of local DRAM goes there; one that does not, while any
    is left, is interleaved with equal weights over DRAM and all cards, and takes at most its equal share of DRAM; later
    ones are interleaved over the cards. Beyond the paper: a class whose size is not known yet (0 bytes: activations
    before the first batch) lies on the cards, so that it does not take the DRAM that was promised to others.
    """

    def split_of(self, each: MemoryClass, room: Room) -> tuple[Split, str]:
        dram, cards = room.machine.select(TierKind.DRAM), room.machine.select(TierKind.CXL)
        local = sum(room.left(tier.name) for tier in dram)
        if not each.nbytes and cards:
            return spread(each.role, 0, cards, room), "size not known yet: on the cards"
        if local >= each.nbytes:
            return spread(each.role, each.nbytes, dram, room), "fits in DRAM, which the CPUs are nearest to"
        if local > 0 and cards:
            taken = min(local, each.nbytes // (1 + sum(tier.num_nodes for tier in cards)))
            why = f"mixed: interleaved equally, {format_bytes(local)} of DRAM were left"
            return mixed(each, taken, dram, cards, room), why
        if cards:
            return spread(each.role, each.nbytes, cards, room), "DRAM is used up: striped over the cards"
        raise room.full(each.role.value, each.nbytes, "` and `".join(tier.name for tier in dram))


class DramOnly(_RoleByRole):
    def split_of(self, each: MemoryClass, room: Room) -> tuple[Split, str]:
        return spread(each.role, each.nbytes, room.machine.select(TierKind.DRAM), room), "everything in DRAM"


class Interleave(_RoleByRole):
    """Everything page by page over the nodes, as ``numactl --interleave=all``; a full one leaves its part to others."""

    def split_of(self, each: MemoryClass, room: Room) -> tuple[Split, str]:
        num_nodes = sum(tier.num_nodes for tier in room.machine.tiers)
        return spread(each.role, each.nbytes, room.machine.tiers, room), f"interleaved over all {num_nodes} nodes"


class ByRole(_RoleByRole):
    """As `Placer` places in a run, role after role: what does not fit in a role's preferred tier goes to others."""

    def order(self, job: Job) -> Iterable[MemoryClass]:
        return job.free_classes().values()

    def split_of(self, each: MemoryClass, room: Room) -> tuple[Split, str]:
        dram, cards = room.machine.select(TierKind.DRAM), room.machine.select(TierKind.CXL)
        preferred = preferred_kinds(each.role, cpu_computes=room.machine.device.is_host)[0]
        why = f"preferred for {each.role.value}"
        if each.nbytes > sum(room.left(tier.name) for tier in room.machine.tiers):
            raise room.full(each.role.value, each.nbytes, "` and `".join(tier.name for tier in room.machine.tiers))
        if not each.nbytes:
            return spread(each.role, 0, (preferred is TierKind.CXL and cards) or dram or cards, room), why
        local = min(each.nbytes, sum(room.left(tier.name) for tier in dram))
        if preferred is TierKind.CXL:
            local = each.nbytes - min(each.nbytes, sum(room.left(tier.name) for tier in cards))
        return mixed(each, local, dram, cards, room), why


def mixed(
    each: MemoryClass, local: int, dram: Sequence[MachineTier], cards: Sequence[MachineTier], room: Room
) -> Split:
    split: Split = {}
    for nbytes, tiers in ((local, dram), (each.nbytes - local, cards)):
        if nbytes:
            own = spread(each.role, nbytes, tiers, room)
            split |= {name: share * nbytes / each.nbytes for name, share in own.items()}
    return split


_STEPS = tuple(0.5**k for k in range(1, 10))
_GAIN = 1e-6  # relative; below it two costs are the same
_SMALL = 1e-3  # of all bytes; what a class this small does is not worth looking for: it stays where a start has it
_MAX_MOVES = 64  # of one size

Fractions = tuple[float, ...]  # local part of every class, 0 to 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bytes of the classes, and how many of them may and must be local."""

    nbytes: tuple[int, ...]
    most_local: float
    least_local: float

    def local(self, x: Sequence[float]) -> float:
        return sum(size * part for size, part in zip(self.nbytes, x, strict=True))


def minimise(cost: Callable[[Fractions], float], bounds: Bounds, starts: Sequence[Fractions]) -> Fractions:
    """Return the best fractions found from several starts. Deterministic, with a few hundred evaluations.

    The cost is a sum of maxima over resources, so it is convex, flat where something else decides, and has kinks where
    two resources tie. Moving one class at a time gets stuck at a kink; moving bytes of one class in and as many of
    another out does not. Steps halve until they are small.
    """
    found: list[tuple[float, Fractions]] = []
    for start in starts:
        # scaled down, or up towards 1, so that it fits
        scaled, now = list(start), bounds.local(start)
        if now > bounds.most_local:
            scaled = [part * bounds.most_local / now for part in start]
        elif now < bounds.least_local:
            up = (bounds.least_local - now) / (sum(bounds.nbytes) - now)
            scaled = [part + (1 - part) * up for part in start]
        x = tuple(min(1.0, max(0.0, part)) for part in scaled)
        best = cost(x)
        for step in _STEPS:
            for _ in range(_MAX_MOVES):
                value, candidate = min(((cost(y), y) for y in _moves(x, step, bounds)), default=(best, x))
                if value >= best - _GAIN * abs(best):
                    break
                best, x = value, candidate
        found.append((best, x))
    return min(found, key=lambda each: each[0])[1]


def _moves(x: Fractions, step: float, bounds: Bounds) -> Iterator[Fractions]:
    """Yield what one step leads to: one class in or out, all together, or one in and another one out."""
    sizes, now = bounds.nbytes, bounds.local(x)
    room_in, room_out = max(0.0, bounds.most_local - now), max(0.0, now - bounds.least_local)
    small = _SMALL * sum(sizes)
    for i, size in enumerate(sizes):
        if size <= small:
            continue
        into, out = min(step, 1 - x[i]), min(step, x[i])
        yield from _changed(x, {i: min(into, room_in / size)})
        yield from _changed(x, {i: -min(out, room_out / size)})
        for j, other in enumerate(sizes):
            if j != i and other > small:
                moved = min(into * size, x[j] * other)
                yield from _changed(x, {i: moved / size, j: -moved / other})
    for sign in (step, -step):
        y = tuple(min(1.0, max(0.0, part + sign)) for part in x)
        if bounds.least_local <= bounds.local(y) <= bounds.most_local:
            yield y


def _changed(x: Fractions, by: dict[int, float]) -> Iterator[Fractions]:
    if all(by.values()):
        yield tuple(min(1.0, max(0.0, part + by.get(i, 0.0))) for i, part in enumerate(x))


_TIE_BREAK = 1e-6
_SLIVER = 1 / 128  # a part this small is not worth a split
_WORTH = 1e-3  # a plan that is simpler may be slower than the best one by this

_R = TensorRole
# from the simplest plan to the most general one: the roles that lie on the cards, and those that share one fraction
_PLANS: tuple[tuple[frozenset[TensorRole], frozenset[TensorRole]], ...] = (
    (frozenset({_R.COMPUTE_WEIGHTS, _R.ACTIVATIONS}), frozenset(LEVELS[0])),
    (frozenset({_R.ACTIVATIONS}), frozenset(LEVELS[0])),
    (frozenset(), frozenset(LEVELS[0])),
    (frozenset(), frozenset()),
)


class Bandwidth:
    """Minimises the predicted step time; DRAM and the cards work at the same time.

    Every class has one variable, its part in DRAM; the rest is striped over the cards in proportion to bandwidth. Of
    plans that take equally long the simplest is chosen (`_PLANS`). Where something else takes longer than a class, the
    tie goes to the split under which its own moves take least, so that DRAM is not left empty.
    """

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return the best splits found; the predicted step is never longer than that of `LatencyFirst`."""
        classes = in_order(job)
        problem = _Problem(job, machine, classes)
        if not problem.far.tiers or not problem.near.tiers:
            only = problem.near if problem.near.tiers else problem.far
            return Decision(
                {each.role: only.split(problem.total) for each in classes},
                {each.role: "the only kind of memory there is" for each in classes},
            )
        x = problem.simplest_good()
        splits = problem.splits(x)
        if (faster := problem.faster_rival(splits)) is not None:
            return faster
        reasons = {each.role: problem.reason(each, part) for each, part in zip(classes, x, strict=True)}
        return Decision(splits, reasons)


@dataclass(frozen=True, slots=True)
class _Group:
    tiers: tuple[MachineTier, ...]
    left: tuple[int, ...]

    @property
    def room(self) -> int:
        return sum(self.left)

    def split(self, nbytes: float) -> Split:
        """Return how `nbytes` lie on the tiers: by bandwidth, and a full tier leaves its part to the others."""
        left = {tier.name: float(size) for tier, size in zip(self.tiers, self.left, strict=True)}
        bytes_on, _ = fill(nbytes, {tier.name: tier.adam_bytes_per_s for tier in self.tiers}, left)
        placed = sum(bytes_on.values())
        if not placed:
            return {self.tiers[0].name: 1.0}
        return {name: size / placed for name, size in bytes_on.items() if size}

    def seconds(self, each: MemoryClass, machine: Machine) -> float:
        """Return what the moves of a class take one after the other, all of it here."""
        device = machine.device
        rates = {
            "cpu": sum(tier.adam_bytes_per_s for tier in self.tiers),
            "h2d": min(device.h2d_bytes_per_s, sum(tier.device_read_bytes_per_s for tier in self.tiers)),
            "d2h": min(device.d2h_bytes_per_s, sum(tier.device_write_bytes_per_s for tier in self.tiers)),
        }
        return sum(move.nbytes / rates[move.kind] for move in each.moves)


class _Problem:
    def __init__(self, job: Job, machine: Machine, classes: Sequence[MemoryClass]) -> None:
        room = Room(job, machine)
        self.classes = classes
        self.total = sum(each.nbytes for each in classes)
        self.near, self.far = (
            _Group(tiers, tuple(room.left(tier.name) for tier in tiers))
            for tiers in (machine.select(TierKind.DRAM), machine.select(TierKind.CXL))
        )
        if self.total > min(self.near.room + self.far.room, room.together):
            raise room.full("the job", self.total, "` and `".join(t.name for t in self.near.tiers + self.far.tiers))
        self.bounds = Bounds(tuple(each.nbytes for each in classes), self.near.room, max(0, self.total - self.far.room))
        self._model = StepModel(job, machine)
        self._near_s = [self.near.seconds(each, machine) for each in classes] if self.near.tiers else []
        self._far_s = [self.far.seconds(each, machine) for each in classes] if self.far.tiers else []
        self._job, self._machine = job, machine
        self._greedy_plan = _decision(LatencyFirst(), job, machine) if self.near.tiers and self.far.tiers else None
        self._greedy = None if self._greedy_plan is None else self._fractions(self._greedy_plan)
        self._greedy_s = math.inf if self._greedy is None else self.seconds(self._greedy)

    def simplest_good(self) -> Fractions:
        found = [x for far, tied in _PLANS if (x := self._best(far, tied)) is not None]
        if self._greedy is not None:
            found.append(self._greedy)
        seconds = [self.seconds(x) for x in found]
        limit = min(min(seconds) * (1 + _WORTH), self._greedy_s)
        x = next(x for x, took in zip(found, seconds, strict=True) if took <= limit)
        for i, part in enumerate(x):  # those next to 0 or 1 are exactly that, where it fits and costs nothing
            whole = round(part)
            y = (*x[:i], float(whole), *x[i + 1 :])
            fits = self.bounds.least_local <= self.bounds.local(y) <= self.bounds.most_local
            limit = min(self.seconds(x) * (1 + _WORTH / 10), self._greedy_s)
            if 0 < abs(part - whole) < _SLIVER and fits and self.seconds(y) <= limit:
                x = y
        return x

    def _best(self, far: frozenset[TensorRole], tied: frozenset[TensorRole]) -> Fractions | None:
        """Return the best fractions with some roles on the cards and some at one fraction; None if that cannot fit."""
        together = [i for i, each in enumerate(self.classes) if each.role in tied]
        groups = [together] if together else []
        groups += [[i] for i, each in enumerate(self.classes) if each.role not in far | tied]
        sizes = tuple(sum(self.classes[i].nbytes for i in group) for group in groups)
        if sum(sizes) < self.bounds.least_local:
            return None

        def whole(parts: Fractions) -> Fractions:
            x = [0.0] * len(self.classes)
            for group, part in zip(groups, parts, strict=True):
                for i in group:
                    x[i] = part
            return tuple(x)

        bounds = Bounds(sizes, self.bounds.most_local, self.bounds.least_local)
        starts = [
            tuple(sum(x[i] * self.classes[i].nbytes for i in group) / max(1, size) for group, size in pairs)
            for x in self._starts()
            if (pairs := list(zip(groups, sizes, strict=True)))
        ]
        return whole(minimise(lambda parts: self.cost(whole(parts)), bounds, starts)) if groups else whole(())

    def faster_rival(self, splits: Mapping[TensorRole, Split]) -> Decision | None:
        """Return another policy's decision where that beats these splits: on cards of unequal size or speed."""
        limit, found = self._model.seconds(splits), None
        others = (_decision(policy, self._job, self._machine) for policy in (Interleave(), DramOnly()))
        for rival, worth in ((self._greedy_plan, 0.0), *((each, _WORTH) for each in others)):
            if rival is not None and (seconds := self._model.seconds(rival.splits)) * (1 + worth) < limit:
                limit, found = seconds, rival
        return found

    def _fractions(self, decision: Decision) -> Fractions:
        near = {tier.name for tier in self.near.tiers}
        return tuple(
            sum(share for tier, share in decision.splits[each.role].items() if tier in near) for each in self.classes
        )

    def splits(self, x: Fractions) -> dict[TensorRole, Split]:
        local = self.bounds.local(x)
        near, far = self.near.split(local), self.far.split(self.total - local)
        splits = {}
        for each, part in zip(self.classes, x, strict=True):
            parts = {name: share * part for name, share in near.items()}
            parts |= {name: share * (1 - part) for name, share in far.items()}
            splits[each.role] = {name: share for name, share in parts.items() if share}
        return splits

    def seconds(self, x: Fractions) -> float:
        return self._model.seconds(self.splits(x))

    def cost(self, x: Fractions) -> float:
        alone = sum(n * part + f * (1 - part) for n, f, part in zip(self._near_s, self._far_s, x, strict=True))
        return self.seconds(x) + _TIE_BREAK * alone

    def _starts(self) -> list[Fractions]:
        """Return the greedy outcome, an equal part of every class in DRAM, and DRAM by what it is worth per byte."""
        saved = [far - near for near, far in zip(self._near_s, self._far_s, strict=True)]
        worth = [seconds / max(1, each.nbytes) for seconds, each in zip(saved, self.classes, strict=True)]
        by_worth, left = [0.0] * len(worth), float(self.near.room)
        for i in sorted(range(len(worth)), key=lambda i: -worth[i]):
            by_worth[i] = min(1.0, max(0.0, left) / max(1, self.classes[i].nbytes))
            left -= by_worth[i] * self.classes[i].nbytes
        found = [tuple(by_worth), (min(1.0, self.near.room / max(1, self.total)),) * len(worth)]
        return found if self._greedy is None else [*found, self._greedy]

    def reason(self, each: MemoryClass, part: float) -> str:
        moved = {kind: sum(m.nbytes for m in each.moves if m.kind == kind) for kind in ("cpu", "h2d", "d2h")}
        names = {"cpu": "streamed by the CPUs", "h2d": "read by the device", "d2h": "written by the device"}
        uses = " and ".join(names[kind] for kind, nbytes in moved.items() if nbytes) or "hardly moved"
        if part in (0.0, 1.0):
            worth = self._far_s[self.classes.index(each)] - self._near_s[self.classes.index(each)]
            where = "in DRAM, which saves" if part else "on the cards, where its moves cost"
            return f"{uses}: {where} {worth:.2g} s a step if nothing hides them"
        return f"{uses}: {part:.0%} in DRAM, so that DRAM and cards are done together".replace("%", " %")


def _decision(policy: PlanningPolicy, job: Job, machine: Machine) -> Decision | None:
    try:
        return policy.decide(job, machine)
    except TierFullError:
        return None


POLICIES: Mapping[str, type[PlanningPolicy]] = {
    "dram_only": DramOnly,
    "interleave": Interleave,
    "latency_first": LatencyFirst,
    "bandwidth": Bandwidth,
}
"""Those that plan a whole job, by name."""

_NEEDS = (
    "has no method `decide`, see PlanningPolicy. Policies that were asked tensor by tensor (`place`) are no longer "
    "supported: `decide` gives every role its tiers, and `tier_rules` places single modules"
)


def get_policy(name: str) -> PlanningPolicy:
    """Return a new policy: a built-in one, or the class at an import path such as ``"my_package.module.MyPolicy"``."""
    if name in POLICIES:
        return POLICIES[name]()
    module, _, attribute = name.rpartition(".")
    known = ", ".join(map(repr, POLICIES))
    if not module:
        raise ConfigError(f"there is no policy {name!r}; choose one of {known}, or the import path of a class")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"policy {name!r} cannot be imported ({error}); choose one of {known}, or write package.module.Class"
        ) from error
    if not isinstance(kind, type) or not _plans(kind):
        raise ConfigError(f"policy {name!r} is no class, or {_NEEDS}")
    try:
        policy: PlanningPolicy = kind()
    except TypeError as error:
        raise ConfigError(f"policy {name!r} cannot be constructed without arguments: {error}") from error
    return policy


def check_policy(policy: object) -> None:
    if isinstance(policy, str):
        if policy not in ("auto", "by_role"):
            get_policy(policy)
    elif not _plans(policy):
        raise ConfigError(
            f"policy={policy!r} is no name ('auto', 'by_role', {', '.join(map(repr, POLICIES))}), and {_NEEDS}"
        )


def _plans(policy: object) -> bool:
    return callable(getattr(policy, "decide", None))


_UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """The plan of one policy for a job."""

    policy: str
    bytes_on: Mapping[TensorRole, Mapping[str, int]]
    """By role and tier, what decorators and rules fix included; empty if it does not fit."""
    reasons: Mapping[TensorRole, str]
    time: StepTime | None  # predicted; None if it does not fit, or speeds are not known
    error: str = ""  # why it does not fit
    needs_speeds: bool = False  # it could not decide: speeds are not known
    ssd_seconds: float | None = None
    """Seconds that the tier `ssd` adds to the predicted step; None if not predicted, or if the tier is empty."""

    @property
    def fits(self) -> bool:
        return not self.error and not self.needs_speeds

    def used_bytes(self, tier: str) -> int:
        return sum(tiers.get(tier, 0) for tiers in self.bytes_on.values())


def compare(job: Job, machine: Machine, names: Iterable[str]) -> dict[str, PolicyPlan]:
    machine, plans = with_working_memory(job, machine), {}
    policies: dict[str, PlanningPolicy] = {name: ByRole() if name == "by_role" else get_policy(name) for name in names}
    for name, policy in policies.items():
        if not machine.has_speeds and getattr(policy, "needs_speeds", True):
            plans[name] = PolicyPlan(name, {}, {}, None, needs_speeds=True)
            continue
        try:
            if job.ssd_bytes():
                ssd = machine.ssd or MachineSsd(capacity_bytes=0)
                ssd.check_bytes(job.ssd_bytes(ssd.versions))
            decision = policy.decide(job, machine)
        except TierFullError as error:
            plans[name] = PolicyPlan(name, {}, {}, None, str(error))
            continue
        bytes_on: dict[TensorRole, dict[str, int]] = {}
        reasons = dict(decision.reasons)
        for each in job.classes:
            split: Split = decision.splits[each.role] if each.tier is None else {each.tier: 1.0}
            if each.tier is not None:
                reasons.setdefault(each.role, f"asked for {each.tier}")
            own = bytes_on.setdefault(each.role, {})
            for tier, share in split.items():
                own[tier] = own.get(tier, 0) + round(share * each.nbytes)
        time = added = None
        if machine.has_speeds and (not job.ssd_bytes() or (machine.ssd is not None and machine.ssd.has_speeds)):
            time = predict_step(job, decision.splits, machine)
        if time is not None and job.ssd_bytes():
            added = time.seconds - predict_step(job.without_ssd_moves(), decision.splits, machine).seconds
        plans[name] = PolicyPlan(name, bytes_on, reasons, time, ssd_seconds=added)
    return plans


def dram_only_time(job: Job, machine: Machine) -> StepTime | None:
    """Return the predicted step as if DRAM were large enough for everything; None where speeds are not known."""
    if not machine.has_speeds:
        return None
    dram = {tier.name: _UNLIMITED_BYTES for tier in machine.select(TierKind.DRAM)}
    classes = tuple(replace(each, tier=None) for each in job.without_ssd_moves().classes)
    free = replace(job, classes=classes, num_records=0, num_swaps=0)
    return predict_step(free, DramOnly().decide(free, machine.with_capacity(dram, _UNLIMITED_BYTES)).splits, machine)


def fits(job: Job, machine: Machine, policy: str) -> bool:
    return fits_device(job, machine) and compare(job, machine, [policy])[policy].fits


def fits_device(job: Job, machine: Machine) -> bool:
    """Return whether a job fits the device's memory; yes where either is not known, or the host is the device."""
    device = machine.device
    return device.is_host or not device.memory_bytes or (job.device_bytes or 0) <= device.memory_bytes


def with_working_memory(job: Job, machine: Machine) -> Machine:
    """Return the machine that is left when the CPU computes: what it works in lies in DRAM."""
    working = working_bytes(job, machine)
    if not working:
        return machine
    left, capacity = working, {}
    for tier in machine.select(TierKind.DRAM):
        taken = min(left, tier.capacity_bytes)
        capacity[tier.name] = tier.capacity_bytes - taken
        left -= taken
    together = None if machine.host_bytes is None else max(0, machine.host_bytes - working)
    return machine.with_capacity(capacity, together)


def working_bytes(job: Job, machine: Machine) -> int:
    """Return the host memory that ranks compute in: none where a device has memory of its own."""
    return machine.device.count * (job.device_bytes or 0) if machine.device.is_host else 0
