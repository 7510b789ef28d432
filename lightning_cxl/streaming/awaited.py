"""`AwaitedParameters`: tells when someone looks at a module's parameters, and lets them wait for an update.

[Note: Awaited parameters]
Everything that reads a model through its modules, be it ``module.weight``, ``named_parameters``, ``state_dict``, a copy
or a hook of the user, goes through the dict ``module._parameters``. While a unit is not entered, that dict is replaced
by one that first waits for an update that runs behind, and puts the plain one back. Names can be read without that. A
parameter that someone holds a reference to is read without waiting: optimizers do, which know about updates.

Who has looked may write, also through ``.data`` (peft merges adapters so), which torch does not count. So a look waits
for copies to the device that are under way, since the host may be ahead of the device, and makes those that are there
old; and until the next unit is entered, when the code that looked is over, none is made.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class AwaitedParameters(dict[str, Any]):
    """Stands in for ``module._parameters``. See [Note: Awaited parameters].

    Args:
        plain: the dict it stands in for.
        settle: waits, and puts `plain` back.
    """

    def __init__(self, plain: dict[str, Any], settle: Callable[[], None]) -> None:
        super().__init__(plain)
        self.plain = plain
        self._settle = settle

    def _settled(self) -> dict[str, Any]:
        self._settle()
        return self.plain

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names; being defined here, it keeps ``dict(self)`` from reading values directly."""
        return iter(self.plain)

    def __getitem__(self, name: str) -> Any:
        """Wait, then look up."""
        return self._settled()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Wait, then look up."""
        return self._settled().get(name, default)

    def items(self) -> Any:
        """Wait, then return the items."""
        return self._settled().items()

    def values(self) -> Any:
        """Wait, then return the values."""
        return self._settled().values()

    def copy(self) -> dict[str, Any]:
        """Wait, then copy."""
        return self._settled().copy()

    def __setitem__(self, name: str, parameter: Any) -> None:
        """Wait, then set."""
        self._settled()[name] = parameter

    def __delitem__(self, name: str) -> None:
        """Wait, then delete."""
        del self._settled()[name]

    def pop(self, *args: Any) -> Any:
        """Wait, then pop."""
        return self._settled().pop(*args)

    def popitem(self) -> Any:
        """Wait, then pop."""
        return self._settled().popitem()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Wait, then look up or set."""
        return self._settled().setdefault(name, default)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Wait, then update."""
        self._settled().update(*args, **kwargs)

    def clear(self) -> None:
        """Wait, then clear."""
        self._settled().clear()

    def __eq__(self, other: object) -> bool:
        """Wait, then compare."""
        return self._settled() == other

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        """Copy and pickle as the plain dict, after waiting."""
        return dict, (self._settled(),)


def guard(module: nn.Module, settle: Callable[[], None]) -> None:
    """Let whoever looks at the parameters of `module` (not of its children) call `settle` first."""
    plain = module._parameters
    if not isinstance(plain, AwaitedParameters):
        module.__dict__["_parameters"] = AwaitedParameters(plain, settle)


def peek(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `module` and its children once each; only for what an update leaves alone."""
    seen: set[nn.Parameter] = set()  # tied ones
    for each in module.modules():
        for parameter in peek_at_own(each).values():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield parameter


def peek_at_own(module: nn.Module) -> dict[str, Any]:
    """Return the dict with the parameters of `module` (not of its children), without waiting."""
    parameters: dict[str, Any] = module.__dict__["_parameters"]
    return parameters.plain if isinstance(parameters, AwaitedParameters) else parameters


def unguard(module: nn.Module) -> None:
    """Undo `guard`; nothing where it is undone already."""
    awaited = module.__dict__["_parameters"]
    if isinstance(awaited, AwaitedParameters):
        module.__dict__["_parameters"] = awaited.plain
