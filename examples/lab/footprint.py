"""Memory classes by formula: what training a published shape keeps in host memory, and what a step moves of it.

Weights and optimizer state take so many bytes per parameter, by role: `ZERO_OFFLOAD_LAYOUT` is that of arXiv 2507.03305
(its authors' CXL-Aware-LLM-Finetuning, numa_allocation_patch.py): 20 bytes. An update converts gradients to float32 (2
read, 4 written), Adam reads 16 and writes 12, and the weights are converted back (2 written). `split_masters_layout` is
lightning_cxl's, 14 bytes: a float32 master weight is a compute weight and its lower half, and Adam reads bfloat16
gradients as they are. Activations are the inputs of layers in bfloat16: 2 B S H L bytes, with batch B, sequence S,
hidden size H and L layers.

In both layouts every unit's weights are copied to the device in forward and again in backward, its input to the host in
forward and back in backward, and its gradients to the host. Forward takes 2 flops per parameter and token, and 2 S^2 H
per layer and sequence for causal attention (half of two products of S x H x S); backward, with the recompute, three
times that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.tensors import Overlap
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job, MemoryClass, Move
from lightning_cxl.weights.hf import SHAPES

State = Literal["fp32", "bf16", "8bit"]
"""How momentum and variance are kept."""
_STATE_BYTES: Mapping[State, float] = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 256}  # a float32 scale per 256 codes
_UNITS_OF_GRADIENTS = 4
"""Whose gradients are on the host at a time when updates run behind the backward: three that wait for their update
(`lightning_cxl.gradients.step.MAX_UNITS_IN_FLIGHT`), and the one that backward is at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the formulas need of a model."""

    name: str
    num_parameters: int
    num_layers: int
    hidden: int

    def activation_bytes(self, batch: int, sequence: int) -> int:
        """Return the bytes of every layer's input in bfloat16."""
        return 2 * batch * sequence * self.hidden * self.num_layers

    def forward_flops(self, batch: int, sequence: int) -> float:
        """Return the floating-point operations of one forward."""
        attention = 2 * sequence**2 * self.hidden * self.num_layers
        return float(batch * (2 * self.num_parameters * sequence + attention))


