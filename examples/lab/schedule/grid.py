"""The grid: real matrix products against links of a given speed."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from simulation.links import HostTraffic, Link, Links
from simulation.trace import Trace

from schedule.ideal import Step, UnitShape
from schedule.memory import LabelledMemory
from schedule.model import Net, make_matrix_net
from schedule.rig import Rig, Updates
from schedule.updates import AfterBackward, DuringBackward

NUM_SLOTS = 3
_COPY_LATENCY_S = 1e-5
_FREE = 1e3  # times the device's link: a tier that never decides
MODES: dict[str, Callable[..., Updates]] = {"after backward": AfterBackward, "during backward": DuringBackward}
# update and copies to the device, each in parts of the longest transfer
KINDS = {"copies": (0.5, 1.0), "updates": (1.0, 0.5)}


@dataclass(frozen=True)
class Cell:
    """One model on one set of links."""

    num_units: int
    ratio: float
    """Seconds of compute in seconds of the longest transfer."""
    kind: str
    """Which transfer is the longest: copies to the device, or updates on the host."""
    mode: str
    """When updates are applied."""

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.num_units} units, compute:transfer {self.ratio:g}, update {self.mode}"


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    width: int = 384
    repeats: int = 2
    warm_up: int = 2
    rounds: int = 5


@dataclass(frozen=True)
class Measured:
    """What the rounds of a cell took."""

    cell: Cell
    wall_s: list[float]
    steps: list[Step]
    """What each of them would have taken at best, by the plain step beside it."""
    trace: Trace
    """Of the last step."""
    max_lag_s: float
    """The most that a copy was late by: large where this machine cannot keep up."""

    def ratio_to(self, best_s: Callable[[Step], float]) -> float:
        """Return the median of the rounds' ratios: a round is disturbed as a whole."""
        return statistics.median(wall / best_s(step) for wall, step in zip(self.wall_s, self.steps, strict=True))

    def least_ratio_to(self, best_s: Callable[[Step], float]) -> float:
        """Return the fastest round in the best of the fastest plain round: others on the machine only add time."""
        return min(self.wall_s) / min(map(best_s, self.steps))

    def spread(self) -> float:
        return (max(self.wall_s) - min(self.wall_s)) / statistics.median(self.wall_s)


class Plain:
    """The same computation with plain checkpointing: takes as long as compute does."""

    def __init__(self, net: Net) -> None:
        self._net = net
        net.is_checkpointed = True

    def step(self, x: torch.Tensor) -> tuple[float, float]:
        """Return the seconds of forward, and of recompute and backward."""
        start_s = time.perf_counter()
        loss = self._net(x)
        middle_s = time.perf_counter()
        loss.backward()
        end_s = time.perf_counter()
        self._net.zero_grad()
        return middle_s - start_s, end_s - middle_s


def measure(cell: Cell, effort: Effort) -> Measured:
    """Let a plain and a streamed step take turns."""
    # as many rows as a unit has columns of weights: activations are as large as weights, so that forward and backward
    # need about the same parts of the copies as of the compute
    x = torch.randn(2 * effort.width, effort.width)
    make = partial(make_matrix_net, cell.num_units, effort.width, effort.repeats)
    plain = Plain(make())
    calibration = [plain.step(x) for _ in range(effort.warm_up + 5)][effort.warm_up :]
    compute_s = min(sum(each) for each in calibration)  # others on the machine only add time
    links, shape = links_for(cell, compute_s, x.nbytes)
    traffic = {f"unit {index}": {"state": _update_traffic(x.nbytes)} for index in range(cell.num_units)}
    memory = LabelledMemory(lambda role, unit: {"copied": 1.0})
    rig = Rig(make(), links, memory, partial(MODES[cell.mode], traffic=traffic), num_slots=NUM_SLOTS)
    wall_s, steps = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(effort.warm_up + effort.rounds):
            rig.engine.trace.intervals.clear()
            wall_s.append(rig.step(x))
            steps.append(shape.step(cell.num_units, NUM_SLOTS, *plain.step(x)))
    finally:
        gc.enable()
        rig.close()
    kept = slice(effort.warm_up, None)
    return Measured(cell, wall_s[kept], steps[kept], rig.engine.trace, rig.engine.max_lag_s)


def links_for(cell: Cell, compute_s: float, nbytes: int) -> tuple[Links, UnitShape]:
    """Return links on which a step's longest transfer takes `compute_s` over the cell's ratio.

    Args:
        cell: gives the ratio and which transfer is the longest.
        compute_s: of a step.
        nbytes: of the weights, of the gradients and of the saved input of a unit.
    """
    longest_s = compute_s / cell.ratio
    update_part, copy_part = KINDS[cell.kind]
    copied = (cell.num_units + max(0, cell.num_units - NUM_SLOTS) + cell.num_units) * nbytes
    bytes_per_s = copied / (longest_s * copy_part)
    update_s = longest_s * update_part / cell.num_units
    # updates have a tier of their own here, so that each kind of work has one speed; the replay lets them compete
    state = Link(_update_traffic(nbytes).nbytes / update_s, _update_traffic(nbytes).nbytes / update_s)
    device = Link(bytes_per_s, bytes_per_s, _COPY_LATENCY_S, duplex=2)
    links = Links(device, {"copied": device.scaled(_FREE, 0.0), "state": state})
    return links, UnitShape(nbytes, nbytes, nbytes, update_s, bytes_per_s, bytes_per_s)


def _update_traffic(nbytes: int) -> HostTraffic:
    """Return what Adam reads (weights, gradients, momentum, variance) and writes (all but gradients)."""
    return HostTraffic(4 * nbytes, 3 * nbytes)
