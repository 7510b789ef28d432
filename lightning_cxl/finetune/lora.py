"""Options of the main job for a large model on little memory: a quantised base, adapters on top, both as QLoRA has it.

peft makes and saves adapters, bitsandbytes quantises. A checkpoint holds adapters alone: the base does not change, and
is in its files.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_cxl.errors import CheckpointError, ConfigError

_NOT_OF_WEIGHTS = frozenset({"lora_dropout"})
"""Options of an adapter that another run may change."""


def quantization_fields(option: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a ``BitsAndBytesConfig``.

    Args:
        option: "4bit" is NF4 with quantised scales, which computes in torch's default dtype; "8bit" is LLM.int8(); a
            mapping has the fields themselves.

    Raises:
        ConfigError: another word, or fields that are none or quantise nothing.
    """
    if isinstance(option, Mapping):
        from transformers import BitsAndBytesConfig

        unknown = sorted(option.keys() - BitsAndBytesConfig().to_dict().keys())
        if unknown:
            raise ConfigError(f"quantization: BitsAndBytesConfig has no field {', '.join(unknown)}")
        if not (option.get("load_in_4bit") or option.get("load_in_8bit")):
            raise ConfigError(f"quantization={dict(option)} needs load_in_4bit or load_in_8bit to be true")
        return dict(option)
    if option == "8bit":
        return {"load_in_8bit": True}
    if option != "4bit":
        raise ConfigError(f'quantization must be "4bit", "8bit" or fields of BitsAndBytesConfig, not {option!r}')
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.get_default_dtype(),
    }


def with_adapters(model: nn.Module, options: Mapping[str, Any]) -> Any:
    """Return the peft model around a model, which trains adapters alone.

    Args:
        model: of transformers. INOUT: peft puts the adapters into it.
        options: fields of ``peft.LoraConfig``.

    Raises:
        ConfigError: peft is not installed, or does not take the options.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError("lora needs peft: pip install peft") from error
    try:
        adapted: Any = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", **options}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft does not take the options lora={dict(options)}: {error}") from error
    return adapted


def trained_names(module: nn.Module) -> set[str]:
    """Return the names of all parameters that are trained, in a state dict of the module."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}


def check_saved(saved: Mapping[str, Any], own: set[str], saved_options: Any, options: Mapping[str, Any]) -> None:
    """Compare the adapters of a checkpoint with those of a module: what does not fit would stay as it is.

    Args:
        saved: state dict of the checkpoint.
        own: names of what the module trains.
        saved_options: those of the checkpoint's adapters, None where it says nothing.
        options: those of the module's.

    Raises:
        CheckpointError: they differ.
    """
    if saved.keys() != own:
        only, lacks = sorted(saved.keys() - own), sorted(own - saved.keys())
        some = [f"it has `{only[0]}`, which is not trained"] if only else []
        some += [f"it lacks `{lacks[0]}`"] if lacks else []
        raise CheckpointError(
            f"the checkpoint does not have the adapters of this run ({len(only)} and {len(lacks)} differ: "
            f"{', '.join(some)}): give the model.lora that it was trained with"
        )
    other = {name: value for name, value in (saved_options or {}).items() if name not in _NOT_OF_WEIGHTS}
    mine = {name: value for name, value in options.items() if name not in _NOT_OF_WEIGHTS}
    if other != mine:
        raise CheckpointError(f"the checkpoint's adapters have lora={other}, those of this run lora={mine}")
