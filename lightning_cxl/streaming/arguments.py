"""What a unit is called with: containers and key/value caches, kept as they were when its forward began.

[Note: Containers among the arguments]
A unit may append to a list that it is given (losses of experts, collected states) or write to a dict, and its caller
reads them afterwards. So the forward gets the caller's own objects, and `rebuilt` makes twice another tree of them: as
the forward begins, with what stands for each tensor, and for a recompute, with these tensors. An object that appears
twice is one object in the copy as well. Containers are lists, dicts, sets and deques, classes derived from them,
dataclasses, and what pytree knows. All else is given to the recompute as it is then.

[Note: Key/value caches]
Hugging Face models hand every block a cache that it appends to, by default also in training; a recompute would append
again. In training, what a unit gets instead of a cache that is an argument of its own is:

* for an empty cache None, as those models do when they checkpoint, so the cache that the model returns is empty;
* for a cache that already holds something (prefix tuning) a copy with the same tensors, a new one for every run of the
  unit, so the model's own cache keeps just what it held. Only for caches that grow by replacing their tensors.

A cache inside a container is the caller's own in the forward, and such a copy in a recompute. Otherwise (other caches,
evaluation with gradients on) the unit runs as it is, without a recompute.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from lightning_cxl.torch_private import PYTREE_NODES

_CACHES = ("DynamicCache",)
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def rebuilt(value: Any, stand_in: Callable[[Any], Any], done: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """Return `value` with a copy in place of each container, and ``stand_in(leaf)`` in place of all else."""
    done = {} if done is None else done  # original and copy by id of the original, which must live as long
    if id(value) in done:
        return done[id(value)][1]

    def again(each: Any) -> Any:
        return rebuilt(each, stand_in, done)

    node = PYTREE_NODES.get(type(value))
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        twin = stand_in(value)
    elif is_cache(value):
        twin = _copied(stand_in(value))
    elif isinstance(value, (dict, list, set, collections.deque)) or dataclasses.is_dataclass(type(value)):
        twin = copy.copy(value)
        done[id(value)] = value, twin  # before what is in it, which may contain it
        if isinstance(value, dict):
            for key, each in value.items():
                twin[key] = again(each)
        elif isinstance(value, (list, set, collections.deque)):
            twin.clear()
            (twin.update if isinstance(twin, set) else twin.extend)([again(each) for each in value])
        else:
            for name in dict.fromkeys([*getattr(value, "__dict__", ()), *value.__dataclass_fields__]):
                if hasattr(value, name):
                    object.__setattr__(twin, name, again(getattr(value, name)))  # it may be frozen
    elif isinstance(value, tuple):
        parts = [again(each) for each in value]
        is_same = all(one is other for one, other in zip(parts, value, strict=True))
        twin = value if is_same else value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    elif isinstance(value, _Apart):
        twin = value.unflatten([again(each) for each in value.children], value.context)
    elif node is not None:
        children, context = node.flatten_fn(value)
        twin = _Apart([again(each) for each in children], context, node.unflatten_fn)
    else:
        twin = stand_in(value)
    done[id(value)] = value, twin
    return twin


class _Apart:
    """What pytree knows, taken apart: it may refuse to hold what stands for a tensor."""

    def __init__(self, children: list[Any], context: Any, unflatten: Callable[[Any, Any], Any]) -> None:
        self.children, self.context, self.unflatten = children, context, unflatten


def leaves_of(value: Any) -> list[Any]:
    """Return what is no container in `value`, each object once."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    rebuilt(value, note)
    return found


def is_cache(value: Any) -> bool:
    """Return whether an argument is a key/value cache."""
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def can_replace(cache: Any) -> bool:
    """Return whether what `replaced` gives for `cache` can be had any number of times."""
    return cache.get_seq_length() == 0 or grows_by_replacing(cache)


def cached_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a cache of a known kind: a gradient may flow into them alone."""
    if not is_cache(value) or not grows_by_replacing(value):
        return []
    found = [getattr(layer, name, None) for layer in value.layers for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def replaced(value: Any) -> Any:
    """Return what the forward is given for an argument: for an empty cache None, for another a copy."""
    if not is_cache(value):
        return value
    return None if value.get_seq_length() == 0 else _copied(value)


def grows_by_replacing(cache: Any) -> bool:
    """Return whether a copy of a cache goes on as the cache would, without a change to it."""
    return type(cache).__name__ in _CACHES and all(type(layer).__name__ in _LAYERS for layer in cache.layers)


def _copied(cache: Any) -> Any:
    if not grows_by_replacing(cache):
        return cache
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
