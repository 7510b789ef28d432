"""Adapters of peft on a model without memory: put in, merged weight by weight, or saved alone.

peft computes every merge itself, so the result has the bits of its ``merge_and_unload``. It gets the base weight of one
layer just before that weight is written, and loses it afterwards: no second copy of the model is in memory.
"""

import json
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl.commands.export.layouts import ADAPTER_CONFIG, ADAPTER_WEIGHTS, json_object
from lightning_cxl.commands.export.stored import Renamed
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.weights.files import WeightSource, open_weights, tensors_of, values_of

_INSIDE = "base_model.model."
"""Between a peft model and the modules of the model in it."""
_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save)\.([^.]+)(?:\.|$)")
_OWN_PARTS = (".base_layer", ".original_module")


def is_adapters(name: str) -> bool:
    """Return whether a tensor of a state dict is an adapter's."""
    return _ADAPTER.search(name) is not None


def plain_name(name: str) -> str:
    """Return the name that a base weight has in the model without adapters."""
    for part in _OWN_PARTS:
        name = name.replace(f"{part}.", ".")
    return name.replace(_INSIDE, "", 1)


def put_in_folder(model: nn.Module, folder: Path) -> Any:
    """Put the adapter of a peft folder into a model.

    Returns:
        The peft model around it.
    """
    from peft import get_peft_model_state_dict

    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"`{folder}` has no {ADAPTER_WEIGHTS}: save the adapter as safetensors")
    adapted = _empty(model, load_adapter_config(folder), "default")
    own = adapted.state_dict()
    saved = get_peft_model_state_dict(adapted, state_dict=own, save_embedding_layers=False)
    name_of = {id(tensor): name for name, tensor in own.items()}
    with open_weights(path) as (file,):
        found = {tensor.name: values_of(tensor) for tensor in tensors_of([file])}
    _refuse_others(found.keys(), saved.keys())
    # as peft does when it loads: 16-bit adapters compute in float32
    wide = {name: value.float() if ".lora_" in name else value for name, value in found.items()}
    return _filled(adapted, {name_of[id(saved[name])]: value for name, value in wide.items()})


def put_in_state(model: nn.Module, tensors: Sequence[WeightSource], config: Mapping[str, Any]) -> Any:
    """Put an adapter of a state dict into a model, as `put_in_folder` does."""
    names = {found[1] for tensor in tensors if (found := _ADAPTER.search(tensor.name))}
    if len(names) > 1:
        raise UnsupportedError(f"the checkpoint has several adapters ({', '.join(sorted(names))}): export needs one")
    (adapter,) = names
    if "/" in adapter or "\\" in adapter:  # peft makes a folder of this name
        raise CheckpointError(f"the checkpoint is damaged or crafted: its adapter has the name {adapter!r}, a path")
    adapted = _empty(model, config, adapter)
    given = {_INSIDE + tensor.name.rpartition(_INSIDE)[2]: tensor for tensor in tensors}
    _refuse_others(given.keys(), {name for name in adapted.state_dict() if is_adapters(name)})
    return _filled(adapted, {name: values_of(tensor) for name, tensor in given.items()})


def _empty(model: Any, config: Mapping[str, Any], adapter: str) -> Any:
    """Return a peft model whose adapter has no memory either."""
    from peft import PeftConfig, get_peft_model

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ADAPTER_CONFIG).write_text(json.dumps(dict(config)))
        made = PeftConfig.from_pretrained(folder)
    model.name_or_path = made.base_model_name_or_path or ""  # else peft renames it to a folder that is gone
    try:
        with warnings.catch_warnings():
            # what peft 0.21 makes transformers 5 warn of: not for our user to act on
            deprecated = ".is_gradient_checkpointing. is deprecated"
            warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
            return get_peft_model(model, made, adapter_name=adapter, low_cpu_mem_usage=True)
    except ValueError as error:
        raise CheckpointError(f"the adapter's config does not fit the model: {error}") from error


