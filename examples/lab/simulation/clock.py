"""When copies over shared links begin and end: a fluid model that is told the time and never sleeps."""

import math
from collections import deque
from collections.abc import Sequence

from simulation.links import Route


class Flow:
    """One copy, as the clock sees it. Times are None until they have come."""

    __slots__ = ("after", "end_s", "is_flowing", "next_s", "rate", "remaining_bytes", "route", "start_s")

    def __init__(self, nbytes: int, route: Route, after: "Sequence[Flow]") -> None:
        self.route = route
        self.after = after
        self.remaining_bytes = float(nbytes)
        self.rate = 0.0  # bytes per second, until next_s
        self.next_s = math.inf  # end of the latency, then of the copy, if nothing else happens before
        self.is_flowing = False  # past the latency
        self.start_s: float | None = None
        self.end_s: float | None = None

    def has_started(self) -> bool:
        """Return whether the clock has come to the start."""
        return self.start_s is not None

    def has_ended(self) -> bool:
        """Return whether the clock has come to the end."""
        return self.end_s is not None


class LinkClock:
    """Flows of one lane run one after the other; all that run share what they use, max-min fairly.

    Rates change only when a flow begins or ends, so the clock goes from one such event to the next, at their exact
    times however late it is told. Not safe from several threads.
    """

    def __init__(self) -> None:
        self._now_s = -math.inf
        self._lanes: dict[str, deque[Flow]] = {}  # the first of each lane runs, or waits for another lane
        self._running: list[Flow] = []

    def submit(self, lane: str, nbytes: int, route: Route, *, now_s: float, after: Sequence[Flow] = ()) -> Flow:
        """Queue a flow; it starts when those before it on its lane, and `after`, have ended."""
        self.advance(now_s)
        flow = Flow(nbytes, route, after)
        self._lanes.setdefault(lane, deque()).append(flow)
        self._settle()
        return flow

    def next_event_s(self) -> float:
        """Return when the next flow changes its state, if nothing is submitted before; inf if none runs."""
        return min((flow.next_s for flow in self._running), default=math.inf)

    def advance(self, now_s: float) -> None:
        """Let everything happen that happens until `now_s`.

        Raises:
            ValueError: the time has been later already.
        """
        if now_s < self._now_s:
            raise ValueError(f"time runs forward: it was {self._now_s} s, got {now_s} s")
        while (event_s := self.next_event_s()) <= now_s:
            self._move(event_s)
            self._settle()
        self._move(now_s)

    def _move(self, to_s: float) -> None:
        for flow in self._running:
            flow.remaining_bytes = max(0.0, flow.remaining_bytes - flow.rate * (to_s - self._now_s))
        self._now_s = to_s

    def _settle(self) -> None:
        """End, begin, and give new rates, as of now."""
        for flow in [flow for flow in self._running if flow.next_s <= self._now_s]:
            if flow.is_flowing:
                flow.end_s = self._now_s
                flow.after = ()  # a chain of copies would keep all its links
                self._running.remove(flow)
            flow.is_flowing = True
        for lane in self._lanes.values():
            while lane and lane[0].has_ended():
                lane.popleft()
            if lane and not lane[0].has_started() and all(each.has_ended() for each in lane[0].after):
                self._start(lane[0])
        flowing = [flow for flow in self._running if flow.is_flowing]
        for flow, rate in zip(flowing, fair_rates([flow.route for flow in flowing]), strict=True):
            flow.rate = rate
            flow.next_s = self._now_s + flow.remaining_bytes / rate

    def _start(self, flow: Flow) -> None:
        flow.start_s = self._now_s
        flow.is_flowing = flow.route.latency_s == 0
        flow.next_s = self._now_s + flow.route.latency_s
        self._running.append(flow)


def fair_rates(routes: Sequence[Route]) -> list[float]:
    """Return bytes per second for flows that run at once: equal, but those that meet no full resource get more.

    All rates rise together until a resource is full; the flows that use it stay at that rate, and the others go on.

    Reference: Bertsekas & Gallager 1992, Data Networks, section 6.5.2 (max-min fair flow control).
    """
    rates = [0.0] * len(routes)
    rising = list(range(len(routes)))
    free = {resource: 1.0 for route in routes for resource in route.uses}  # second per second
    while rising:
        load = dict.fromkeys(free, 0.0)
        for index in rising:
            for resource, seconds in routes[index].uses.items():
                load[resource] += seconds
        step, full = min((free[resource] / seconds, resource) for resource, seconds in load.items() if seconds)
        for index in rising:
            rates[index] += step
        for resource, seconds in load.items():
            free[resource] = max(0.0, free[resource] - step * seconds)
        rising = [index for index in rising if full not in routes[index].uses]
    return rates
