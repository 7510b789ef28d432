"""`Failure`: what ended one process of several, in words that other processes can show."""

import os
import socket
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_cxl.errors import LostRankError

_NUM_LINES = 16
_MAX_TEXT = 4096  # characters
_SIGNS = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
_FOLDER = str(Path(dist.__file__).parent)


class Cause(IntEnum):
    """How a rank failed. Where several fail together, the one with the lowest value explains the others."""

    ERROR = 0
    """An error of its own."""
    GONE = 1
    """Its process ended without an error of Python's, or its machine does not answer."""
    OTHERS = 2
    """An error in a collective: most likely another rank left it alone there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended a rank."""

    rank: int
    machine: str
    pid: int
    cause: Cause
    text: str
    """The end of the traceback, or a sentence."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "Failure":
        """Return the failure of this process by an error."""
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
        cause = Cause.OTHERS if is_in_collective(error) else Cause.ERROR
        return cls(rank, socket.gethostname(), os.getpid(), cause, "\n".join(lines[-_NUM_LINES:])[-_MAX_TEXT:])

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Failure":
        """Return what another process has written with `values`."""
        return cls(**{**values, "cause": Cause(values["cause"])})

    def values(self) -> dict[str, Any]:
        """Return what `read` takes, for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """Return what other ranks show of it; of an error of its own the last line says it again."""
        where = f"The first failure of this run was on rank {self.rank} (machine {self.machine}, process {self.pid})"
        is_own = self.cause is Cause.ERROR
        return f"{where}:\n{self.text}" + (
            f"\nRank {self.rank} failed first: {self.text.splitlines()[-1]}" if is_own else ""
        )


def is_in_collective(error: BaseException) -> bool:
    """Return whether an error comes from torch.distributed, as when another rank is gone, or from code of its own."""
    if isinstance(error, (dist.DistError, LostRankError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    of_torch = bool(frames) and frames[-1].filename.startswith(_FOLDER)
    return isinstance(error, RuntimeError) and (of_torch or any(sign in str(error) for sign in _SIGNS))


def first_of(failures: Iterable[Failure]) -> Failure:
    """Return the failure that explains the others, of some in the order in which they became known."""
    return min(failures, key=lambda failure: failure.cause)  # min takes the first of several that are equal
