"""Float32 master weights of a checkpoint, in the place of the 16-bit weights that a model computes with.

A run with 16-bit weights keeps float32 ones for its optimizer: whole, in our entry of a checkpoint, or split, as a
remainder in the optimizer's state. Lightning has both in its one file, Fabric in what the user saved of the optimizer,
Accelerate and the Trainer in a file of the optimizer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_cxl.commands.export.folder_tensors import FolderTensor
from lightning_cxl.commands.export.stored import Renamed, StoredTensor, innermost
from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.optim.parameter_state import REMAINDER
from lightning_cxl.optim.saved_state import joined
from lightning_cxl.run.checkpoint import names_by_key
from lightning_cxl.run.ssd_checkpoint import is_reference
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.weights.files import MergedTensor, WeightSource


def masters_in(loaded: Mapping[str, Any]) -> dict[str, WeightSource]:
    """Return the master weights in a file, by the parameter's name: float32, or int16 where it is the remainder."""
    found: dict[str, Tensor] = {}
    for own, states in _entries(loaded):
        found |= own.get("master_weights") or {}
        all_names = own.get("optimizer_param_names") or [None] * len(states)
        for state, names in zip(states, all_names, strict=True):
            name_of = names_by_key(state, names)
            for key, entry in state["state"].items():
                remainder = entry.get(REMAINDER)
                if is_reference(remainder):
                    raise ConfigError(
                        "the checkpoint refers to master weights on SSD: write a whole one with "
                        "`lightning_cxl.plain_checkpoint` and export that, or leave out --dtype"
                    )
                if isinstance(remainder, Tensor) and remainder.dtype is torch.int16 and key in name_of:
                    found[name_of[key]] = remainder
    return {name: StoredTensor(name, value) for name, value in found.items()}


def _entries(loaded: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]:
    """Yield our entries in a file, each with the state dicts of its optimizers."""
    if KEY in loaded:
        yield loaded[KEY], loaded.get("optimizer_states", [loaded] if "state" in loaded else [])
    for value in loaded.values():
        if isinstance(value, Mapping) and KEY in value:
            yield value[KEY], [value]


def with_masters(
    tensors: Iterable[WeightSource], masters: Mapping[str, WeightSource]
) -> tuple[list[WeightSource], int]:
    """Return tensors with their master weights in their place, and how many of these there are.

    Args:
        tensors: of a state dict. Of tied ones the master has one name.
    """
    tensors = list(tensors)
    names_of: dict[Any, list[str]] = {}
    for tensor in tensors:
        names_of.setdefault(_memory(tensor), []).append(tensor.name)
    result: list[WeightSource] = []
    for tensor in tensors:
        name = next((name for name in names_of[_memory(tensor)] if name in masters), None)
        result.append(tensor if name is None else _master(tensor, masters[name]))
    count = sum(new is not old for new, old in zip(result, tensors, strict=True))
    if masters and not count:
        raise CheckpointError(
            f"the checkpoint has {len(masters)} float32 master weights such as `{min(masters)}`, and none has the name "
            "of a weight: leave out --dtype to export the weights that the model computes with"
        )
    return result, count


def _memory(tensor: WeightSource) -> Any:
    """Return what tied tensors of a file have in common."""
    inner = innermost(tensor)
    if isinstance(inner, FolderTensor):
        return inner.first
    if not isinstance(inner, StoredTensor):
        return tensor.name
    values = inner.tensor
    return values.untyped_storage().data_ptr(), values.storage_offset(), values.shape, values.stride()


def _master(tensor: WeightSource, master: WeightSource) -> WeightSource:
    found = Renamed(tensor.name, master)
    return MergedTensor([tensor, found], _joined) if master.dtype is torch.int16 else found


def _joined(parts: list[Tensor]) -> Tensor:
    weights, remainder = parts
    return torch.empty(weights.shape, device="meta") if weights.is_meta else joined(weights, remainder)
