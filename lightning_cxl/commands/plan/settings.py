"""`Settings`: what is trained and how, as the options of `plan` say it."""

from dataclasses import dataclass
from typing import Literal

from lightning_cxl.commands.plan.meta_model import PlannedPrecision
from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.mesh import Mesh
from lightning_cxl.inventory.workload import Workload
from lightning_cxl.machine.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is trained and how; the strategy's options have the same names."""

    batch: int = 1
    sequence: int = 4096
    precision: PlannedPrecision = "bf16-true"
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    master: Literal["split", "fp32"] = "split"
    accumulate: Literal["fp32", "bf16"] = "fp32"
    accumulate_grad_batches: int = 1
    overlap: Literal["auto", "none", "backward", "forward"] = "auto"
    """``"backward"`` is what ``on_overflow="ignore"`` allows; ``"auto"`` is what the strategy does by default."""
    activation_offload: bool = True
    stream_weights: bool | Literal["auto"] = "auto"
    loss: Literal["full", "chunked"] = "full"
    """``"chunked"``: the model computes its loss under `lightning_cxl.chunked_loss`, as the main job does."""

    lora: int | None = None
    """Rank of adapters on all linear layers of the blocks, which alone are trained; None: all weights are."""
    quantize: Literal["4bit", "8bit"] | None = None
    """What the weights below adapters are quantised to, as ``quantization`` of the main job."""
    num_nodes: int = 1
    """Machines, all alike."""
    between_nodes: Literal["replicate", "shard"] = "shard"
    """What machines do with the model: each holds all of it, or it is cut over all ranks of all of them."""
    weights: Literal["gathered", "shared"] = "gathered"
    """How several devices of a machine come to a unit's weights: each reads its shard and gathers those of the others,
    or all read one copy in host memory."""
    no_sync: bool = False
    """Several devices: with several micro-batches, only the last one reduces gradients."""

    def __post_init__(self) -> None:
        """Refuse counts below one, and quantised weights that would be trained."""
        for name in ("batch", "sequence", "accumulate_grad_batches", "lora", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.quantize is not None and self.lora is None:
            raise ConfigError("quantised weights cannot be trained: give adapters too, such as --lora 16")

    def config(self, machine: Machine) -> OffloadConfig:
        """Return the strategy's options."""
        overlaps: bool | Literal["auto"] = "auto"
        if self.stream_weights is False and self.mesh(machine).is_sharded and not machine.device.is_host:
            raise ConfigError("several devices keep their shards of weights on the host: leave out --no-stream-weights")
        if self.quantize is not None and self.mesh(machine).is_sharded:
            raise ConfigError(
                "a plan of several devices takes all weights for cut, and each device needs a whole quantised base in "
                "the memory of its machine: plan one device (--devices 1), and count its compute weights once for each"
            )
        if self.mesh(machine).is_sharded and machine.ssd is not None and machine.ssd.versions > 1:
            raise ConfigError(
                "checkpoint 'reference' of the tier `ssd` serves one device: checkpoints of several have the state in "
                "them. Leave out --ssd-checkpoint, or `versions` of the machine"
            )
        if self.overlap == "none":
            overlaps = False
        elif self.overlap in ("backward", "forward"):
            streams = self.stream_weights if self.stream_weights != "auto" else not machine.device.is_host
            if not streams or not self.activation_offload:
                raise ConfigError(
                    f'overlap "{self.overlap}" needs weights that stream, and they do not: set stream weights, or '
                    'choose overlap "none"'
                )
            overlaps = True
        return OffloadConfig(
            activation_offload=self.activation_offload,
            stream_weights=self.stream_weights,
            overlap_step=overlaps,
            state=self.state,
            master=self.master,
            accumulate=self.accumulate,
            on_overflow="ignore" if self.overlap == "backward" else "skip",
        )

    def workload(self, machine: Machine) -> Workload:
        """Return what a step works on."""
        return Workload(
            batch=self.batch,
            sequence=self.sequence,
            num_micro_batches=self.accumulate_grad_batches,
            mixed=self.precision == "bf16-mixed",
            computes_on_host=machine.device.is_host,
            updates_in_backward=self.overlap == "backward",
            mesh=self.mesh(machine),
            no_sync=self.no_sync,
        )

    def mesh(self, machine: Machine) -> Mesh:
        """Return the ranks on so many machines like this one."""
        return Mesh(
            num_devices=machine.device.count,
            num_machines=self.num_nodes,
            replicates=self.num_nodes > 1 and self.between_nodes == "replicate",
            shares_weights=self.weights == "shared" and machine.device.count > 1,
        )
