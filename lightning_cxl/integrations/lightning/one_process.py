"""`OneProcessStrategy`: what Lightning asks a strategy about processes, answered for one that drives one device."""

from typing import Any

import torch
from torch import Tensor

from lightning_cxl.devices.device_type import device_type_of
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.integrations.lightning.lightning_api import ParallelStrategy


class OneProcessStrategy(ParallelStrategy):
    """Lightning fills in the device, the number of machines and the cluster environment that it has found.

    Raises:
        UnsupportedError: in `setup_environment`, for several machines or devices.
    """

    num_nodes = 1
    global_rank = local_rank = node_rank = 0  # whatever a cluster calls this process, it is on its own
    world_size = 1

    @property
    def root_device(self) -> torch.device:
        """The device the model computes on."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[0]

    @property
    def is_distributed(self) -> bool:
        """Never: one process drives one device."""
        return False

    def setup_environment(self) -> None:
        """Refuse what this version cannot drive, then prepare the device."""
        devices = self.parallel_devices or []
        if self.num_nodes > 1:
            raise UnsupportedError(
                f"`{type(self).__name__}` runs on one machine in this version, and the Trainer asks for "
                f"num_nodes={self.num_nodes}. Use `num_nodes=1`, or FSDP for several machines meanwhile."
            )
        if len(devices) > 1:
            raise UnsupportedError(
                f"`{type(self).__name__}` drives one device in this version, and the Trainer gives it {len(devices)}: "
                f"{', '.join(map(str, devices))}. Use `devices=1`; for several devices, FSDP with CPU offload "
                "(`FSDPStrategy(cpu_offload=True)`) is what to use meanwhile."
            )
        if self.root_device.type != "cpu":
            device_type_of(self.root_device)
        super().setup_environment()

    def barrier(self, name: str | None = None) -> None:
        """Nothing to wait for: there is one process."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return `obj`: there is one process."""
        return obj

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `tensor`: there is one process."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return `decision`: there is one process."""
        return decision

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return `tensor`: there is one process."""
        return tensor
