"""What applies updates: unit after unit when backward is over, or while it runs."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from simulation.engine import SimulatedEngine

from lightning_cxl.gradients.guard import GradientMeter, OverflowGuard
from lightning_cxl.gradients.offload import GradientOffload, HostWorker
from lightning_cxl.gradients.step import Updates
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.streaming.unit_weights import UnitWeights
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
        masters = MasterWeights({}, rig.allocate_like)
        self._grads = _gradients(rig, None)
        self._grads.watch([masters.adopt(parameter, "split") for parameter in rig.model.parameters()])
        rig.streamer.attach(self._grads)
        self._optimizers = {name: CPUAdam(unit.parameters(), **_OPTIONS) for name, unit in rig.model.named_units()}

    def begin(self) -> None:
        """Nothing to do."""

    def finish(self) -> None:
        for name, optimizer in self._optimizers.items():
            with self._engine.host_work(name, self._traffic[name]):
                optimizer.step()
                optimizer.zero_grad()

    def close(self) -> None:
        self._grads.close()


class DuringBackward:
    """The package's own schedule: a worker updates every unit when its backward is over.

    Args:
        rig: what is trained.
        traffic: what the update of each unit streams, by unit.
    """

    def __init__(self, rig: Rig, traffic: Mapping[str, UnitTraffic]) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1)
        worker = HostWorker(self._executor)
        masters = MasterWeights({}, rig.allocate_like)
        self._grads = _gradients(rig, worker)
        self._updates = _PacedUpdates(rig, traffic, masters, worker, self._grads)
        self._grads.watch([masters.adopt(parameter, "split") for parameter in rig.model.parameters()])
        self._optimizer = CPUAdam(rig.model.parameters(), **_OPTIONS)
        rig.streamer.attach(self._grads)

    def begin(self) -> None:
        self._updates.begin(self._optimizer)
        self._grads.begin_step()
        self._grads.start_backward()

    def finish(self) -> None:
        self._grads.end_step()
        self._updates.update(self._optimizer, self._optimizer.step, None)
        self._updates.wait()
        self._optimizer.zero_grad()

    def close(self) -> None:
        self._executor.shutdown()
        self._grads.close()


class _PacedUpdates(Updates):
    """Every update takes as long as its bytes take on the simulated tiers."""

    def __init__(
        self,
        rig: Rig,
        traffic: Mapping[str, UnitTraffic],
        masters: MasterWeights,
        worker: HostWorker,
        grads: GradientOffload,
    ) -> None:
        super().__init__(
            rig.units,
            masters,
            grads,
            rig.streamer,
            worker,
            in_backward=True,
            max_in_flight=len(rig.units),
            guard=OverflowGuard("ignore", 1, str, GradientMeter(1)),
            parameters=rig.model.parameters(),
            awaited={},
        )
        self._engine: SimulatedEngine = rig.engine
        self._traffic = traffic

    def start(self, unit: UnitWeights, written: Sequence[torch.Tensor], job: Callable[[], None]) -> None:
        super().start(unit, written, partial(self._paced, unit.name, job))

    def _paced(self, unit: str, job: Callable[[], None]) -> None:
        with self._engine.host_work(unit, self._traffic[unit]):
            job()


def _gradients(rig: Rig, worker: HostWorker | None) -> GradientOffload:
    return GradientOffload(rig.engine, rig.allocate_all, GradientMeter(1), worker, rig.bring_home, rig.unit_of)
