"""The replay: the machine of arXiv 2507.03305 scaled down, a training step on it under several placements."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from footprint import ModelShape
from simulation.links import Route
from simulation.trace import Trace

from lightning_cxl.machine.speeds import Split
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.policies import get_policy
from schedule.memory import LabelledMemory
from schedule.model import Net, Timeline, WaitingUnit
from schedule.paper import (
    DRAM,
    OUR_LAYOUT,
    PAPER_LAYOUT,
    NamedLayout,
    Splits,
    paper_links,
    paper_machine,
    update_traffic,
)
from schedule.rig import Rig, Updates
from schedule.updates import AfterBackward, DuringBackward

NUM_SLOTS = 3
MODES: dict[str, Callable[..., Updates]] = {"after backward": AfterBackward, "during backward": DuringBackward}

BYTES_SCALE = 1 / 2000
"""Memory of the replay in that of the model."""
POLICIES = {"naive interleave": "interleave", "latency-first": "latency_first", "ours": "bandwidth"}
"""Names in the tables to the package's policies."""
_LAYERS_PER_UNIT = 4
"""Threads need milliseconds to take turns on a busy machine: few long units are disturbed less than many short ones."""


@dataclass(frozen=True)
class Contender:
    """A policy of the package with a layout, on the machine with so many cards."""

    name: str
    policy: str
    layout: NamedLayout
    num_cards: int


def contenders() -> list[Contender]:
    """Return all policies with both layouts, each layout with DRAM alone first."""
    found = []
    for layout in (PAPER_LAYOUT, OUR_LAYOUT):
        found.append(Contender("DRAM only", "dram_only", layout, 0))
        found += [
            Contender(f"{name}, {cards} card{'s' * (cards > 1)}", policy, layout, cards)
            for cards in (1, 2)
            for name, policy in POLICIES.items()
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
    mode: str
    """When updates are applied, one of `MODES`."""

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

    def splits(self, contender: Contender) -> Splits:
        """Return what the contender's policy decides."""
        job = contender.layout.job(self.shape, self.batch, self.context)
        overlap = "backward" if self.mode == "during backward" else "none"
        job = replace(job, num_units=self.num_units, overlap=overlap)
        machine = paper_machine(contender.num_cards, self.flops_per_s, self.dram_bytes)
        return get_policy(contender.policy).decide(job, machine).splits


@dataclass(frozen=True)
class Closed:
    """What the max model says: each phase takes as long as its busiest resource."""

    forward_s: float
    backward_s: float
    update_s: float
    overlapped_s: float
    """Backward with updates beside it."""
    step_s: float


def closed_form(setting: Setting, contender: Contender) -> Closed:
    """Return the max model's seconds, of the machine at its own speed."""
    links, splits = paper_links(contender.num_cards), setting.splits(contender)
    weight_bytes, saved_bytes = 2 * setting.shape.num_parameters, setting.activation_bytes
    weights = links.route("h2d", splits[TensorRole.COMPUTE_WEIGHTS])
    activations = splits[TensorRole.ACTIVATIONS]
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    updates: Counter[str] = Counter()
    _use(forward, weights, weight_bytes)
    _use(forward, links.route("d2h", activations), saved_bytes)
    # those in the slots when forward ends need not come again
    _use(backward, weights, weight_bytes * (1 - min(NUM_SLOTS, setting.num_units) / setting.num_units))
    _use(backward, links.route("h2d", activations), saved_bytes)
    _use(backward, links.route("d2h", splits[TensorRole.COMPUTE_GRADS]), weight_bytes)
    traffic = update_traffic(contender.layout, splits, setting.shape.num_parameters)
    nbytes = sum(each.nbytes for each in traffic.values())
    _use(updates, links.host_route(traffic), nbytes)
    update_s = links.host_route(traffic).seconds(nbytes)
    forward_s = max(setting.forward_s, *forward.values())
    backward_s = max(3 * setting.forward_s, *backward.values())  # recompute, and twice the forward
    overlapped_s = max(backward_s, update_s, *(backward + updates).values())
    after_forward_s = overlapped_s if setting.mode == "during backward" else backward_s + update_s
    return Closed(forward_s, backward_s, update_s, overlapped_s, forward_s + after_forward_s)


def _use(seconds: "Counter[str]", route: Route, nbytes: float) -> None:
    for resource, per_byte_s in route.uses.items():
        seconds[resource] += per_byte_s * nbytes


class Replay:
    """Steps of a contender on links, memory and compute of a setting, scaled down.

    Args:
        setting: see there.
        contender: says what lies where.
        time_scale: seconds of the replay in seconds of the machine.
    """

    def __init__(self, setting: Setting, contender: Contender, time_scale: float) -> None:
        splits, timeline, num_units = setting.splits(contender), Timeline(), setting.num_units
        self.contender = contender
        self.closed_s = closed_form(setting, contender).step_s
        self.steps_s: list[float] = []
        """What steps took, in seconds of the machine."""
        self._time_scale = time_scale
        parameters = int(setting.shape.num_parameters / num_units * BYTES_SCALE)
        seconds = setting.forward_s / num_units * time_scale
        units = [WaitingUnit(f"unit {i}", timeline, parameters, seconds, 2 * seconds) for i in range(num_units)]
        links = paper_links(contender.num_cards).scaled(BYTES_SCALE / time_scale, time_scale)
        traffic = update_traffic(contender.layout, splits, parameters)
        updates = partial(MODES[setting.mode], traffic={f"unit {i}": traffic for i in range(num_units)})
        memory = LabelledMemory(partial(_shares_of, splits))
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


def _shares_of(splits: Splits, role: TensorRole, unit: str) -> Split:
    """Return where memory of a unit lies; gradients are copied to what the paper calls compute gradients."""
    if role is TensorRole.STAGING:
        role = TensorRole.COMPUTE_GRADS
    return splits[role] if unit.startswith("unit ") else DRAM
