"""The work of a step: batch, ranks (`Mesh`), and the habits of the training loop (`Loop`)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

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

    def __post_init__(self) -> None:
        """Refuse what no run can be."""
        if min(self.num_devices, self.num_machines) < 1:
            raise ConfigError(
                f"a run has at least one device on at least one machine, got {self.num_devices} devices on "
                f"{self.num_machines} machines"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Facts about the training loop before it starts; the careful answer where a fact is not known."""

    accumulates: bool = False
    """Several micro-batches are added up before a step, at some time of the run."""
    needs_whole_step: str | None = "the training loop is not known"
    """The part of the loop that may skip a step, or read gradients, once the step's closure runs; None if none does."""
    reads_gradients: bool = True
    """Somebody may read gradients between the micro-batches of a step."""
    edits_gradients: bool = True
    """Somebody may write gradients between backward and step, perhaps through ``.data``."""
    writes_unseen: bool = False
    """Somebody may write weights between steps through ``.data``, which leaves no trace."""


Overlap = Literal["none", "backward", "forward"]
"""The phase that hides the update: none, the backward it follows, or the next forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Batch, micro-batches and ranks of one step."""

    batch: int
    """Sequences of one micro-batch on one device."""
    sequence: int
    """Tokens of each."""
    num_micro_batches: int = 1
    """Added up before a step."""
    mixed: bool = False
    """Autocast to bfloat16 over float32 weights."""
    computes_on_host: bool = False
    """The CPU is the device."""
    updates_in_backward: bool = False
    """No part of the loop skips a step or reads gradients, so overlapped updates may run behind the backward."""
    mesh: Mesh = field(default_factory=Mesh)
    """The ranks; each keeps activations of its own."""
    no_sync: bool = False
    """With several ranks: gradients are added up on the devices, and only those of the last micro-batch are reduced."""

    @property
    def num_arrivals(self) -> int:
        """How often gradients come to the host in one step."""
        return 1 if self.no_sync and self.mesh.is_sharded else self.num_micro_batches
