"""Weights that several processes leave in their files until the model is cut, so that each reads its part alone.

[Note: Left in files]
Of a model that is cut, a process keeps its rows of each parameter. So where several processes have met, loading takes
no memory for parameters; when FSDP2 cuts the model, it copies the rows of this process out of each parameter, one
parameter after the other.

* Numbers that are in the file as the model has them: the parameter is a tensor over the pages of the file. The kernel
  has these once for all processes of a machine, and takes them back when memory is short.
* Numbers that are converted, or computed from several tensors: an `UnreadWeight`. Views of it, so also rows, are unread
  as well. Every other operator reads the values anew and converts them; nothing keeps them.

Until then a model can be looked at, saved, wrapped and run, at the speed of the files. Pages can be written, which
takes memory in this process. An `UnreadWeight` refuses to be written.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.host_shard import SHAPE_ALONE, made_like, shape_of
from lightning_cxl.sharding.torch_private import make_wrapper, no_torch_function, written_by
from lightning_cxl.torch_private import tree_leaves, tree_map

_CPU = torch.device("cpu")
_OTHER_NUMBERS = frozenset(
    (torch.ops.aten.view.dtype, torch.ops.aten.view_as_real.default, torch.ops.aten.view_as_complex.default)
)
"""Views that show other numbers than those they are taken of, so that they cannot come before a conversion."""


def are_left_in_files() -> bool:
    """Return whether weights stay in their files until the model is cut: whether several processes have met."""
    return dist.is_initialized() and dist.get_world_size() > 1


class UnreadWeight(Tensor):
    """A weight without memory; see [Note: Left in files].

    Args:
        like: a tensor with the shape of the weight, on any device.
        dtype: of the weight.
        read: returns values of this shape, of any dtype.
        device: where its values are read to.
    """

    __slots__ = ("_read",)  # who puts another parameter in its place takes `__dict__` over
    _read: Callable[[], Tensor]

    @staticmethod
    def __new__(
        cls, like: Tensor, dtype: torch.dtype, read: Callable[[], Tensor], device: torch.device = _CPU
    ) -> "UnreadWeight":
        """Make a weight of these values."""
        weight: UnreadWeight = make_wrapper(cls, like.shape, strides=like.stride(), dtype=dtype, device=device)
        weight._read = read
        return weight

    def values(self) -> Tensor:
        """Return the values in memory of their own, as a plain tensor."""
        with torch.no_grad():
            read, values = self._read(), torch.empty(self.shape, dtype=self.dtype, device=self.device)
            return values.copy_(read)

    @property
    def data(self) -> Tensor:
        """The weight without autograd; what is set in its place is the values from now on, as for any tensor."""
        detached: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return detached

    @data.setter
    def data(self, values: Tensor) -> None:
        # of the same weight where nothing had to be converted
        read = values._read if isinstance(values, UnreadWeight) else lambda: values
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]  # its shape and dtype
        self._read = read

    def data_ptr(self) -> int:
        """Raise: there is no memory.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"the memory of a weight is asked for, and {_WHY}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a weight in memory, as every copy is."""
        values = self.values()
        copy: Tensor = (
            torch.nn.Parameter(values, self.requires_grad) if isinstance(self, torch.nn.Parameter) else values
        )
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.values()!r})"

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on the values; a view gives what is unread, too."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.as_strided.default:
            raise UnsupportedError(f"`{func}` counts from the begin of a weight's memory, and {_WHY}")
        if func.is_view and func not in _OTHER_NUMBERS:
            return _view(func, args, kwargs)
        if func in SHAPE_ALONE:
            return made_like(func, args, kwargs)
        if any(isinstance(leaf, UnreadWeight) for leaf in tree_leaves(written_by(func, args, kwargs) or [])):
            raise UnsupportedError(f"`{func}` would write a weight, and {_WHY}")
        read: dict[int, Tensor] = {}
        return func(*_with_values(args, read), **_with_values(kwargs, read))


_WHY = (
    "it is in its file: with several processes, each reads its part when the run begins. To change weights before, "
    "load with mapped=False; then every process has all of them in memory until the run begins"
)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view of an unread weight, or views, as what is not read yet."""
    weight, *rest = args
    whole = weight._read  # a view shows the same when `.data` is set
    views = func(shape_of(weight), *rest, **kwargs)
    if isinstance(views, Tensor):
        return UnreadWeight(views, weight.dtype, lambda: func(whole(), *rest, **kwargs), weight.device)

    def read(index: int) -> Tensor:
        part: Tensor = func(whole(), *rest, **kwargs)[index]
        return part

    return [UnreadWeight(view, weight.dtype, partial(read, index), weight.device) for index, view in enumerate(views)]


def _with_values(values: Any, read: dict[int, Tensor]) -> Any:
    """Return arguments with values in the place of weights, each read once."""

    def value_of(leaf: Any) -> Any:
        if not isinstance(leaf, UnreadWeight):
            return leaf
        if id(leaf) not in read:
            read[id(leaf)] = leaf.values()
        return read[id(leaf)]

    return tree_map(value_of, values)
