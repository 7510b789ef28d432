"""What ran when."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

_ops = torch.ops.apart
_KINDS = ("kernel", "h2d", "d2h")  # of csrc/runtime/streams.h


class Entry(NamedTuple):
    """A kernel or a copy. Times are seconds of ``time.perf_counter()``; its delay lies within start and end."""

    device: int
    stream: int
    kind: str  # "kernel", "h2d" or "d2h"; a copy within the device is a kernel
    name: str
    nbytes: int
    queued: float
    start: float
    end: float


@contextlib.contextmanager
def timeline() -> Iterator[list[Entry]]:
    """Give a list that holds, after the block, what ran in it, by start; all devices are waited for at both ends.

    Only one at a time.
    """
    entries: list[Entry] = []
    _synchronize()
    _ops.take_timeline()
    _ops.listen(True)
    try:
        yield entries
        _synchronize()
    finally:
        _ops.listen(False)
        entries += sorted(_read(), key=lambda entry: entry.start)


def overlap(one: Entry, other: Entry) -> float:
    """Return for how many seconds both ran at the same time."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))


def _synchronize() -> None:
    for index in range(_ops.device_count()):
        torch.accelerator.synchronize(index)


def _read() -> Iterator[Entry]:
    names, numbers, times = _ops.take_timeline()
    for i, name in enumerate(names):
        device, stream, kind, nbytes = numbers[4 * i : 4 * i + 4]
        yield Entry(device, stream, _KINDS[kind], name, nbytes, *times[3 * i : 3 * i + 3])
