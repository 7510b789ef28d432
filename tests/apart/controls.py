"""What tests turn, and what they look at."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

_ops = torch.ops.apart
_KERNEL, _H2D, _D2H = 0, 1, 2  # the kinds of csrc/runtime/streams.h
_CAPACITY = 8 << 30
_NEVER, _BEFORE, _HALFWAY = 0, 1, 2  # its pauses
_BYTES = ("h2d_bytes", "d2h_bytes")
_COUNTERS = ("async_kernels", "sync_kernels", *_BYTES, "h2d_async", "d2h_async", "h2d_staged", "no_meta")


class HostUsage(NamedTuple):
    """Host memory that copies may use. All are 0 again when everything has been given back."""

    registrations: int
    registered_bytes: int
    pinned_blocks: int
    pinned_bytes: int
    waiting_blocks: int  # freed, but a copy still uses them


def set_delay(kernel: float = 0.0, h2d: float = 0.0, d2h: float = 0.0, copy: float | None = None) -> None:
    """Make every kernel and every copy take so many seconds longer; `copy` is for both directions."""
    if copy is not None:
        h2d = d2h = copy
    for kind, seconds in ((_KERNEL, kernel), (_H2D, h2d), (_D2H, d2h)):
        _ops.set_delay(kind, round(seconds * 1e6))


@contextlib.contextmanager
def paused(stream: torch.Stream) -> Iterator[None]:
    """Nothing that is queued on the stream starts inside."""
    _ops.pause(stream.device_index, stream.stream_id, _BEFORE)
    try:
        yield
    finally:
        _ops.pause(stream.device_index, stream.stream_id, _NEVER)


@contextlib.contextmanager
def halfway(stream: torch.Stream) -> Iterator[Callable[[], None]]:
    """Let the next kernel or copy of the stream start inside, and end only behind the block.

    Gives a function that waits until one is there.
    """
    _ops.pause(stream.device_index, stream.stream_id, _HALFWAY)
    try:
        yield lambda: _ops.wait_halfway(stream.device_index, stream.stream_id)
    finally:
        _ops.pause(stream.device_index, stream.stream_id, _NEVER)


def set_poison(yes: bool, *, when_taken: bool = False) -> None:
    """Fill memory with NaN when it is free: of the device, pinned memory of torch, and where a d2h is under way to.

    With `when_taken`, memory of the device when it is taken again, which is when a GPU's is overwritten. FSDP2 needs
    it: it gives gradients back whose stream first waits, at its next use, for who reads them.
    """
    _ops.set_poison((2 if when_taken else 1) if yes else 0)


def poison(tensor: torch.Tensor) -> None:
    """Fill the host memory of a tensor with NaN, as if it were freed; a violation while a copy uses it."""
    storage = tensor.untyped_storage()
    poison_host(storage.data_ptr(), storage.nbytes())


def poison_host(address: int, nbytes: int) -> None:
    """The same for a range of addresses."""
    _ops.poison_host(address, nbytes)


def set_capacity(nbytes: int, device: int = 0) -> None:
    """Set how much memory the device has."""
    _ops.set_capacity(device, nbytes)


def reset() -> None:
    """Put every switch back and forget violations."""
    set_delay()
    set_poison(False)
    for device in range(_ops.device_count()):
        set_capacity(_CAPACITY, device)
    clear_violations()


def counters() -> dict[str, int]:
    """Return what the host has asked of the devices since the process began: csrc/operators/counters.h."""
    return dict(zip(_COUNTERS, _ops.counters(), strict=True))


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


def host_usage() -> HostUsage:
    """Return what is registered and pinned now."""
    return HostUsage(*_ops.host_usage())


def empty_host_cache() -> None:
    """Give free pinned memory back to the system."""
    _ops.empty_host_cache()