def _refuse_others(given: AbstractSet[str], own: AbstractSet[str]) -> None:
    if given != own:
        raise CheckpointError(
            f"the adapter has {_some(given - own)} that its config does not make, and lacks {_some(own - given)}: give "
            f"the {ADAPTER_CONFIG} that it was trained with"
        )


def _filled(adapted: Any, values: Mapping[str, Tensor]) -> Any:
    """Put the adapter's values in; not with peft, which would move them to the base weights: the meta device."""
    try:
        adapted.load_state_dict(values, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the adapter does not fit its {ADAPTER_CONFIG}: {error}") from error
    return adapted


def merged_values(
    adapted: Any, tied: Mapping[str, Sequence[str]], read: Callable[[str], Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Return what gives the weights that adapters change, by the name in the model without adapters.

    Args:
        tied: for each weight that is tied to others, all its names.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    values: dict[str, Callable[[], Tensor]] = {}
    if not hasattr(adapted.base_model, "merge_and_unload"):
        raise UnsupportedError(
            f"{type(adapted.active_peft_config).__name__} changes no weights, so nothing can be merged: export the "
            "adapter alone (--only-adapter)"
        )
    inside = {id(part) for module in adapted.modules() if isinstance(module, ModulesToSaveWrapper)
              for part in module.modules() if part is not module}  # fmt: skip
    for path, module in adapted.named_modules():
        name = plain_name(f"{path}.").rstrip(".")
        if id(module) in inside:
            continue
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[module.active_adapters[0]]
            values |= {f"{name}.{key}": _given(value) for key, value in saved.named_parameters()}
        elif isinstance(module, AuxiliaryTrainingWrapper):
            raise UnsupportedError(
                f"`{name}` is trained through {type(module).__name__}, which export does not merge: export the adapter "
                "alone (--only-adapter)"
            )
        elif isinstance(module, BaseTunerLayer):
            keys = [key for key, _ in module.get_base_layer().named_parameters(recurse=False)]
            values |= {f"{name}.{key}": _merge_of(module, name, key, read) for key in keys}
    both = next((name for name in values if name in tied), None)
    if both is not None:
        raise UnsupportedError(
            f"the adapter changes `{both}`, which the model ties to another weight ({', '.join(tied[both])}): merged, "
            "they would differ. Export the adapter alone (--only-adapter)"
        )
    return values


def _given(value: Tensor) -> Callable[[], Tensor]:
    return value.detach


def _merge_of(layer: Any, name: str, key: str, read: Callable[[str], Tensor]) -> Callable[[], Tensor]:
    def merge() -> Tensor:
        base = layer.get_base_layer()
        before = dict(base._parameters)
        try:
            with torch.no_grad():
                for each, parameter in before.items():
                    if parameter is not None:
                        base._parameters[each] = nn.Parameter(read(f"{name}.{each}"), requires_grad=False)
                layer.merge()
            merged: Tensor = base._parameters[key].data
            return merged
        finally:
            base._parameters.update(before)
            layer.merged_adapters.clear()

    return merge


def load_adapter_config(path: Path) -> dict[str, Any]:
    """Return the config of an adapter in a file, or in a folder under peft's name for it."""
    path = path / ADAPTER_CONFIG if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"there is no `{path}`: give the {ADAPTER_CONFIG} that peft writes (config.save_pretrained)")
    return json_object(path.read_bytes(), f"`{path}`")


def without_adapters(tensors: Sequence[WeightSource]) -> list[WeightSource]:
    """Return the base weights of a state dict with adapters, under the names of the model without them."""
    return [Renamed(plain_name(tensor.name), tensor) for tensor in tensors if not is_adapters(tensor.name)]


def _some(names: Any) -> str:
    listed = sorted(names)
    return f"{len(listed)} tensors" + (f" such as `{listed[0]}`" if listed else "")