# of the two models of arXiv 2507.03305 (its authors' numa_allocation_patch.py), and of Llama 3.1 (its config.json)
_NUM_PARAMETERS = {
    "qwen2.5-7b": 7_615_616_512,
    "mistral-nemo-12b": 12_247_782_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
PUBLISHED: Mapping[str, ModelShape] = {
    name: ModelShape(
        name=name,
        num_parameters=count,
        num_layers=SHAPES[name].config["num_hidden_layers"],
        hidden=SHAPES[name].config["hidden_size"],
    )
    for name, count in _NUM_PARAMETERS.items()
}


def shape_named(name: str) -> ModelShape:
    """Return the published shape of that name.

    Raises:
        ConfigError: there is none; the message names those that exist.
    """
    if name.lower() not in PUBLISHED:
        raise ConfigError(f"there is no shape {name!r}; there are: {', '.join(PUBLISHED)}")
    return PUBLISHED[name.lower()]


class PerParameter(NamedTuple):
    """Bytes per parameter of one role: what is stored, and what an update reads and writes."""

    stored: float
    read: float = 0
    written: float = 0


Layout = Mapping[TensorRole, PerParameter]
"""What depends on the number of parameters; activations do not."""
ZERO_OFFLOAD_LAYOUT: Layout = {
    TensorRole.MOMENTUM: PerParameter(4, 4, 4),
    TensorRole.VARIANCE: PerParameter(4, 4, 4),
    TensorRole.MASTER_GRADS: PerParameter(4, 4, 4),
    TensorRole.MASTER_WEIGHTS: PerParameter(4, 4, 4),
    TensorRole.COMPUTE_WEIGHTS: PerParameter(2, 0, 2),
    TensorRole.COMPUTE_GRADS: PerParameter(2, 2, 0),
}


def split_masters_layout(state: State = "fp32") -> Layout:
    """Return lightning_cxl's layout, with gradients of all units at a time.

    Raises:
        ConfigError: an unknown state.
    """
    if state not in _STATE_BYTES:
        raise ConfigError(f"state must be one of {', '.join(_STATE_BYTES)}, got {state!r}")
    moment = PerParameter(*[_STATE_BYTES[state]] * 3)
    return {
        TensorRole.MOMENTUM: moment,
        TensorRole.VARIANCE: moment,
        TensorRole.MASTER_WEIGHTS: PerParameter(2, 2, 2),
        TensorRole.COMPUTE_WEIGHTS: PerParameter(2, 2, 2),
        TensorRole.COMPUTE_GRADS: PerParameter(2, 2, 0),
    }


def zero_offload(shape: ModelShape, batch: int, sequence: int, *, num_devices: int = 1) -> Job:
    """Return the job as ZeRO-offload with float32 master weights and gradients runs it: 20 bytes per parameter.

    Args:
        shape: of the model.
        batch: sequences per device and step.
        sequence: tokens of each.
        num_devices: data parallel; each keeps activations of its own.
    """
    return _job(f"{shape.name}, ZeRO-offload", shape, ZERO_OFFLOAD_LAYOUT, batch, sequence, num_devices)


def split_masters(
    shape: ModelShape,
    batch: int,
    sequence: int,
    *,
    state: State = "fp32",
    overlap: Overlap = "none",
    num_devices: int = 1,
) -> Job:
    """Return the job as lightning_cxl runs it in bfloat16: 14 bytes per parameter with float32 state.

    Args:
        shape: of the model.
        batch: sequences per device and step.
        sequence: tokens of each.
        state: how momentum and variance are kept.
        overlap: with ``"backward"``, gradients of a few units exist at a time: 12 bytes per parameter.
        num_devices: data parallel; each keeps activations of its own.

    Raises:
        ConfigError: an unknown state or overlap.
    """
    layout = dict(split_masters_layout(state))
    if overlap not in ("none", "backward", "forward", "both"):
        raise ConfigError(f"overlap must be none, backward, forward or both, got {overlap!r}")
    if overlap == "backward":
        all_units = layout[TensorRole.COMPUTE_GRADS]
        waiting = min(1.0, _UNITS_OF_GRADIENTS / shape.num_layers)
        layout[TensorRole.COMPUTE_GRADS] = all_units._replace(stored=all_units.stored * waiting)
    return _job(f"{shape.name}, split masters, {state} state", shape, layout, batch, sequence, num_devices, overlap)


def _job(
    name: str,
    shape: ModelShape,
    layout: Layout,
    batch: int,
    sequence: int,
    num_devices: int,
    overlap: Overlap = "none",
) -> Job:
    if min(batch, sequence, num_devices) < 1:
        raise ConfigError(
            f"batch, sequence and num_devices must be at least 1, got {batch}, {sequence} and {num_devices}"
        )
    weights, activations = 2.0 * shape.num_parameters, shape.activation_bytes(batch, sequence)
    copies: dict[TensorRole, tuple[Move, ...]] = {
        TensorRole.COMPUTE_WEIGHTS: (Move("forward", "h2d", weights), Move("backward", "h2d", weights)),
        TensorRole.COMPUTE_GRADS: (Move("backward", "d2h", weights),),
    }
    classes = [
        MemoryClass(
            role=role,
            nbytes=round(each.stored * shape.num_parameters),
            moves=(*copies.get(role, ()), Move("update", "cpu", (each.read + each.written) * shape.num_parameters)),
        )
        for role, each in layout.items()
    ]
    moves = (Move("forward", "d2h", activations), Move("backward", "h2d", activations))
    classes.append(MemoryClass(role=TensorRole.ACTIVATIONS, nbytes=activations * num_devices, moves=moves))
    flops = shape.forward_flops(batch, sequence)
    return Job(
        name=f"{name}, {batch} x {sequence}",
        classes=tuple(classes),
        num_parameters=shape.num_parameters,
        num_units=shape.num_layers,
        num_tokens=batch * sequence * num_devices,
        forward_flops=flops,
        backward_flops=3 * flops,
        overlap=overlap,
    )
