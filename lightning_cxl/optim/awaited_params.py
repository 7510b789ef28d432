"""`AwaitedParams`: the list of a group's parameters, which waits for what runs behind before it is read.

Whoever walks ``optimizer.param_groups`` gets at weights past the modules, which wait too ([Note: Awaited parameters]).
Learning-rate schedulers read the other entries of a group only, and what belongs to the step itself uses `plain`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch


class AwaitedParams(list[torch.Tensor]):
    """Stands in for ``group["params"]``.

    Args:
        parameters: of the group.
        wait: returns when no update runs and gradients are complete.
        complete: returns when gradients are complete.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], wait: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        super().__init__(parameters)
        self._wait = wait
        self.complete = complete

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Wait, then iterate."""
        self._wait()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Wait, then look up."""
        self._wait()
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain list, after waiting."""
        return list, (list(self),)


def plain(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parameters of a group without waiting."""
    return list(list.__iter__(parameters)) if isinstance(parameters, AwaitedParams) else list(parameters)


def drop_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Drop the gradients of a group. An update that runs is not waited for: it has its own references to them."""
    if isinstance(parameters, AwaitedParams):
        parameters.complete()
    for parameter in plain(parameters):
        parameter.grad = None
