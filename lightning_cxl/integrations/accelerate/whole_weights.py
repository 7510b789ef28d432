"""Weights that one process has saved with Accelerate, for models that are cut."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from lightning_cxl.errors import CheckpointError
from lightning_cxl.run import checkpoint_file
from lightning_cxl.run.cutting import taking_whole


def load_whole(folder: Path, index: int, model: nn.Module) -> None:
    """Load the weights of one model of a state; each process reads all of them and keeps its part.

    Args:
        index: of the model, in the order in which models were prepared.
    """
    ending = f"_{index}" if index else ""
    path = folder / f"model{ending}.safetensors"
    other = folder / f"pytorch_model{ending}.bin"
    if path.exists():
        saved = load_file(path)
    elif other.exists():
        saved = checkpoint_file.load_file(other, "cpu", True)
    else:
        found = ", ".join(sorted(each.name for each in folder.iterdir())[:8]) or "nothing"
        raise CheckpointError(f"state `{folder}` has no {path.name} or {other.name}; it has {found}")
    saved = {name.replace("_orig_mod.", ""): value for name, value in saved.items()}  # of a compiled model
    with taking_whole(model):
        missing, unknown = model.load_state_dict(saved, strict=False)
    tied = _names_of_loaded(model, saved)  # safetensors has each weight once
    lacking = [name for name in missing if name not in tied]
    if lacking or unknown:
        raise CheckpointError(
            f"state `{folder}` is of another model: it lacks {lacking[:3] or 'nothing'} ({len(lacking)}), the model "
            f"lacks {list(unknown[:3]) or 'nothing'} ({len(unknown)})"
        )


def _names_of_loaded(model: nn.Module, saved: dict[str, torch.Tensor]) -> set[str]:
    """Return all names of the parameters that were loaded under one of them."""
    named = list(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in named if name in saved}
    return {name for name, parameter in named if id(parameter) in loaded}
