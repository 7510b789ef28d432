"""Which tensor of the files goes to which weight: decided from headers and names, before a byte is loaded."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from lightning_cxl.errors import CheckpointError
from lightning_cxl.weights.sources import Translate, WeightSource
from lightning_cxl.weights.tied import ModelWeight, computed_buffers, distinct, model_weights

_SHOWN = 8


class Read(NamedTuple):
    """Where a weight comes from, and the weight."""

    source: WeightSource
    weight: ModelWeight


@dataclass(frozen=True, slots=True)
class Matches:
    """What will be read, in the order of the files, and what does not fit."""

    reads: list[Read]
    missing: list[str]
    """Names of weights that no file holds, one for those that are tied."""
    unexpected: list[str]
    """Names in files that the model does not have."""
    lost: list[str]
    """Buffers that the model computes itself and that have no values, because it was built on the meta device."""


def match_names(model: nn.Module, tensors: Sequence[WeightSource], translate: Translate, *, completes: bool) -> Matches:
    """Match names, with the base model's prefix added or left out as transformers does.

    Args:
        model: whose attributes ``base_model_prefix`` and ``_keys_to_ignore_on_load_*`` count, where it has them.
        tensors: of files.
        translate: from those to what the model has.
        completes: the caller initialises what is still on the meta device, so that names which do not matter may be.

    Raises:
        CheckpointError: shapes or kinds of numbers differ; all of them are named.
    """
    weights = model_weights(model)
    computed = computed_buffers(model)
    reads, unexpected, wrong = [], [], []
    for name, source in translate(tensors):
        name = _with_prefix(name, weights, model)
        weight = weights.get(name)
        if weight is None:
            if name not in computed and not _is_ignored(model, "_keys_to_ignore_on_load_unexpected", name):
                unexpected.append(source.name)
            continue
        if source.shape != tuple(weight.tensor.shape) or not _converts(source.dtype, weight.tensor.dtype):
            wrong.append(f"`{name}`: {_show(source)} in the file, {_show(weight.tensor)} in the model")
        reads.append(Read(source, weight))
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} tensors do not fit {type(model).__name__}: {_list(wrong, '; ')}. Nothing has been loaded. "
            "Build the model with the sizes that the files were saved with (their config)."
        )
    filled = {id(read.weight) for read in reads}
    missing = [
        weight.names[0]
        for weight in distinct(weights)
        if id(weight) not in filled
        and not (
            (completes or not weight.tensor.is_meta)
            and _is_ignored(model, "_keys_to_ignore_on_load_missing", weight.names[0])
        )
    ]
    return Matches(reads, missing, unexpected, [name for name, tensor in computed.items() if tensor.is_meta])


def refuse_mismatch(matches: Matches, model: nn.Module) -> None:
    """Raise where weights are missing or unexpected, or buffers cannot come back.

    Raises:
        CheckpointError: it names them, with the closest names that would have fitted.
    """
    if matches.lost:
        raise CheckpointError(
            f"{len(matches.lost)} buffers of {type(model).__name__} are on the meta device, and no file holds them, "
            f"because the model computes them when it is built: {_list(matches.lost)}. Nothing has been loaded. Build "
            "it in `lightning_cxl.empty_weights()`, which keeps buffers real."
        )
    if not matches.missing and not matches.unexpected:
        return
    texts = []
    if matches.missing:
        names = _with_closest(matches.missing, matches.unexpected, "in the files")
        texts.append(f"{len(matches.missing)} weights are missing from the files: {names}")
    if matches.unexpected:
        names = _with_closest(matches.unexpected, matches.missing, "in the model")
        texts.append(f"{len(matches.unexpected)} tensors of the files are not in the model: {names}")
    raise CheckpointError(
        f"the files do not fit {type(model).__name__}: {'. '.join(texts)}. {len(matches.reads)} tensors fit. Nothing "
        "has been loaded. Load into the class that was saved, or pass strict=False to load what fits."
    )


def _with_prefix(name: str, weights: dict[str, ModelWeight], model: nn.Module) -> str:
    """Return the name with the prefix of the base model that it needs: a base model loads into one with a head."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    if name in weights or prefix == ".":
        return name
    if f"{prefix}{name}" in weights:
        return f"{prefix}{name}"
    return name.removeprefix(prefix) if name.removeprefix(prefix) in weights else name


def _is_ignored(model: nn.Module, attribute: str, name: str) -> bool:
    """Whether transformers says of this model that a name does not matter."""
    return any(re.search(pattern, name) for pattern in getattr(model, attribute, None) or ())


def _converts(file: torch.dtype, model: torch.dtype) -> bool:
    """Whether numbers of one kind become the other by rounding; integers and truth values only fit themselves."""
    return file == model or (file.is_floating_point and model.is_floating_point)


def _show(tensor: WeightSource | torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _list(texts: Sequence[str], separator: str = ", ") -> str:
    return separator.join(texts[:_SHOWN]) + (f"{separator}..." if len(texts) > _SHOWN else "")


def _with_closest(names: Sequence[str], others: Iterable[str], where: str) -> str:
    others = list(others)
    shown = []
    for name in names[:_SHOWN]:
        close = difflib.get_close_matches(name, others, n=1)
        shown.append(f"`{name}`" + (f" (closest {where}: `{close[0]}`)" if close else ""))
    return ", ".join(shown) + (", ..." if len(names) > _SHOWN else "")
