"""`Rig`: one model whose units stream over simulated links, with the package's own parts."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from simulation.engine import SimulatedEngine
from simulation.links import HostTraffic, Links

from lightning_cxl.memory.host_memory import mirror
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.unit_weights import InMemory, ParamStreamer, UnitWeights
from lightning_cxl.streaming.units import streamable
from schedule.memory import LabelledMemory
from schedule.model import Net

UnitTraffic = Mapping[str, HostTraffic]


class Updates(Protocol):
    """What receives the gradients of a step and applies its updates."""

    def begin(self) -> None:
        """Begin a step; called before forward."""

    def finish(self) -> None:
        """Return when every unit of the step is updated; called after backward."""

    def close(self) -> None:
        """Receive no more gradients."""


class Rig:
    """A model in training, with weights, gradients and activations on simulated tiers.

    Args:
        model: its units are offloaded. INOUT.
        links: of the device and the tiers.
        memory: says what lies where.
        updates: makes what receives gradients and applies updates; attaches the streamer.
        num_slots: of the device, for weights.
    """

    def __init__(
        self,
        model: Net,
        links: Links,
        memory: LabelledMemory,
        updates: "Callable[[Rig], Updates]",
        *,
        num_slots: int = 3,
    ) -> None:
        self.model = model
        self.engine = SimulatedEngine(links, memory.addresses.shares, memory.addresses.name)
        self._memory = memory
        self.unit_of = {id(p): name for name, unit in model.named_units() for p in unit.parameters()}
        self.offload = ActivationOffload(self.engine, self._allocate_activation, min_bytes=1)
        self.units = [
            UnitWeights(name, module, [parameters], self._allocate_weights)
            for name, module, parameters in streamable(model, model.named_units())
        ]
        self.streamer = ParamStreamer(self.engine, self.units, lambda: self.offload.phase, num_slots=num_slots)
        self.updates = updates(self)  # attaches the streamer
        self.offload.attach(model.named_units())
        model.timeline.trace = self.engine.trace

    def step(self, x: torch.Tensor) -> float:
        """Train once; returns the seconds until every weight is updated."""
        start_s = time.perf_counter()
        self.updates.begin()
        self.model(x).backward()
        self.updates.finish()
        seconds = time.perf_counter() - start_s
        self.model.scale.grad = None
        return seconds

    def close(self) -> None:
        self.updates.close()
        self.offload.detach()
        self.streamer.detach()
        self.engine.close()
        self.model.timeline.trace = None

    def _allocate_weights(self, nbytes: int, parameters: Sequence[torch.nn.Parameter]):
        return InMemory(self._memory.allocate(nbytes, TensorRole.COMPUTE_WEIGHTS, self.unit_of[id(parameters[0])]))

    def _allocate_activation(self, nbytes: int, unit: str):
        return self._memory.allocate(nbytes, TensorRole.ACTIVATIONS, unit)

    def allocate_like(self, parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype) -> torch.Tensor:
        unit = self.unit_of.get(id(parameter), "rest")
        return mirror(
            parameter,
            dtype,
            lambda count, dt: self._memory.allocate(count * dt.itemsize, role, unit).tensor((count,), dt),
        )

    def allocate_all(self, wanted: Sequence[tuple[torch.nn.Parameter, torch.dtype]], role: TensorRole):
        return [self.allocate_like(parameter, role, dtype) for parameter, dtype in wanted]

    def bring_home(self) -> None:
        self.streamer.release()
