"""What a child process measures: seconds, peaks, and what filled one step on the device, the links and the host."""

import time
from collections.abc import Iterable
from typing import Any

import torch


class StepClock:
    """Notes the end of every step, with the device's work done."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.began = 0.0

    def start(self) -> None:
        """Begin with the first step."""
        self._synchronize()
        self.began = time.perf_counter()

    def lap(self, loss: float) -> None:
        """End a step, begin the next. Host work that runs behind belongs to the step in which it is waited for."""
        self._synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.began)
        self.losses.append(loss)
        self.began = now

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class HostWork:
    """Notes when the host works on updates and gradients, on whichever thread."""

    def __init__(self) -> None:
        from lightning_cxl.gradients.guard import GradientMeter
        from lightning_cxl.gradients.step import Updates
        from lightning_cxl.optim.cpu_adam import AdamStep

        self._intervals: list[tuple[float, float]] = []
        self.num_behind_backward = 0
        """Updates of units that have run behind the backward."""
        for owner, name in (
            (AdamStep, "apply"), (GradientMeter, "copy_all"), (GradientMeter, "accumulate_all"),
            (GradientMeter, "sums"),
        ):  # fmt: skip
            setattr(owner, name, _timed(getattr(owner, name), self._intervals))
        update = Updates._update_arrived

        def counted(*args: Any) -> None:
            self.num_behind_backward += 1
            update(*args)

        Updates._update_arrived = counted  # type: ignore[method-assign]

    def seconds(self, begin: float, end: float) -> float:
        """Return how much of a time the host worked; an update may have begun in the step before."""
        return covered([(max(begin, start), min(end, stop)) for start, stop in self._intervals if stop > begin])


def _timed(function: Any, intervals: list[tuple[float, float]]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            intervals.append((start, time.perf_counter()))

    return timed


def device_seconds(events: Iterable[Any]) -> dict[str, float]:
    """Return how long the device computed, and copied in each direction, from a profile's events.

    Intervals of one kind that overlap count once.
    """
    kinds: dict[str, list[tuple[float, float]]] = {"compute": [], "h2d": [], "d2h": []}
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = "h2d" if "HtoD" in event.name else "d2h" if "DtoH" in event.name else "compute"
        kinds[kind].append((event.time_range.start, event.time_range.end))
    return {kind: covered(intervals) / 1e6 for kind, intervals in kinds.items()}


def covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
