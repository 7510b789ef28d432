"""Steps of several ranks on simulated links: unit after unit is read, gathered, computed, reduced, written, updated.

Every piece of work is a flow of the `LinkClock`, in simulated time only: nothing is copied, nobody waits. Flows of one
lane run one after the other, and start when those they need have ended. Flows that use one resource share it: the host
memory of the machine is one for all ranks, and a gather uses the peer links of all of them at once.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from simulation.clock import Flow, LinkClock
from simulation.links import Direction, HostTraffic, Links, Route

Phase = Literal["forward", "backward"]
_TIER = "host"


@dataclass(frozen=True, kw_only=True)
class ShardedUnits:
    """A model of equal units that several ranks of one machine train, and what its links do."""

    num_ranks: int
    num_units: int = 16
    forward_s: float
    """Of one unit on one device."""
    backward_s: float
    """Of one unit with its recompute."""
    weight_bytes: float
    """Of one whole unit; gradients are as large."""
    activation_bytes: float
    """Of one unit's input on one device."""
    adam: HostTraffic
    """What the update of one whole unit reads and writes."""
    links: Links
    """Of one device, and of the host memory that is called `host`."""
    peer_bytes_per_s: float
    peer_latency_s: float = 0.0
    prefetch: int = 2
    """Units that are fetched and gathered ahead of the one that is computed, in forward and in backward."""
    overlap: Phase = "forward"
    """What updates run behind."""

    @property
    def shard_bytes(self) -> float:
        return self.weight_bytes / self.num_ranks

    def copy_route(self, rank: int, direction: Direction) -> Route:
        """Return what a copy of a rank uses: its own link, and the host memory of all."""
        route = self.links.route(direction, {_TIER: 1.0})
        uses = {name.replace("device", f"device {rank}"): seconds for name, seconds in route.uses.items()}
        return Route(uses, route.latency_s)

    def ring_route(self) -> Route:
        """Return what a gather or a reduction uses: the links of all ranks, for what one of them receives."""
        uses = {f"peer {rank}": 1 / self.peer_bytes_per_s for rank in range(self.num_ranks)}
        return Route(uses, self.peer_latency_s * (self.num_ranks - 1))

    def update_route(self) -> Route:
        return self.links.host_route({_TIER: self.adam})


@dataclass(frozen=True)
class Simulated:
    """One step among others like it."""

    seconds: float
    busy_s: Mapping[Phase, Mapping[str, float]]
    """Of every resource in forward and in backward, updates where they overlap."""

    @property
    def longest_s(self) -> float:
        """Return what the resource takes that is busy longest, as if all of its work could be done at any time."""
        return max(sum((Counter(each) for each in self.busy_s.values()), Counter()).values())

    @property
    def ideal_s(self) -> float:
        """Return what the busiest resources of both phases take one after the other.

        Backward cannot begin before forward has ended, and has work of its own for every resource: gradients to reduce,
        updates, or weights that the device had no room to keep. Only the ends of phases can overlap.
        """
        return sum(max(each.values()) for each in self.busy_s.values())

    def bound_by(self, phase: Phase) -> str:
        busy = self.busy_s[phase]
        return max(busy, key=lambda name: busy[name])


def simulate(units: ShardedUnits, num_steps: int = 3) -> Simulated:
    """Return the last of some steps in a row: what it adds to the time of those before."""
    before, after = (_Schedule(units) for _ in range(2))
    seconds = after.run(num_steps) - before.run(num_steps - 1)
    return Simulated(seconds, {phase: busy - before.busy[phase] for phase, busy in after.busy.items()})


