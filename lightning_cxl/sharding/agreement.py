"""Steps that all ranks of a group do, or none: what one of them cannot do is an error on all."""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from lightning_cxl.errors import LightningCXLError

_T = TypeVar("_T")


def on_all_ranks(step: Callable[[], _T], group: Any = None) -> list[_T]:
    """Do a step on all ranks of a group, and return what it gives on each, in the order of the ranks.

    Whatever the step raises, and whatever it returns, this rank answers the others: they would wait for it.

    Args:
        step: what it returns is pickled. It exchanges nothing with other ranks: they would wait for a rank that fails.
        group: can exchange objects of the host; None is all ranks, also where this process is on its own.
    """
    if group is None and not dist.is_initialized():
        return [step()]
    error: BaseException | None = None
    try:
        mine = _Answer(pickle.dumps(step()))
    except BaseException as raised:
        error, mine = raised, _Answer.of(raised)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    try:
        if error is not None and not isinstance(error, LightningCXLError):
            raise error
        for rank, answer in enumerate(found):
            if answer.text is not None:
                raise answer.kind(f"rank {rank} of the group: {answer.text}") from error
    finally:
        error = None  # its traceback leads to this frame: what the step has made would stay until a collection
    return [pickle.loads(answer.result) for answer in found]


class _Answer(NamedTuple):
    """What a rank tells the others. Not every result or error can be sent: bytes and text can."""

    result: bytes = b""
    kind: type[LightningCXLError] = LightningCXLError
    text: str | None = None
    """Of the error; None where there is none."""

    @classmethod
    def of(cls, error: BaseException) -> "_Answer":
        if isinstance(error, LightningCXLError):
            return cls(kind=type(error), text=str(error))
        return cls(text=f"{type(error).__name__}: {error}")
