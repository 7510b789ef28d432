"""What a unit is called with: containers and key/value caches, kept as they were when its forward began.

[Note: Containers among the arguments]
A unit may append to a list that it is given (losses of experts, collected states) or write to a dict, and its caller
reads them afterwards. So the forward gets the caller's own objects, and `rebuilt` makes twice another tree of them: as
the forward begins, with what stands for each tensor, and for a recompute, with these tensors. An object that appears
twice is one object in the copy as well. Containers are lists, dicts, sets and deques, classes derived from them,
dataclasses, and what pytree knows. All else is given to the recompute as it is then, also a container whose class
refuses to be copied.

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
import types
from collections.abc import Callable
from typing import Any

import torch

from lightning_cxl.torch_private import PYTREE_NODES

_PLAIN = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)
_MAX_DEPTH = 100  # far below what Python allows to call, as the model's own calls come on top
_CACHES = ("DynamicCache",)
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def rebuilt(value: Any, stand_in: Callable[[Any], Any]) -> Any:
    """Return `value` with a copy in place of each container, and ``stand_in(leaf)`` in place of all else.

    Numbers, strings and the like stay as they are, and so do containers that refuse to be copied or lie too deep.
    """
    return _rebuilt(value, stand_in, {}, 0)


def _rebuilt(value: Any, stand_in: Callable[[Any], Any], done: dict[int, tuple[Any, Any]], depth: int) -> Any:
    if type(value) in _PLAIN:
        return value
    if id(value) in done:  # original and copy by id of the original, which must live as long
        return done[id(value)][1]

    def again(each: Any) -> Any:
        return each if type(each) in _PLAIN else _rebuilt(each, stand_in, done, depth + 1)

    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        twin = stand_in(value)
    elif is_cache(value):
        twin = _copied(stand_in(value))
    elif depth > _MAX_DEPTH:
        twin = stand_in(value)
    elif isinstance(value, tuple):
        parts = [again(each) for each in value]
        is_same = all(one is other for one, other in zip(parts, value, strict=True))
        twin = value if is_same else _tuple_of(parts, value)
    elif isinstance(value, _CONTAINERS) or dataclasses.is_dataclass(type(value)):
        twin = _shallow(value)
        done[id(value)] = value, twin  # before what is in it, which may contain it
        if twin is value:
            twin = stand_in(value)
        else:
            _fill(twin, value, again)
    elif isinstance(value, _Apart):
        twin = value.unflatten([again(each) for each in value.children], value.context)
    elif (node := PYTREE_NODES.get(type(value))) is not None:
        children, context = node.flatten_fn(value)
        twin = _Apart([again(each) for each in children], context, node.unflatten_fn)
    else:
        twin = stand_in(value)
    done[id(value)] = value, twin
    return twin


def _shallow(value: Any) -> Any:
    """Return a copy of a container; itself where its class refuses that, or gives something else."""
    try:
        twin = copy.copy(value)
    except Exception:
        return value
    return twin if type(twin) is type(value) else value


def _fill(twin: Any, value: Any, again: Callable[[Any], Any]) -> None:
    """Put copies of what is in `value` into `twin`, past what its class has made of the methods of the base."""
    base: Any = next((each for each in _CONTAINERS if isinstance(value, each)), None)
    if base is not None:
        base.clear(twin)
        if issubclass(base, dict):
            for key, each in base.items(value):
                base.__setitem__(twin, key, again(each))
        else:
            (base.update if base is set else base.extend)(twin, [again(each) for each in base.__iter__(value)])
    for name, each in getattr(value, "__dict__", {}).items():
        twin.__dict__[name] = again(each)
    if dataclasses.is_dataclass(type(value)):
        for name in [field.name for field in dataclasses.fields(value)]:
            slot = getattr(type(value), name, None)
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                slot.__set__(twin, again(getattr(value, name)))  # it may be frozen


def _tuple_of(parts: list[Any], value: Any) -> Any:
    if hasattr(type(value), "n_sequence_fields"):  # what torch.max and others return
        return type(value)(parts)
    twin = tuple.__new__(type(value), parts)
    if hasattr(value, "__dict__"):
        twin.__dict__.update(value.__dict__)
    return twin


class _Apart:
    """What pytree knows, taken apart: it may refuse to hold what stands for a tensor."""

    def __init__(self, children: list[Any], context: Any, unflatten: Callable[[Any, Any], Any]) -> None:
        self.children, self.context, self.unflatten = children, context, unflatten


def leaves_of(value: Any) -> list[Any]:
    """Return what is neither a container nor plain (a number, a string, ...) in `value`, each object once."""
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
