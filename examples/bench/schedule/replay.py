"""The replay: the machine of arXiv 2507.03305 scaled down, a training step on it under several placements."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from lightning_cxl.planner.footprint import ModelShape
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.transfer.links import Route
from lightning_cxl.transfer.trace import Trace
from schedule.grid import MODES, NUM_SLOTS
from schedule.memory import LabelledMemory
from schedule.model import Net, Timeline, WaitingUnit
from schedule.paper import (
    DRAM,
    OUR_LAYOUT,
    PAPER_LAYOUT,
    Machine,
    NamedLayout,
    Plan,
    balanced,
    classes_of,
    dram_only,
    latency_first,
    naive_interleave,
    paper_links,
    role_homes,
    update_traffic,
)
from schedule.rig import Rig

BALANCED = "balanced"
"""A placement that is not executed, only computed: what a default could be."""
BYTES_SCALE = 1 / 2000
"""Memory of the replay in that of the model."""
Policy = Callable[[Mapping[TensorRole, int], Machine, int], Plan]


@dataclass(frozen=True)
class Contender:
    """A placement of a layout."""

    name: str
    policy: Policy
    layout: NamedLayout
    num_cards: int


_PAPER_POLICIES: Mapping[str, Policy] = {
    "naive interleave": naive_interleave,
    "latency-first": latency_first,
    "ours": role_homes,
    BALANCED: partial(balanced, PAPER_LAYOUT),
}
_OUR_POLICIES: Mapping[str, Policy] = {"ours": role_homes, BALANCED: partial(balanced, OUR_LAYOUT)}
_LAYERS_PER_UNIT = 4
"""Threads need milliseconds to take turns on a busy machine: few long units are disturbed less than many short ones."""


def contenders() -> list[Contender]:
    """Return the placements of both layouts, each layout with DRAM alone first."""
    found = []
    for layout, policies in ((PAPER_LAYOUT, _PAPER_POLICIES), (OUR_LAYOUT, _OUR_POLICIES)):
        found.append(Contender("DRAM only", dram_only, layout, 0))
        found += [
            Contender(f"{name}, {cards} card{'s' * (cards > 1)}", policy, layout, cards)
            for cards in (1, 2)
            for name, policy in policies.items()
        ]
    return found


@dataclass(frozen=True)
class Setting:
    """A model in training on a machine."""

    shape: ModelShape
    batch: int
    context: int
    flops_per_s: float
    dram_bytes: int

    @property
    def num_units(self) -> int:
        return self.shape.num_layers // _LAYERS_PER_UNIT

    @property
    def name(self) -> str:
        return f"{self.shape.name}, {self.batch} x {self.context}"

    @property
    def forward_s(self) -> float:
        return self.shape.forward_flops(self.batch, self.context) / self.flops_per_s

    @property
    def activation_bytes(self) -> int:
        return self.shape.activation_bytes(self.batch, self.context)

    def plan(self, contender: Contender) -> Plan:
        classes = classes_of(self.shape, contender.layout, self.activation_bytes)
        return contender.policy(classes, Machine(self.dram_bytes, contender.num_cards), self.num_units)


@dataclass(frozen=True)
class Closed:
    """What the max model says: each phase takes as long as its busiest resource."""

    forward_s: float
    backward_s: float
    update_s: float
    overlapped_s: float
    """Backward with updates beside it."""

    def step_s(self, mode: str) -> float:
        if mode == "during backward":
            return self.forward_s + self.overlapped_s
        return self.forward_s + self.backward_s + self.update_s


def closed_form(setting: Setting, contender: Contender) -> Closed:
    """Return the max model's seconds, of the machine at its own speed."""
    links, plan = paper_links(contender.num_cards), setting.plan(contender)
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    updates: Counter[str] = Counter()
    update_s = 0.0
    parameters = setting.shape.num_parameters / setting.num_units
    saved = setting.activation_bytes / setting.num_units
    for unit in range(setting.num_units):
        weights = links.route("h2d", plan(TensorRole.COMPUTE_WEIGHTS, unit))
        activations = plan(TensorRole.ACTIVATIONS, unit)
        gradients = links.route("d2h", plan(TensorRole.COMPUTE_GRADS, unit))
        _use(forward, weights, 2 * parameters)
        _use(forward, links.route("d2h", activations), saved)
        _use(backward, weights, 2 * parameters * (unit < setting.num_units - NUM_SLOTS))
        _use(backward, links.route("h2d", activations), saved)
        _use(backward, gradients, 2 * parameters)
        traffic = update_traffic(contender.layout, plan, unit, parameters)
        nbytes = sum(each.nbytes for each in traffic.values())
        _use(updates, links.host_route(traffic), nbytes)
        update_s += links.host_route(traffic).seconds(nbytes)  # unit by unit: each waits for its slowest tier
    backward_s = max(3 * setting.forward_s, *backward.values())  # recompute, and twice the forward
    overlapped_s = max(backward_s, update_s, *(backward + updates).values())
    return Closed(max(setting.forward_s, *forward.values()), backward_s, update_s, overlapped_s)


def _use(seconds: "Counter[str]", route: Route, nbytes: float) -> None:
    for resource, per_byte_s in route.uses.items():
        seconds[resource] += per_byte_s * nbytes


class Replay:
    """Steps of a contender on links, memory and compute of a setting, scaled down.

    Args:
        setting: see there.
        contender: says what lies where.
        mode: when updates are applied.
        time_scale: seconds of the replay in seconds of the machine.
    """

    def __init__(self, setting: Setting, contender: Contender, mode: str, time_scale: float) -> None:
        plan, timeline, num_units = setting.plan(contender), Timeline(), setting.num_units
        self.contender = contender
        self.closed_s = closed_form(setting, contender).step_s(mode)
        self.steps_s: list[float] = []
        """What steps took, in seconds of the machine."""
        self._time_scale = time_scale
        parameters = int(setting.shape.num_parameters / num_units * BYTES_SCALE)
        seconds = setting.forward_s / num_units * time_scale
        units = [WaitingUnit(f"unit {i}", timeline, parameters, seconds, 2 * seconds) for i in range(num_units)]
        links = paper_links(contender.num_cards).scaled(BYTES_SCALE / time_scale, time_scale)
        traffic = {f"unit {i}": update_traffic(contender.layout, plan, i, parameters) for i in range(num_units)}
        updates = partial(MODES[mode], traffic=traffic)
        memory = LabelledMemory(partial(_shares_of, plan))
        self._rig = Rig(Net(units, timeline), links, memory, updates, num_slots=NUM_SLOTS)
        saved = int(setting.activation_bytes / num_units * BYTES_SCALE)
        self._x = torch.zeros(saved // 2, dtype=torch.bfloat16)

    def step(self) -> None:
        self._rig.engine.trace.intervals.clear()
        self.steps_s.append(self._rig.step(self._x) / self._time_scale)

    def close(self) -> Trace:
        """End; returns the timeline of the last step."""
        self._rig.close()
        return self._rig.engine.trace


def _shares_of(plan: Plan, role: TensorRole, unit: str) -> Mapping[str, float]:
    """Return where memory of a unit lies; gradients are copied to what the paper calls compute gradients."""
    if role is TensorRole.STAGING:
        role = TensorRole.COMPUTE_GRADS
    return plan(role, int(unit.removeprefix("unit "))) if unit.startswith("unit ") else DRAM
