"""Key/value caches among the arguments of a unit.

[Note: Key/value caches]
Hugging Face models hand every block a cache that it appends to, by default also in training; a recompute would append
again. In training, what a unit gets instead is:

* for an empty cache None, as those models do when they checkpoint, so the cache that the model returns is empty;
* for a cache that already holds something (prefix tuning) a copy with the same tensors, a new one for every run of the
  unit, so the model's own cache keeps just what it held. Only for caches that grow by replacing their tensors.

Otherwise (other caches, evaluation with gradients on) the unit runs as it is, without a recompute.
"""

import copy
from typing import Any

import torch

_CACHES = ("DynamicCache",)
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class KeptCache:
    """A cache as it was when a unit was called."""

    def __init__(self, cache: Any) -> None:
        self._cache = _copy(cache)

    def fresh(self) -> Any:
        """Return a copy for one run of the unit."""
        return _copy(self._cache)


def is_cache(value: Any) -> bool:
    """Return whether an argument is a key/value cache."""
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def can_replace(cache: Any) -> bool:
    """Return whether what `replaced` gives for `cache` can be had any number of times."""
    return cache.get_seq_length() == 0 or _grows_by_replacing(cache)


def cached_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a cache of a known kind: a gradient may flow into them alone."""
    if not is_cache(value) or not _grows_by_replacing(value):
        return []
    found = [getattr(layer, name, None) for layer in value.layers for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def replaced(value: Any) -> Any:
    """Return what stands for an argument of a call: for a cache None or a `KeptCache`."""
    if not is_cache(value):
        return value
    return None if value.get_seq_length() == 0 else KeptCache(value)


def _grows_by_replacing(cache: Any) -> bool:
    return type(cache).__name__ in _CACHES and all(type(layer).__name__ in _LAYERS for layer in cache.layers)


def _copy(cache: Any) -> Any:
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
