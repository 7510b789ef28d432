"""`Workload`: what a model is trained on, and where: what a plan needs to know beside the model."""

from dataclasses import dataclass, field
from typing import Literal

from lightning_cxl.inventory.mesh import Mesh

Overlap = Literal["none", "backward", "forward"]
"""What the update runs behind: nothing, the backward it follows, or the next forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is trained on, and where."""

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
    """Nothing calls a step off or looks at gradients, so that overlapped updates may run behind the backward."""
    mesh: Mesh = field(default_factory=Mesh)
    """The ranks; each keeps activations of its own."""
    no_sync: bool = False
    """With several ranks: gradients are added up on the devices, and only those of the last micro-batch are reduced."""

    @property
    def num_arrivals(self) -> int:
        """How often gradients come to the host in one step."""
        return 1 if self.no_sync and self.mesh.is_sharded else self.num_micro_batches
