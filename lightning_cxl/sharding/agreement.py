"""Steps that all ranks of a group do, or none: what one of them cannot do is the same error on all."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_cxl.errors import LightningCXLError, UnsupportedError

_T = TypeVar("_T")


def on_all_ranks(step: Callable[[], _T], group: Any) -> list[_T]:
    """Do a step on all ranks of a group, and return what it gives on each, in the order of the ranks.

    Args:
        step: what it returns is pickled.
        group: can exchange objects of the host.

    Raises:
        LightningCXLError: on all ranks, where the step raises one on some of them, of the same class.
    """
    mine: tuple[_T | None, LightningCXLError | None]
    try:
        mine = step(), None
    except LightningCXLError as error:
        mine = None, error
    except OSError as error:
        mine = None, UnsupportedError(f"the kernel refuses what sharing memory needs: {error}.")
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    for rank, (_, failure) in enumerate(found):
        if failure is not None:
            raise type(failure)(f"rank {rank} of the group: {failure}") from mine[1]
    return [result for result, _ in found]
