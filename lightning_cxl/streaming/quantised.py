"""Tensors that belong to a quantised parameter and must be where its bytes are: scales, code books, second references.

[Note: Quantised parameters]
A quantised weight is opaque bytes in ``parameter.data`` and a few tensors beside it, which its kernel reads. Libraries
keep those in attributes, of the parameter, of a state object, or of the module that computes. A *companion* is one such
attribute. Companions that are the parameter's own data under another name (`Int8Params.CB`) follow the parameter; all
others lie in the same piece of host memory and go to the device together with it. Kinds are known by the class name of
the parameter, so that no library is imported; a kind that is not quantised yet stays where it is.

Three things that layers of bitsandbytes do would go wrong in a run, which therefore prepares them (`prepare_layers`):

* Their backward reads the weight through tensors that the forward has left in the graph or in a state object, not
  through autograd's saved tensors. By then other weights lie there, or those on the host: it gets what the parameter
  shows at that moment. Nothing would make torch compute the unit again before: where the last layer of a unit has no
  adapter, its backward is the first of the unit and reads no saved tensor. So each layer saves one, without elements,
  which is asked for before the layer's backward. Only layers whose weights stream need this.
* An 8-bit layer keeps its input in the graph, past the hooks of a checkpoint, although only the gradient of its weight
  needs it, which is never asked for. Recomputed units would free nothing. It is dropped.
* When the CPU evaluates and has AVX-512 BF16, a layer puts its 4-bit weight in another order, in memory of its own, and
  cannot train with it any more. It is kept from that: the bytes stay there, training goes on after a validation, and
  evaluation computes as training does.
"""

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cxl.errors import LightningCXLWarning, UnsupportedError
from lightning_cxl.text import format_bytes
from lightning_cxl.torch_private import set_plain_data

_MAY_REPACK = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers
_MOST_STEPS = 3  # from the output of a layer back to its product: a change of type, and one to spare


class Companion(NamedTuple):
    """An attribute that holds a tensor of a parameter, or None at times."""

    holder: Any
    attribute: str
    key: str
    """Which tensor of the parameter; `DATA` for its own bytes."""

    def get(self) -> torch.Tensor | None:
        value = getattr(self.holder, self.attribute, None)
        return value if isinstance(value, torch.Tensor) else None


DATA = ""


def companions(module: nn.Module, parameter: nn.Parameter) -> list[Companion]:
    """Return the companions of a parameter of `module` (not of its children); none for an ordinary one."""
    kind = _KINDS.get(type(parameter).__name__)
    return [] if kind is None else list(kind(module, parameter))


