"""Checkpoints of Fabric with several processes: a folder as in `run/sharded_checkpoint.py`, and Fabric's keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError, UnsupportedError
from lightning_cxl.run import loop_files
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.run.user_loop import UserLoop

_KEYS = "keys"
"""In our entry: the user's names of the model and of the optimizers, in their order."""


def refuse(*, storage_options: Any, filter: Any) -> None:
    """Refuse what a folder has no place for."""
    given = {"storage_options": storage_options, "filter": filter}
    for name, value in given.items():
        if value is not None:
            raise UnsupportedError(
                f"`fabric.save({name}=...)` serves one process: with several each writes its part of a folder, all "
                f"weights and all optimizer state. Leave `{name}` out"
            )


def save(path: Path, state: Mapping[str, Any], loop: UserLoop) -> None:
    """Write a folder, on all processes together.

    Args:
        state: one model, its optimizers, and other objects, by the user's names.
    """
    models = {key: each for key, each in state.items() if isinstance(each, nn.Module)}
    optimizers = {key: each for key, each in state.items() if isinstance(each, Optimizer)}
    if len(models) != 1:
        raise UnsupportedError(
            f"a checkpoint of several processes has one model, and this state has {len(models)} "
            f"({', '.join(models) or 'none'}): save each model, with its optimizers, to a path of its own"
        )
    (model,) = models.values()
    rest = {key: _value(each) for key, each in state.items() if key not in models and key not in optimizers}
    names = {"model": next(iter(models)), "optimizers": list(optimizers)}
    loop_files.save(path, model, list(optimizers.values()), loop, {**rest, KEY: {_KEYS: names}})


def load(path: Path, state: Any, loop: UserLoop, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load objects from a folder; return what is in it beside them."""
    if isinstance(state, nn.Module):
        loop_files.load(path, state, {}, loop, strict=strict, weights_only=weights_only)
        return {}
    models = {key: each for key, each in (state or {}).items() if isinstance(each, nn.Module)}
    optimizers = {key: each for key, each in (state or {}).items() if isinstance(each, Optimizer)}
    if len(models) != 1:
        raise UnsupportedError(
            f"checkpoint `{path}` is of one model, and {len(models)} are to be loaded ({', '.join(models) or 'none'}): "
            "give `fabric.load` the model, alone or with its optimizers"
        )
    rest, own = loop_files.read_rest(path, weights_only=weights_only)
    known = own.get(_KEYS) or {"model": "state_dict", "optimizers": []}
    missing = [key for key in state if key not in (known["model"], *known["optimizers"], *rest)]
    if missing and strict:
        have = (known["model"], *known["optimizers"], *rest)
        raise CheckpointError(f"checkpoint `{path}` has no `{missing[0]}`; it has {', '.join(map(repr, have))}")
    (model,) = models.values()
    numbered = {known["optimizers"].index(key): each for key, each in optimizers.items() if key in known["optimizers"]}
    loop_files.load(path, model, numbered, loop, strict=strict, weights_only=weights_only)
    for key, each in list(state.items()):
        if key in rest and key not in models and key not in optimizers:
            value = rest.pop(key)
            if hasattr(each, "load_state_dict"):
                each.load_state_dict(value)
            else:
                state[key] = value
    return rest


def _value(each: Any) -> Any:
    return each.state_dict() if hasattr(each, "state_dict") else each
