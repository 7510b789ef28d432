"""Tensors that belong to a quantised parameter and must be where its bytes are: scales, code books, second references.

[Note: Quantised parameters]
A quantised weight is opaque bytes in ``parameter.data`` and a few tensors beside it, which its kernel reads. Libraries
keep those in attributes, of the parameter, of a state object, or of the module that computes. A *companion* is one such
attribute. Companions that are the parameter's own data under another name (`Int8Params.CB`) follow the parameter; all
others lie in the same piece of host memory and visit the device together with it. Kinds are known by the class name of
the parameter, so that no library is imported; a kind that is not quantised yet stays where it is.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class Companion(NamedTuple):
    """An attribute that holds a tensor of a parameter, or None at times."""

    holder: Any
    attribute: str
    key: str
    """Which tensor of the parameter; `DATA` for its own bytes."""

    def get(self) -> torch.Tensor | None:
        """Return the tensor."""
        value = getattr(self.holder, self.attribute, None)
        return value if isinstance(value, torch.Tensor) else None


DATA = ""


def companions(module: nn.Module, parameter: nn.Parameter) -> list[Companion]:
    """Return the companions of a parameter of `module` (not of its children); none for an ordinary one."""
    kind = _KINDS.get(type(parameter).__name__)
    return [] if kind is None else list(kind(module, parameter))


def tensors_of(module: nn.Module, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return a parameter of `module` and the tensors beside it, by key."""
    found = [(each.key, each.get()) for each in companions(module, parameter)]
    beside = {key: tensor for key, tensor in found if tensor is not None and key != DATA}
    return {DATA: parameter, **beside}


def show(module: nn.Module, parameter: nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Let a parameter of `module` and its companions hold these tensors."""
    parameter.data = tensors[DATA]
    for each in companions(module, parameter):
        if each.get() is not None:
            setattr(each.holder, each.attribute, tensors[each.key])


def is_quantised_later(parameter: nn.Parameter) -> bool:
    """Return whether moving the parameter to its device will quantise it, which must not be left out."""
    kind, attributes = type(parameter).__name__, parameter.__dict__
    return (kind == "Params4bit" and not attributes.get("bnb_quantized", False)) or (
        kind == "Int8Params" and not attributes.get("has_fp16_weights", False) and parameter.dtype is not torch.int8
    )


def _of_bitsandbytes_4bit(module: nn.Module, parameter: Any) -> Iterator[Companion]:
    state = parameter.quant_state
    for level, holder in (("", state), ("nested ", getattr(state, "state2", None))):
        if holder is not None:
            yield from (Companion(holder, name, level + name) for name in ("absmax", "code", "offset"))


def _of_bitsandbytes_8bit(module: nn.Module, parameter: Any) -> Iterator[Companion]:
    for holder in (parameter, getattr(module, "state", None)):  # from the first forward on, the module's
        if holder is not None:
            yield from (Companion(holder, "CB", DATA), Companion(holder, "SCB", "SCB"))


_KINDS: dict[str, Callable[[nn.Module, Any], Iterator[Companion]]] = {
    "Params4bit": _of_bitsandbytes_4bit,
    "Int8Params": _of_bitsandbytes_8bit,
}
