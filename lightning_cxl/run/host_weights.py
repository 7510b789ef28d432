"""Compute weights on the host: move a model's parameters into memory that the policy placed.

Only where host memory is what the device computes on (the CPU as accelerator). A parameter keeps its identity, shape,
strides and values; its memory is its own (nothing else lies in its storage, so saving one parameter saves just that).
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_cxl.shards import is_sharded
from lightning_cxl.streaming.quantised import show, tensors_of
from lightning_cxl.streaming.unit_weights import owners_in

PlaceLike = Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None]
"""Returns an uninitialised host tensor like a parameter or one that belongs to it, placed for its weights; None if it
is in place already."""


@torch.no_grad()
def place_weights(model: nn.Module, place: PlaceLike) -> tuple[str, ...]:
    """Move every parameter of `model` to the memory that `place` gives; returns the names of those that stay put.

    What belongs to a quantised parameter goes with it ([Note: Quantised parameters]).

    Shards have moved before. Stay put: parameters whose storage is shared with another tensor of the model (moving one
    would cut the tie), parameters not materialised yet, and tensor subclasses with storage of their own kind.
    """
    named = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    plain = {name: p for name, p in named.items() if not is_lazy(p) and type(p.data) is torch.Tensor}
    uses = Counter(_storage_id(t) for t in [*plain.values(), *buffers.values()] if type(t.data) is torch.Tensor)
    kept = [name for name in named if name not in plain and not is_sharded(named[name])]
    module_of = owners_in(model)
    for name, parameter in plain.items():
        if parameter.numel() == 0 or parameter.device.type != "cpu":
            continue
        if parameter.layout is not torch.strided or uses[_storage_id(parameter)] > 1:
            kept.append(name)
            continue
        module = module_of[id(parameter)]
        tensors = tensors_of(module, parameter)
        homes = {key: place(parameter, tensor) for key, tensor in tensors.items()}
        moved = {k: t.detach() if (home := homes[k]) is None else home.copy_(t.detach()) for k, t in tensors.items()}
        if any(home is not None for home in homes.values()):
            show(module, parameter, moved)
    return tuple(kept)


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else id(tensor)
