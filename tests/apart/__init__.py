"""A device that is apart, played by the CPU: what a test needs of a GPU where there is none. See README.md."""

import atexit
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tests.apart import build, device_module

_ops = torch.ops.apart
KINDS = ("kernel", "h2d", "d2h")  # of csrc/runtime/streams.h
CAPACITY = 8 << 30
NEVER, BEFORE, HALFWAY = 0, 1, 2  # its pauses
_BYTES = ("h2d_bytes", "d2h_bytes")
COUNTERS = ("async_kernels", "sync_kernels", *_BYTES, "h2d_async", "d2h_async", "h2d_staged", "no_meta")
why_unavailable = build.why_unavailable


@functools.cache
def load() -> None:
    """Build the device if need be, and register it: ``torch.device("apart")`` is there in this process, for good."""
    if why := why_unavailable():
        raise RuntimeError(why)
    torch.ops.load_library(build.library())
    torch.utils.rename_privateuse1_backend("apart")
    torch._register_device_module("apart", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _ops.init()
    atexit.register(_finish)


def _finish() -> None:
    """Let all streams end their work before the interpreter goes; nobody is there to hear of errors."""
    if not _ops.is_forked():
        with contextlib.suppress(Exception):
            synchronize()


def synchronize() -> None:
    for index in range(_ops.device_count()):
        torch.accelerator.synchronize(index)


def set_delay(kernel: float = 0.0, h2d: float = 0.0, d2h: float = 0.0) -> None:
    """Make every kernel and every copy take so many seconds longer."""
    for kind, seconds in enumerate((kernel, h2d, d2h)):
        _ops.set_delay(kind, round(seconds * 1e6))


@contextlib.contextmanager
def paused(stream: torch.Stream, how: int = BEFORE) -> Iterator[None]:
    """Nothing that is queued on the stream starts inside."""
    _ops.pause(stream.device_index, stream.stream_id, how)
    try:
        yield
    finally:
        _ops.pause(stream.device_index, stream.stream_id, NEVER)


@contextlib.contextmanager
def halfway(stream: torch.Stream) -> Iterator[Callable[[], None]]:
    """Let the next kernel or copy of the stream start inside, and end only behind the block.

    Gives a function that waits until one is there.
    """
    with paused(stream, HALFWAY):
        yield lambda: _ops.wait_halfway(stream.device_index, stream.stream_id)


def set_poison(yes: bool, *, when_taken: bool = False) -> None:
    """Fill memory with NaN when it is free: of the device, pinned memory of torch, and where a d2h is under way to.

    With `when_taken`, memory of the device when it is taken again, which is when a GPU's is overwritten. FSDP2 needs
    it: it gives gradients back whose stream first waits, at its next use, for who reads them.
    """
    _ops.set_poison((2 if when_taken else 1) if yes else 0)


def set_capacity(nbytes: int, device: int = 0) -> None:
    _ops.set_capacity(device, nbytes)


def reset() -> None:
    """Put every switch back and forget violations."""
    set_delay()
    set_poison(False)
    for device in range(_ops.device_count()):
        set_capacity(CAPACITY, device)
    clear_violations()


class HostUsage(NamedTuple):
    """Host memory that copies may use. All are 0 again when everything has been given back."""

    registrations: int
    registered_bytes: int
    pinned_blocks: int
    pinned_bytes: int
    waiting_blocks: int  # freed, but a copy still uses them


def host_usage() -> HostUsage:
    return HostUsage(*_ops.host_usage())


def counters() -> dict[str, int]:
    """Return what the host has asked of the devices since the process began: csrc/operators/counters.h."""
    return dict(zip(COUNTERS, _ops.counters(), strict=True))


def violations() -> list[str]:
    """Return the races that were seen, one text each: [Note: Watched copies] in csrc/runtime/transfers.h."""
    return _ops.violations()


def clear_violations() -> list[str]:
    """Return them, and forget them."""
    return _ops.take_violations()


def host_register(address: int, nbytes: int) -> int:
    """Make host memory known to the device; return cudaHostRegister's code: 0, 1 (invalid value), 712 (already is)."""
    return _ops.host_register(address, nbytes)


def host_unregister(address: int) -> int:
    """Take it back; return cudaHostUnregister's code: 0 or 713 (is not)."""
    return _ops.host_unregister(address)


class Entry(NamedTuple):
    """A kernel or a copy. Times are seconds of ``time.perf_counter()``; its delay lies within start and end."""

    device: int
    stream: int
    kind: str  # one of `KINDS`; a copy within the device is a kernel
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
    synchronize()
    _ops.take_timeline()
    _ops.listen(True)
    try:
        yield entries
        synchronize()
    finally:
        _ops.listen(False)
        names, numbers, times = _ops.take_timeline()
        for i, name in enumerate(names):
            device, stream, kind, nbytes = numbers[4 * i : 4 * i + 4]
            entries.append(Entry(device, stream, KINDS[kind], name, nbytes, *times[3 * i : 3 * i + 3]))
        entries.sort(key=lambda entry: entry.start)


def overlap(one: Entry, other: Entry) -> float:
    """Return for how many seconds both ran at the same time."""
    return max(0.0, min(one.end, other.end) - max(one.start, other.start))
