"""`Processes`: what Lightning and Fabric ask a strategy about processes; `ProcessesStrategy`: the same for Lightning.

With one device there is one process, which is on its own whatever a cluster calls it: no group, no launcher. Several
devices or machines have a process for each device, which start and meet as those of Lightning's `ModelParallelStrategy`
do. torch.distributed is asked in `sharding/processes.py`.
"""

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_cxl.devices.device_type import device_type_of
from lightning_cxl.integrations.lightning.lightning_api import (
    ParallelStrategy,
    SubprocessScriptLauncher,
    init_dist_connection,
    rank_zero_only,
    reset_seed,
)
from lightning_cxl.sharding import processes

log = logging.getLogger(__name__)
_Base: Any = object  # two frameworks have each a class of their own behind `super()`


class Processes(_Base):  # type: ignore[misc]
    """Before Lightning's or Fabric's `ParallelStrategy` in the bases of a strategy.

    The framework fills in the devices, the number of machines and the cluster environment that it has found.
    """

    num_nodes = 1
    replicate_machines = False
    """Whether every machine has all of the training state; see `OffloadConfig.replicate_machines`."""
    timeout: timedelta | None = None
    """For which a rank waits for the others in a collective; None is torch's own."""
    _device_mesh: DeviceMesh | None = None

    # -- which process this is ---------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Processes on each machine: one for each device."""
        return len(self.parallel_devices or [None])

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train one model."""
        return self.num_nodes * self.num_processes > 1

    @property
    def global_rank(self) -> int:
        """The number of this process among all."""
        return super().global_rank if self.is_distributed else 0

    @property
    def local_rank(self) -> int:
        """The number of this process among those of its machine."""
        return super().local_rank if self.is_distributed else 0

    @property
    def node_rank(self) -> int:
        """The number of this machine."""
        return super().node_rank if self.is_distributed else 0

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return super().world_size if self.is_distributed else 1

    @property
    def root_device(self) -> torch.device:
        """The device that the model computes on in this process."""
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data is for this process: every rank has its own."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, with dimension ``shard``; before it ``replicate``, where every machine has all of the state."""
        if self._device_mesh is None:
            raise RuntimeError(
                f"{type(self).__name__} has no device mesh: it is there after `setup_environment` (Fabric: `launch`), "
                f"where there are several devices; there are {self.num_nodes * self.num_processes} here"
            )
        return self._device_mesh

    # -- start -------------------------------------------------------------------------------------------------------

    def set_world_ranks(self) -> None:
        """Tell the cluster environment, and what prints on one rank alone, which process this is."""
        if self.is_distributed and self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Prepare the device, and let the processes meet."""
        if self.root_device.type != "cpu":
            device_type_of(self.root_device)
        super().setup_environment()
        if self.is_distributed:
            self._meet()

    def _meet(self) -> None:
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        options = processes.group_options(self.root_device, self.timeout)
        if (store := processes.store_of_restart(os.environ)) is not None:
            options["store"] = store
        backend = processes.backend_for(self.root_device)
        init_dist_connection(self.cluster_environment, backend, self.global_rank, self.world_size, **options)
        self._device_mesh = processes.make_mesh(
            self.root_device, self.num_nodes, self.num_processes, replicate=self.replicate_machines
        )

    # -- together ----------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes; before they have met, for none."""
        if self._has_met:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` gives."""
        return processes.broadcast(obj, src) if self._has_met else obj

    def _reduce(self, tensor: Any, group: Any, op: Any) -> Any:
        """Replace a tensor by that of all processes together; anything else stays as it is."""
        return processes.reduce(tensor, group, op) if self._has_met and isinstance(tensor, Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all processes say yes; with ``all=False``, whether any does."""
        return super().reduce_boolean_decision(decision, all) if self._has_met else decision

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, stacked in a new first dimension; with one process, `tensor` itself."""
        return super().all_gather(tensor, group, sync_grads) if self._has_met else tensor

    @property
    def _has_met(self) -> bool:
        return self.is_distributed and dist.is_initialized()


class _Launcher(SubprocessScriptLauncher):
    """Names an error before callbacks get it: one that saves then waits for other ranks, and may end with theirs."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start what is to be started, then call `function` in every process."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                log.error("rank %s fails: %s: %s", rank_zero_only.rank, type(error).__name__, error)  # type: ignore[attr-defined]
                raise

        return super().launch(call, *args, trainer=trainer, **kwargs)


class ProcessesStrategy(Processes, ParallelStrategy):
    """What Lightning's Trainer asks. See `Processes`."""

    def _configure_launcher(self) -> None:
        """Several processes are started by Lightning where nobody else has; else what was started is checked."""
        if self.is_distributed:
            assert self.cluster_environment is not None
            self._launcher = _Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _meet(self) -> None:
        super()._meet()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # users find it there in `configure_model`

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Replace a tensor by that of all processes together; anything else stays as it is."""
        return self._reduce(tensor, group, reduce_op)
