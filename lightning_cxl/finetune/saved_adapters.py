"""Adapters in checkpoints of the main job, which hold nothing else: the base does not change, and is in its files."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_cxl.errors import CheckpointError

_NOT_OF_WEIGHTS = frozenset({"lora_dropout"})
"""Options of an adapter that another run may change."""


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
