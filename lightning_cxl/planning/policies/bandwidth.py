"""Our policy: the splits under which the predicted step is shortest, within the capacity of every tier."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.machine import Machine, MachineTier, Split
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.jobs.job import Job, MemoryClass
from lightning_cxl.planning.jobs.step import StepModel
from lightning_cxl.planning.policies.api import Decision, PlanningPolicy
from lightning_cxl.planning.policies.baselines import DramOnly, Interleave
from lightning_cxl.planning.policies.latency_first import LatencyFirst
from lightning_cxl.planning.policies.order import LEVELS, in_order
from lightning_cxl.planning.policies.room import Room
from lightning_cxl.planning.policies.search import Bounds, Fractions, minimise
from lightning_cxl.planning.policies.spread import fill

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
    plans that take equally long the simplest is chosen: what the optimizer streams is split alike, and weights and
    activations, which the device reads at nearly full speed, lie on the cards. Where the step does not depend on a
    class because something else takes longer, the tie goes to the split under which its own moves take least, so that
    DRAM is not left empty.
    """

    def decide(self, job: Job, machine: Machine) -> Decision:
        """Return the best splits found; the predicted step is never longer than that of `LatencyFirst`.

        Raises:
            TierFullError: the tiers together cannot hold the job.
        """
        classes = in_order(job)
        problem = _Problem(job, machine, classes)
        if not problem.far.tiers or not problem.near.tiers:
            only = problem.near if problem.near.tiers else problem.far
            return Decision(
                {each.role: only.split(problem.total) for each in classes},
                {each.role: "the only kind of memory there is" for each in classes},
            )
        x = problem.without_slivers(problem.simplest_good())
        splits = problem.splits(x)
        if (faster := problem.faster_rival(splits)) is not None:
            return faster
        reasons = {each.role: problem.reason(each, part) for each, part in zip(classes, x, strict=True)}
        return Decision(splits, reasons)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiers of one kind, used as one."""

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
    """The variables, bounds and cost of one job on one machine."""

    def __init__(self, job: Job, machine: Machine, classes: Sequence[MemoryClass]) -> None:
        room = Room(job, machine)
        self.classes = classes
        self.total = sum(each.nbytes for each in classes)
        self.near = _group(room, TierKind.DRAM)
        self.far = _group(room, TierKind.CXL)
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
        """Return the fractions of the simplest plan that is worth it."""
        found = [x for far, tied in _PLANS if (x := self._best(far, tied)) is not None]
        if self._greedy is not None:
            found.append(self._greedy)
        seconds = [self.seconds(x) for x in found]
        limit = min(min(seconds) * (1 + _WORTH), self._greedy_s)
        return next(x for x, took in zip(found, seconds, strict=True) if took <= limit)

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
        if self._greedy_plan is not None and self._model.seconds(self._greedy_plan.splits) < limit:
            limit, found = self._model.seconds(self._greedy_plan.splits), self._greedy_plan
        for policy in (Interleave(), DramOnly()):
            rival = _decision(policy, self._job, self._machine)
            if rival is not None and self._model.seconds(rival.splits) * (1 + _WORTH) < limit:
                limit, found = self._model.seconds(rival.splits), rival
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

    def without_slivers(self, x: Fractions) -> Fractions:
        """Return fractions of which those next to 0 or 1 are exactly that, where it fits and costs nothing."""
        for i, part in enumerate(x):
            whole = round(part)
            y = (*x[:i], float(whole), *x[i + 1 :])
            fits = self.bounds.least_local <= self.bounds.local(y) <= self.bounds.most_local
            limit = min(self.seconds(x) * (1 + _WORTH / 10), self._greedy_s)
            if 0 < abs(part - whole) < _SLIVER and fits and self.seconds(y) <= limit:
                x = y
        return x

    def reason(self, each: MemoryClass, part: float) -> str:
        moved = {kind: sum(m.nbytes for m in each.moves if m.kind == kind) for kind in ("cpu", "h2d", "d2h")}
        names = {"cpu": "streamed by the CPUs", "h2d": "read by the device", "d2h": "written by the device"}
        uses = " and ".join(names[kind] for kind, nbytes in moved.items() if nbytes) or "hardly moved"
        if part in (0.0, 1.0):
            worth = self._far_s[self.classes.index(each)] - self._near_s[self.classes.index(each)]
            where = "in DRAM, which saves" if part else "on the cards, where its moves cost"
            return f"{uses}: {where} {worth:.2g} s a step if nothing hides them"
        return f"{uses}: {part:.0%} in DRAM, so that DRAM and cards are done together".replace("%", " %")


def _group(room: Room, kind: TierKind) -> _Group:
    tiers = tuple(tier for tier in room.tiers if tier.kind is kind)
    return _Group(tiers, tuple(room.left(tier.name) for tier in tiers))


def _decision(policy: PlanningPolicy, job: Job, machine: Machine) -> Decision | None:
    """Return what a policy decides; None where it cannot place the job."""
    try:
        return policy.decide(job, machine)
    except TierFullError:
        return None
