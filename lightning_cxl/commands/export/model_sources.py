"""`ModelSources`: which tensor of a checkpoint each weight of a model is written from."""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_cxl.commands.export.adapters import merged_values
from lightning_cxl.commands.export.layouts import CONFIG
from lightning_cxl.commands.export.stored import Dequantised, Renamed, innermost
from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.weights.files import NamedTensor, WeightSource, values_of
from lightning_cxl.weights.hf import FileNames, build_model, with_original_names, without_code
from lightning_cxl.weights.load import empty_weights, match_names, model_weights, refuse_mismatch
from lightning_cxl.weights.save import LaterValues, named_tensors


def build_empty(config: Mapping[str, Any]) -> Any:
    """Return the model of a config, without memory for its weights."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(dict(config)))
        try:
            made = without_code(transformers.AutoConfig.from_pretrained, folder)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"the {CONFIG} names no model that transformers knows: {error}") from error
    kind = next(iter(made.architectures or ()), "")
    model_class = getattr(transformers, kind, transformers.AutoModelForCausalLM)
    with empty_weights():
        return build_model(model_class, made, torch.float32)


class ModelSources:
    """Weights of a model and where their values are.

    Args:
        tensors: of the checkpoint: of the model, which may be a part of what was trained.
        below: of the base model, for weights that are not in `tensors`.
    """

    def __init__(self, model: Any, tensors: Sequence[WeightSource], below: Sequence[WeightSource]) -> None:
        self.model = model
        weights = model_weights(model)
        own, self.left_out = _of_model(tensors, weights.keys())
        names = FileNames(model)
        found = dict(names(own))
        given = {id(weights[name]) for name in found if name in weights}
        found |= {name: tensor for name, tensor in names(below) if name in weights and id(weights[name]) not in given}
        if conversions := names.used():
            model._weight_conversions = conversions  # written under the names in the files
        matches = match_names(model, [], lambda _: list(found.items()), completes=False)
        refuse_mismatch(matches, model)
        self._sources: dict[str, WeightSource] = {}
        for read in matches.reads:
            first = self._sources.setdefault(read.weight.names[0], read.source)
            if first is not read.source and not read.source.holds(values_of(first)):
                raise CheckpointError(
                    f"`{first.name}` and `{read.source.name}` are tied in the model and differ in the checkpoint. "
                    "Give a config that does not tie them (tie_word_embeddings: false)"
                )
        self._first = {name: weight.names[0] for name, weight in weights.items()}
        self._tied = {name: weight.names for name, weight in weights.items() if len(weight.names) > 1}
        later = {name: LaterValues(source.dtype, partial(self._value, name)) for name, source in self._sources.items()}
        self._tensors = with_original_names(model, named_tensors(model, None, later))
        self._merged: dict[str, Callable[[], Tensor]] = {}

    @property
    def num_merged(self) -> int:
        """Layers that an adapter changes."""
        return len({name.rpartition(".")[0] for name in self._merged})

    @property
    def num_dequantised(self) -> int:
        """Weights that are quantised in the checkpoint or its base."""
        return sum(isinstance(innermost(source), Dequantised) for source in self._sources.values())

    def merge(self, adapted: Any) -> None:
        """Let an adapter change weights when they are written."""
        self._merged = merged_values(adapted, self._tied, self._base_value)

    def tensors(self, dtype: torch.dtype | None) -> list[NamedTensor]:
        """Return what is written."""
        if dtype is None:
            return self._tensors
        return [each._replace(dtype=dtype) if each.dtype.is_floating_point else each for each in self._tensors]

    def _base_value(self, name: str) -> Tensor:
        return values_of(self._sources[self._first[name]])

    def _value(self, name: str) -> Tensor:
        merged = self._merged.get(name)
        return self._base_value(name) if merged is None else merged()


def _of_model(tensors: Sequence[WeightSource], names: Any) -> tuple[list[WeightSource], int]:
    """Return the tensors of the model under its own names, and how many belong to other modules.

    A module that was trained may hold the model as an attribute, so that its names have a prefix.
    """
    known = set(names)
    prefixes: Counter[str] = Counter()
    for tensor in tensors:
        parts = tensor.name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in known:
                prefixes[".".join([*parts[:start], ""]) if start else ""] += 1
    if not prefixes:
        return list(tensors), 0
    most = prefixes.most_common(2)
    if len(most) == 2 and most[0][1] == most[1][1]:
        raise CheckpointError(
            f"the checkpoint has the model's weights twice, under `{most[0][0]}` and under `{most[1][0]}`: export a "
            "checkpoint, or save a state dict, with one of them"
        )
    prefix = most[0][0]
    own: list[WeightSource] = [
        Renamed(tensor.name[len(prefix) :], tensor) for tensor in tensors if tensor.name.startswith(prefix)
    ]
    return own, len(tensors) - len(own)