class _Schedule:
    """Submits the flows of steps in a row, and lets the clock run to their end."""

    def __init__(self, units: ShardedUnits) -> None:
        self._units = units
        self._clock = LinkClock()
        self.busy: dict[Phase, Counter[str]] = {"forward": Counter(), "backward": Counter()}
        self._phase: Phase = "forward"
        self._ranks = range(units.num_ranks)
        self._slots = units.prefetch + 1
        self._swaps: list[list[Flow]] = []  # computations of the ranks, visit after visit
        self._reductions: list[list[Flow]] = []
        self._updated: dict[int, list[Flow]] = {}  # by unit

    def run(self, num_steps: int) -> float:
        """Return when the last computation ends."""
        order = [*range(self._units.num_units)]
        for _ in range(num_steps):
            self._phase = "forward"
            stored = {unit: self._forward(unit) for unit in order}
            self._phase = "backward"
            left = {unit: self._backward(unit, stored[unit]) for unit in reversed(order)}
            self._phase = self._units.overlap
            behind_backward = self._units.overlap == "backward"
            # behind the forward they wait for the norm of all gradients, and begin with what is needed first
            everything = [flow for flows in left.values() for flow in flows]
            for unit in reversed(order) if behind_backward else order:
                self._updated[unit] = self._update(left[unit] if behind_backward else everything)
        while (event_s := self._clock.next_event_s()) != float("inf"):
            self._clock.advance(event_s)
        return max(flow.end_s or 0.0 for flow in self._swaps[-1])

    def _forward(self, unit: int) -> list[Flow]:
        read = self._read(unit)
        computed = self._compute(self._units.forward_s, read, [[] for _ in self._ranks])
        return [self._copy(rank, "d2h", self._units.activation_bytes, [computed[rank]]) for rank in self._ranks]

    def _backward(self, unit: int, stored: list[Flow]) -> list[Flow]:
        room = self._before(self._swaps, self._slots)
        read = self._read(unit)  # the last unit's weights need not wait until its input has been stored
        loaded = [
            self._copy(rank, "h2d", self._units.activation_bytes, [stored[rank], *room[rank : rank + 1]])
            for rank in self._ranks
        ]
        waits = self._before(self._reductions, 2)  # gradients of two units fit on a device: computed, and reduced
        computed = self._compute(self._units.backward_s, read, [[flow, *waits] for flow in loaded])
        reduced = [self._ring("reduce", computed)]
        self._reductions.append(reduced)
        return [self._copy(rank, "d2h", self._units.shard_bytes, reduced) for rank in self._ranks]

    def _read(self, unit: int) -> list[Flow]:
        """Copy every rank's shard of a unit to the devices."""
        updated, room = self._updated.get(unit, []), self._before(self._swaps, self._slots)
        return [
            self._copy(rank, "h2d", self._units.shard_bytes, [*updated[rank : rank + 1], *room]) for rank in self._ranks
        ]

    def _compute(self, seconds: float, read: list[Flow], needed: list[list[Flow]]) -> list[Flow]:
        """Gather what was read, and compute with it on all devices."""
        room = self._before(self._swaps, self._slots)
        gathered = self._ring("gather", [*read, *room])
        computed = [
            self._submit(f"compute {rank}", 1.0, Route({f"compute {rank}": seconds}, 0.0), [gathered, *needed[rank]])
            for rank in self._ranks
        ]
        self._swaps.append(computed)
        return computed

    def _update(self, needed: list[Flow]) -> list[Flow]:
        units = self._units
        each = units.adam.nbytes / units.num_ranks
        return [self._submit(f"update {rank}", each, units.update_route(), needed) for rank in self._ranks]

    def _copy(self, rank: int, direction: Direction, nbytes: float, after: list[Flow]) -> Flow:
        return self._submit(f"{direction} {rank}", nbytes, self._units.copy_route(rank, direction), after)

    def _ring(self, kind: str, after: list[Flow]) -> Flow:
        received = self._units.shard_bytes * (self._units.num_ranks - 1)
        return self._submit(kind, received, self._units.ring_route(), after)

    def _submit(self, lane: str, nbytes: float, route: Route, after: list[Flow]) -> Flow:
        for resource, seconds in route.uses.items():
            self.busy[self._phase][resource] += seconds * nbytes
        return self._clock.submit(lane, nbytes, route, now_s=0.0, after=after)  # type: ignore[arg-type]

    @staticmethod
    def _before(flows: list[list[Flow]], count: int) -> list[Flow]:
        """Return the flows of `count` visits ago."""
        return flows[-count] if len(flows) >= count else []
