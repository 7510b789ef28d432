"""`Mesh`: how many ranks train one model, on which machines they are, and what each machine has of the model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lightning_cxl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The ranks of one run, one for each device, and how parameters are cut over them.

    A parameter is cut along its first dimension into as many shards as there are ranks that share it, all as long as
    the longest: so does torch's FSDP2.
    """

    num_devices: int = 1
    """Of each machine."""
    num_machines: int = 1
    replicates: bool = False
    """Every machine holds the whole model, cut over its own devices (hybrid sharding, HSDP); else one copy of the model
    is cut over all ranks."""
    shares_weights: bool = False
    """Devices of a machine read weights from one copy in host memory, each over its own link, instead of a gather."""

    def __post_init__(self) -> None:
        """Refuse what no run can be."""
        if min(self.num_devices, self.num_machines) < 1:
            raise ConfigError(
                f"a run has at least one device on at least one machine, got {self.num_devices} devices on "
                f"{self.num_machines} machines"
            )
        if self.shares_weights and self.num_machines > 1 and not self.replicates:
            raise ConfigError(
                f"devices cannot read weights from one copy in the memory of their machine: the model is cut over "
                f"{self.num_machines} machines. Let every machine hold all of it (--between-nodes replicate), or "
                "gather weights (--weights gathered)"
            )

    @property
    def num_ranks(self) -> int:
        """Processes, one for each device."""
        return self.num_devices * self.num_machines

    @property
    def is_sharded(self) -> bool:
        """Whether there are several ranks."""
        return self.num_ranks > 1

    @property
    def num_shards(self) -> int:
        """Ranks over which a parameter is cut."""
        return self.num_devices if self.replicates else self.num_ranks

    @property
    def num_replicas(self) -> int:
        """How often the whole model is there."""
        return self.num_machines if self.replicates else 1

    def shard_numel(self, parameter: Tensor) -> int:
        """Return the elements of one rank's shard, with what it is padded by."""
        length = parameter.shape[0] if parameter.ndim else 1
        return math.ceil(length / self.num_shards) * parameter.numel() // length if length else 0

    def machine_bytes(self, nbytes: int, parameters: Iterable[Tensor]) -> int:
        """Return what the shards of one machine take of `nbytes` that belong to whole parameters."""
        if not self.is_sharded:
            return nbytes
        found = list(parameters)
        whole = sum(each.numel() for each in found)
        shards = sum(self.num_devices * self.shard_numel(each) for each in found)
        return math.ceil(nbytes * shards / whole) if whole else nbytes
