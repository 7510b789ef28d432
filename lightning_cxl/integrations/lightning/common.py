"""`CommonStrategy`: what the strategies for Lightning's Trainer and for Fabric share; `CXLCheckpointIO`: their files.

With one device there is one process, which is on its own whatever a cluster calls it: no group, no launcher. Several
devices or machines have a process for each device, which start and meet as those of Lightning's `ModelParallelStrategy`
do. torch.distributed is asked in `sharding/processes.py`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices.transfer import device_type_of
from lightning_cxl.integrations.lightning.lightning_api import (
    TorchCheckpointIO,
    init_dist_connection,
    rank_zero_only,
    reset_seed,
)
from lightning_cxl.run.checkpoint import load_file, save_file
from lightning_cxl.run.session import Session
from lightning_cxl.sharding import processes

_Base: Any = object  # two frameworks have each a class of their own behind `super()`


class CXLCheckpointIO(TorchCheckpointIO):
    """Writes local files directly and atomically, and reads them through a memory map.

    Lightning's own writer builds the whole file in memory first, its reader holds a full copy until training starts:
    both add the size of the model and optimizer to the peak. Remote paths go through Lightning's code unchanged.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or _is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            save_file(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        if _is_remote(path):
            return super().load_checkpoint(path, map_location=map_location, weights_only=weights_only)
        return load_file(Path(path), map_location, weights_only)


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


class CommonStrategy(_Base):  # type: ignore[misc]
    """Before Lightning's or Fabric's `ParallelStrategy` in the bases of a strategy.

    The framework fills in the devices, the number of machines and the cluster environment that it has found.
    """

    num_nodes = 1
    cluster_environment: Any
    config: OffloadConfig
    timeout: timedelta | None = None
    """For which a rank waits for the others in a collective; None is torch's own."""
    _device_mesh: DeviceMesh | None = None

    def _begin(self, timeout: timedelta | None, options: dict[str, Any]) -> None:
        self._session = Session(**options)
        self.config, self.config_origins = self._session.config, self._session.origins
        self.timeout = timeout

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
    def root_device(self) -> torch.device:
        devices: list[torch.device] = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
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
        if not self.is_distributed:
            self.cluster_environment = None  # without one, rank and number of processes are those of one process
        elif self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def setup_environment(self) -> None:
        """Prepare the device, let the processes meet, and give each its part of the machine."""
        if self.root_device.type != "cpu":
            device_type_of(self.root_device)
        super().setup_environment()
        if self.is_distributed:
            self._meet()
            gather = partial(processes.gather_on_machine, machine=self.node_rank)
            local = self.local_rank, self.num_processes
            self._session.bind(self.global_rank, self.world_size, *local, self.root_device, gather)

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
            self.root_device, self.num_nodes, self.num_processes, replicate=self.config.replicate_machines
        )

    @contextmanager
    def _creating(self) -> Iterator[None]:
        """Create weights where their tier is, from the first byte; on a GPU, on it, unless they stream or are cut."""
        host = self._session.host_on(self.root_device)
        if self.root_device.type == "cpu" or self.is_distributed or host.streams_weights:
            with torch.device("cpu"), host.activate(), host.creating_weights():
                yield
        else:
            yield

    # -- together ----------------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        if self._has_met:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return processes.broadcast(obj, src) if self._has_met else obj

    def _reduce(self, tensor: Any, group: Any, op: Any) -> Any:
        """Replace a tensor by that of all processes together; anything else stays as it is."""
        return processes.reduce(tensor, group, op) if self._has_met and isinstance(tensor, Tensor) else tensor

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return super().all_gather(tensor, group, sync_grads) if self._has_met else tensor

    @property
    def _has_met(self) -> bool:
        return self.is_distributed and dist.is_initialized()

    # -- report ------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return bytes planned, used and at the peak, per tier and role, JSON-able; see `Session.report`."""
        return self._session.report(self.root_device)

    def __str__(self) -> str:
        return self._session.describe(type(self).__name__, self.root_device)

    def __repr__(self) -> str:
        return self._session.describe_options(type(self).__name__)
