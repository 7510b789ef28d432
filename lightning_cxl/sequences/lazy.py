"""`LazyTensor`: stands for a tensor whose numbers are made when an operation asks for them."""

import logging
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from lightning_cxl.torch_private import plain_tensor_functions, tree_map

log = logging.getLogger("lightning_cxl")
_told: set[str] = set()


def tell_once(text: str) -> None:
    """Write a line to the log, unless it has been written before."""
    if text not in _told:
        _told.add(text)
        log.info(text)


class LazyTensor(Tensor):
    """Answers by itself what is about its shape, type or place; a subclass says what else needs no numbers."""

    FIELDS: ClassVar[frozenset[str]] = frozenset(
        {"shape", "dtype", "device", "ndim", "layout", "is_meta", "is_cpu", "is_cuda"}
    )
    METHODS: ClassVar[frozenset[str]] = frozenset(
        {"size", "dim", "numel", "element_size", "is_floating_point", "__len__", "ndimension"}
    )

    def made(self, operation: str) -> Tensor:
        """Return the plain tensor, which `operation` asks for."""
        raise NotImplementedError

    @classmethod
    def lazily(cls, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function gives without the numbers; `NotImplemented` where it needs them.

        Args:
            name: of the function; of an attribute that is read or set, with a dot in front.
        """
        return NotImplemented

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_attribute = name in ("__get__", "__set__")
        named = func.__self__.__name__ if is_attribute else name
        if name in cls.METHODS or (name == "__get__" and named in cls.FIELDS):
            with plain_tensor_functions():
                return func(*args, **kwargs)
        answer = cls.lazily(func, f".{named}" if is_attribute else name, args, kwargs)
        return cls._with_numbers(func, named, args, kwargs) if answer is NotImplemented else answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch's own tests have it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # what comes here without a torch function, such as from code in C++
        return cls._with_numbers(func, str(func), args, kwargs or {})

    @classmethod
    def _with_numbers(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda each: each.made(name) if isinstance(each, cls) else each, (args, kwargs))
        return func(*args, **kwargs)
