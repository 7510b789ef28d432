"""What applies updates: unit after unit when backward is over, or while it runs."""

import queue
import threading
from collections.abc import Mapping
from functools import partial

import torch

from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.grads import GradientSink
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.optim.meter import GradientMeter
from lightning_cxl.streaming.unit_weights import UnitWeights
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.transfer.engine import Transfer
from schedule.rig import Rig, UnitTraffic

_OPTIONS = {"lr": 1e-4, "num_threads": 1}


class AfterBackward:
    """Gradients are complete when backward returns; then unit after unit is updated.

    Args:
        rig: what is trained.
        traffic: what the update of each unit streams, by unit.
    """

    def __init__(self, rig: Rig, traffic: Mapping[str, UnitTraffic]) -> None:
        self._engine = rig.engine
        self._traffic = traffic
        self._sink = GradientSink(
            rig.engine, rig.allocate_like, GradientMeter(1), streamed=rig.unit_of, bring_home=rig.streamer.release
        )
        masters = MasterWeights({}, rig.allocate_like)
        self._sink.watch([masters.adopt(parameter, "split") for parameter in rig.model.parameters()])
        self._optimizers = {name: CPUAdam(unit.parameters(), **_OPTIONS) for name, unit in rig.model.named_units()}

    def finish(self) -> None:
        for name, optimizer in self._optimizers.items():
            with self._engine.host_work(name, self._traffic[name]):
                optimizer.step()
                optimizer.zero_grad()

    def close(self) -> None:
        self._sink.close()


class DuringBackward:
    """A worker updates every unit as soon as its gradients are on the host and its weights have left the device.

    A stand-in for measuring the schedule: one backward per step, no clipping, nobody else reads gradients.

    Args:
        rig: what is trained.
        traffic: what the update of each unit streams, by unit.
    """

    def __init__(self, rig: Rig, traffic: Mapping[str, UnitTraffic]) -> None:
        self._rig = rig
        self._traffic = traffic
        self._arrived: dict[str, list[tuple[torch.nn.Parameter, Transfer, torch.Tensor]]] = {}
        self._masters = {
            unit.name: [torch.nn.Parameter(place.home) for place in unit.places] for unit in rig.units
        }  # show the home always, also while the compute weights show the device
        self._optimizers = {name: CPUAdam(masters, **_OPTIONS) for name, masters in self._masters.items()}
        self._hooks = [
            place.parameter.register_post_accumulate_grad_hook(partial(self._receive, unit.name, index))
            for unit in rig.units
            for index, place in enumerate(unit.places)
        ]
        self._leave = rig.streamer.leave
        rig.streamer.leave = self._left  # type: ignore[method-assign]
        self._jobs: queue.SimpleQueue[UnitWeights | None] = queue.SimpleQueue()
        self._num_open = 0
        self._updated = threading.Semaphore(0)
        self._worker = threading.Thread(target=self._work, name="updates", daemon=True)
        self._worker.start()

    def finish(self) -> None:
        self._rig.streamer.release()
        while self._num_open:
            self._updated.acquire()
            self._num_open -= 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._rig.streamer.leave = self._leave  # type: ignore[method-assign]
        self._jobs.put(None)
        self._worker.join()

    def _receive(self, unit: str, index: int, parameter: torch.Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        staging = self._rig.allocate_like(parameter, TensorRole.STAGING, grad.dtype)
        transfer = self._rig.engine.d2h(grad, staging)
        self._arrived.setdefault(unit, []).append((self._masters[unit][index], transfer, staging))

    def _left(self, unit: UnitWeights) -> None:
        self._leave(unit)
        if len(self._arrived.get(unit.name, ())) == len(unit.places):
            self._num_open += 1
            self._jobs.put(unit)

    def _work(self) -> None:
        while (unit := self._jobs.get()) is not None:
            for master, transfer, staging in self._arrived.pop(unit.name):
                transfer.wait_host()
                master.grad = staging
            optimizer = self._optimizers[unit.name]
            with self._rig.engine.host_work(unit.name, self._traffic[unit.name]):
                optimizer.step()
                optimizer.zero_grad()
            # copies in the slots are old now
            torch.autograd.graph.increment_version([place.parameter for place in unit.places])
            self._updated.release()
