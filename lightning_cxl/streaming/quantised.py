"""Tensors that belong to a quantised parameter and must be where its bytes are: scales, code books, second references.

[Note: Quantised parameters]
A quantised weight is opaque bytes in ``parameter.data`` and a few tensors beside it, which its kernel reads. Libraries
keep those in attributes, of the parameter, of a state object, or of the module that computes. A *companion* is one such
attribute. Companions that are the parameter's own data under another name (`Int8Params.CB`) follow the parameter; all
others lie in the same piece of host memory and visit the device together with it. Kinds are known by the class name of
the parameter, so that no library is imported; a kind that is not quantised yet stays where it is.

Three things that layers of bitsandbytes do would go wrong in a run, which therefore prepares them (`prepare_layers`):

* The backward of a 4-bit layer reads its weight through a tensor that the forward has left in the graph, not through
  autograd's saved tensors. By then other weights lie there: gradients would be wrong without an error. It gets the
  parameter's bytes of that moment instead.
* When the CPU evaluates and has AVX-512 BF16, a layer puts its 4-bit weight in another order, in memory of its own, and
  cannot train with it any more. It is kept from that: the bytes stay at home, training goes on after a validation, and
  evaluation computes as training does.
* An 8-bit layer leaves its input in the graph, not as one of autograd's saved tensors, so that the inputs of all layers
  of all units would stay on the device, although units are recomputed. Only the gradient of the weight would need it:
  below frozen weights it is taken out.
"""

import functools
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cxl.errors import UnsupportedError

_MAY_REPACK = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers
_MOST_STEPS = 3  # from the output of a layer back to its product: a change of type, and one to spare


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


def numel(parameter: torch.Tensor) -> int:
    """Return how many numbers a parameter stands for; its bytes may hold several each."""
    shape = getattr(getattr(parameter, "quant_state", None), "shape", None)
    return parameter.numel() if shape is None else prod(shape)


def prepare_layers(model: nn.Module) -> Callable[[], None]:
    """Make quantised layers fit for weights that move; returns what undoes it. See [Note: Quantised parameters].

    Args:
        model: INOUT.

    Raises:
        UnsupportedError: a layer has put its weight in another order already.
    """
    layers = [(name, module) for name, module in model.named_modules() if _MAY_REPACK in module.__dict__]
    for name, module in layers:
        if getattr(getattr(module._parameters.get("weight"), "quant_state", None), "packing_format_for_cpu", False):
            raise UnsupportedError(
                f"`{name}` has put its 4-bit weight in the order that bitsandbytes evaluates with on this CPU, and "
                "cannot train with: load the model again, and do not evaluate it before the run"
            )
    before = [(module, getattr(module, _MAY_REPACK)) for _, module in layers]
    hooks = [
        module.register_forward_hook(functools.partial(_let_backward_read, parameter))
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if type(parameter).__name__ == "Params4bit"
    ]
    hooks += [
        module.register_forward_hook(_let_input_go)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if type(parameter).__name__ == "Int8Params" and not parameter.requires_grad
    ]
    for module, _ in before:
        setattr(module, _MAY_REPACK, False)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module, value in before:
            setattr(module, _MAY_REPACK, value)

    return undo


def _let_backward_read(parameter: nn.Parameter, module: nn.Module, inputs: Any, output: Any) -> None:
    """Let the backward of a 4-bit layer read the parameter as it is then.

    Raises:
        UnsupportedError: the layer's node is not in the graph, so that its gradients could be wrong.
    """
    if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor) or output.grad_fn is None:
        return  # torch.compile saves what a backward reads as every other tensor
    node: Any = output.grad_fn
    for _ in range(_MOST_STEPS):
        if type(node).__name__ == "MatMul4BitBackward":
            node.tensors = _BytesOfThen(parameter)
            return
        node = next((each for each, _ in node.next_functions if each is not None), None)
    raise UnsupportedError(
        f"a layer of class {type(module).__name__} computes in a way that this version does not know, and its backward "
        "may read other weights than its own: set stream_weights=False, or take bitsandbytes 0.50"
    )


def _let_input_go(module: nn.Module, inputs: Any, output: Any) -> None:
    """Take what only the gradient of an 8-bit weight would need out of the graph."""
    node: Any = getattr(output, "grad_fn", None)
    for _ in range(_MOST_STEPS):
        if type(node).__name__ == "MatMul8bitLtBackward":
            node.tensors = (None, None, None)
            return
        if type(node).__name__ == "MatMul8bitFpBackward":  # where the CPU trains
            node.A = None
            return
        node = next((each for each, _ in getattr(node, "next_functions", ()) if each is not None), None)


class _BytesOfThen:
    """What the backward of a 4-bit layer unpacks: None, and the bytes of its parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        yield None
        yield self._parameter.data


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
