"""How stand-ins for methods travel: a copy or a pickle gets the method that they stand in for."""

from collections.abc import Callable
from typing import Any


class ReplacedMethod:
    """Stands in for a method of an object while a run is going on; belongs to that run.

    Args:
        plain: the method.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain = plain

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Copy and pickle as the plain method."""
        return _same_object, (self._plain,)


def _same_object(value: Any) -> Any:
    return value