def tensors_of(module: nn.Module, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    found = [(each.key, each.get()) for each in companions(module, parameter)]
    beside = {key: tensor for key, tensor in found if tensor is not None and key != DATA}
    return {DATA: parameter, **beside}


def show(module: nn.Module, parameter: nn.Parameter, tensors: Mapping[str, torch.Tensor]) -> None:
    set_plain_data(parameter, tensors[DATA])
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


def prepare_layers(model: nn.Module, streamed: Collection[int]) -> Callable[[], None]:
    """Make quantised layers fit for a run; returns what undoes it. See [Note: Quantised parameters]."""
    layers = [(name, module) for name, module in model.named_modules() if _MAY_REPACK in module.__dict__]
    for name, module in layers:
        if getattr(getattr(module._parameters.get("weight"), "quant_state", None), "packing_format_for_cpu", False):
            raise UnsupportedError(
                f"`{name}` has put its 4-bit weight in the order that bitsandbytes evaluates with on this CPU, and "
                "cannot train with: load the model again, and do not evaluate it before the run"
            )
    before = [(module, getattr(module, _MAY_REPACK)) for _, module in layers]
    hooks = [
        module.register_forward_hook(functools.partial(_prepare_backward, parameter, id(parameter) in streamed))
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if _is_quantised(parameter)
    ]
    for module, _ in before:
        setattr(module, _MAY_REPACK, False)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        for module, value in before:
            setattr(module, _MAY_REPACK, value)

    return undo


def has_quantised(model: nn.Module) -> bool:
    return any(map(_is_quantised, model.parameters()))


def wide_experts(model: nn.Module) -> str:
    """Return a sentence about the fused experts that a quantised model has in full precision; "" if there are none."""
    names: set[str] = set()
    nbytes = 0
    for module in model.modules() if has_quantised(model) else ():
        for parameter in module.parameters(recurse=False):
            # a convolution's weight has three dimensions, too, but is small
            if parameter.dim() == 3 and parameter.is_floating_point() and not hasattr(module, "kernel_size"):
                names.add(type(module).__name__)
                nbytes += parameter.nbytes
    if not nbytes:
        return ""
    whole = sum(parameter.nbytes for parameter in model.parameters())
    return (
        f"{format_bytes(nbytes)} of {format_bytes(whole)} of weights are not quantised: bitsandbytes quantises linear "
        f"layers alone, and the experts of {', '.join(sorted(names))} are parameters of three dimensions. They stay as "
        "wide as they are: count on these bytes, or take a model without experts"
    )


def warn_of_wide_experts(model: nn.Module) -> None:
    """Warn of fused experts that a quantised model has in full precision, with their bytes."""
    if said := wide_experts(model):
        warnings.warn(said, LightningCXLWarning, stacklevel=1)  # one place: who loads and trains is told once


def kept_whole(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name what no process may cut: the parameters of quantised layers. Their bytes have no rows."""
    of_modules = [list(module.parameters(recurse=False)) for module in model.modules()]
    ids = {id(parameter) for own in of_modules if any(map(_is_quantised, own)) for parameter in own}
    found = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in ids}
    trained = next((name for name, parameter in found.items() if parameter.requires_grad), None)
    if trained is not None:
        raise UnsupportedError(
            f"`{trained}` is trained and belongs to a quantised layer, of which each of several processes has all: "
            "freeze it with `requires_grad_(False)` (adapters beside it can be trained), or train with one process"
        )
    return found


def _is_quantised(parameter: nn.Parameter) -> bool:
    return type(parameter).__name__ in _KINDS


def _prepare_backward(parameter: nn.Parameter, streams: bool, module: nn.Module, inputs: Any, output: Any) -> None:
    """Let the backward of a layer that has just run read the weight of then, and keep nothing that it does not read."""
    if torch.compiler.is_compiling() or not isinstance(output, torch.Tensor) or output.grad_fn is None:
        return  # torch.compile saves what a backward reads as every other tensor
    node: Any = output.grad_fn
    for _ in range(_MOST_STEPS):
        if node is not None and type(node).__name__ not in _UNREAD:
            node = next((each for each, _ in node.next_functions if each is not None), None)
    if type(node).__name__ not in _UNREAD:
        node = None
    if node is not None and not parameter.requires_grad:
        for attribute, value in _UNREAD[type(node).__name__].items():
            setattr(node, attribute, value)
    if not streams:
        return
    if node is None:
        raise UnsupportedError(
            f"a layer of class {type(module).__name__} computes in a way that this version does not know, and its "
            "backward may read other weights than its own: set stream_weights=False, or take bitsandbytes 0.50"
        )
    if type(node).__name__ == "MatMul4BitBackward":
        node.tensors = _BytesOfThen(parameter)
    saved: Any = _SavesATensor.apply(torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True))  # type: ignore[no-untyped-call]
    node.register_prehook(functools.partial(_compute_again, saved))


class _SavesATensor(torch.autograd.Function):
    """Has a saved tensor, which a checkpoint around it can only give back when it has computed its function again."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(anchor)
        return anchor.clone()


def _compute_again(saved: torch.Tensor, gradients: Any) -> None:
    # torch 2.11 frees what a node has saved with the tensor that it made, also if somebody holds the node
    _ = saved.grad_fn.saved_tensors  # type: ignore[union-attr]


class _BytesOfThen:
    """Unpacked by the backward of a 4-bit layer: None, and the bytes of its parameter."""

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
_UNREAD: dict[str, dict[str, Any]] = {
    "MatMul4BitBackward": {},
    "MatMul8bitFpBackward": {"A": None},
    "MatMul8bitLtBackward": {"tensors": (None, None, None), "tensor_states": (None, None)},
}
"""Nodes of quantised products, with what they keep for the gradient of the weight alone."""
