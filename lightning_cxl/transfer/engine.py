"""Copies between the device and host memory: the only owner of copy streams and events.

[Note: Copies and streams]
Two copy streams, one per direction, so that neither direction waits for the other.

* Start. A copy begins after everything that the caller's current stream has queued so far: the source of a `d2h` has
  been computed by then, and memory that the caching allocator handed out for the destination of an `h2d` is no longer
  read by kernels of its former owner. An event recorded behind the copy on its own stream says when it is done.
* Wait. `Transfer.wait` orders device work: kernels that the current stream queues from there on run after the copy, so
  they may read its destination and overwrite its source; the host does not block. `Transfer.wait_host` blocks the host,
  which may then read the destination. Until one of them, nobody may touch the destination or change the source.
* Alive. Device tensors: `record_stream` makes the caching allocator hold their memory back until the copy is done, so
  the caller may drop them at once. Host tensors: their memory is not the caching allocator's, and a pool would hand
  it out again while the copy engine still uses it, so the engine holds them until the event has passed (`_in_flight`,
  drained at the next copy and by `synchronize`).
* Pageable host memory cannot be copied asynchronously without tearing; such a copy blocks and is done when it returns.
"""

from collections import deque
from typing import NamedTuple, Protocol

import torch

from lightning_cxl.errors import UnsupportedError


class Transfer(Protocol):
    """One started copy. See [Note: Copies and streams]."""

    def wait(self) -> None:
        """Let device work queued from here on run after the copy; does not block the host where the device is apart."""

    def wait_host(self) -> None:
        """Block until the copy is done; the host may then read the destination."""

    def done(self) -> bool:
        """Return whether the copy is done, without waiting."""


class TransferEngine(Protocol):
    """Starts copies between host memory and one device."""

    @property
    def device(self) -> torch.device:
        """The device whose memory is copied from and to."""

    @property
    def computes_on_host(self) -> bool:
        """Whether the device computes on host tensors directly, so that nothing has to be copied back to it."""

    def d2h(self, source: torch.Tensor, destination: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Start copying a device tensor to a host tensor of the same shape and dtype.

        Args:
            source: may be dropped, but not changed, before the transfer is waited for.
            destination: its memory stays alive until the copy is done, whether or not the caller keeps it.
            after: a transfer of this engine that must be done first; the host does not wait for it.

        Raises:
            ValueError: shapes or dtypes differ, or a tensor is on the wrong side.
        """

    def h2d(self, source: torch.Tensor, destination: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Start copying a host tensor to a device tensor; as `d2h`, with the sides exchanged."""

    def mark(self) -> Transfer:
        """Return what is done when the device work is that the calling thread has queued so far.

        For the `after` of a copy that another thread starts, whose own stream may be another one.
        """

    def synchronize(self) -> None:
        """Block until every copy started so far is done."""

    def close(self) -> None:
        """Finish all copies and let go of their buffers. Idempotent."""


class FinishedTransfer:
    """A copy that was done when it returned."""

    def wait(self) -> None:
        """Return at once."""

    def wait_host(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


class HostEngine:
    """The device is the CPU: a copy is done when the call returns."""

    device = torch.device("cpu")
    computes_on_host = True

    def d2h(self, source: torch.Tensor, destination: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Copy now; see `TransferEngine.d2h`."""
        check_copy(source, destination, self.device, self.device)
        if after is not None:
            after.wait_host()
        with torch.no_grad():
            destination.copy_(source)
        return FinishedTransfer()

    h2d = d2h

    def mark(self) -> Transfer:
        """Return something done: what the CPU computes is done when the call returns."""
        return FinishedTransfer()

    def synchronize(self) -> None:
        """Return at once: nothing is ever in flight."""

    def close(self) -> None:
        """Return at once: nothing is held."""


class CudaTransfer:
    """A copy on one of the engine's streams; done when its event has passed."""

    __slots__ = ("_device", "event")

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event = event
        self._device = device

    def wait(self) -> None:
        """Make the current stream wait for the copy."""
        torch.cuda.current_stream(self._device).wait_event(self.event)

    def wait_host(self) -> None:
        """Block the host until the copy is done."""
        self.event.synchronize()

    def done(self) -> bool:
        """Return whether the event has passed."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class CudaEngine:
    """Copies on two streams of its own, one per direction. See [Note: Copies and streams].

    Args:
        device: a CUDA device; without an index, the current one.
    """

    computes_on_host = False

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._d2h_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._h2d_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._in_flight: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()  # host tensors a copy engine still uses

    def d2h(self, source: torch.Tensor, destination: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Start copying to the host; see `TransferEngine.d2h`."""
        check_copy(source, destination, self.device, torch.device("cpu"))
        return self._start(self._d2h_stream, source, destination, source, destination, after)

    def h2d(self, source: torch.Tensor, destination: torch.Tensor, *, after: Transfer | None = None) -> Transfer:
        """Start copying to the device; see `TransferEngine.h2d`."""
        check_copy(source, destination, torch.device("cpu"), self.device)
        return self._start(self._h2d_stream, source, destination, destination, source, after)

    def mark(self) -> Transfer:
        """Record an event on the current stream."""
        return CudaTransfer(torch.cuda.current_stream(self.device).record_event(), self.device)

    def _start(
        self,
        stream: torch.cuda.Stream,
        source: torch.Tensor,
        destination: torch.Tensor,
        on_device: torch.Tensor,
        on_host: torch.Tensor,
        after: Transfer | None,
    ) -> Transfer:
        self._retire()
        if not on_host.is_pinned():
            if after is not None:
                after.wait_host()
            with torch.no_grad():
                destination.copy_(source)
            return FinishedTransfer()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if isinstance(after, CudaTransfer):
            stream.wait_event(after.event)
        with torch.no_grad(), torch.cuda.stream(stream):
            destination.copy_(source, non_blocking=True)
        on_device.record_stream(stream)
        event = stream.record_event()
        self._in_flight.append((event, on_host))
        return CudaTransfer(event, self.device)

    def _retire(self) -> None:
        """Let go of host tensors whose copies are done, oldest first. Safe from several threads."""
        while self._in_flight:
            try:
                entry = self._in_flight.popleft()
            except IndexError:  # another thread was faster
                return
            if not entry[0].query():  # type: ignore[no-untyped-call]
                self._in_flight.appendleft(entry)
                return

    def synchronize(self) -> None:
        """Block until both streams are idle."""
        self._d2h_stream.synchronize()
        self._h2d_stream.synchronize()
        self._retire()

    def close(self) -> None:
        """Finish all copies and let go of their host tensors."""
        self.synchronize()


class DeviceInfo(NamedTuple):
    """A device that there is an engine for, besides the CPU."""

    device: torch.device
    name: str
    memory_bytes: int


def cuda_devices() -> tuple[DeviceInfo, ...]:
    """Return the CUDA devices of this process, none when torch or the machine has none."""
    if not torch.cuda.is_available():
        return ()
    found = [(index, torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    return tuple(DeviceInfo(torch.device("cuda", index), each.name, each.total_memory) for index, each in found)


def make_engine(device: torch.device | str) -> TransferEngine:
    """Return the engine for `device`.

    Raises:
        UnsupportedError: a device type without an engine.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return HostEngine()
    if device.type == "cuda":
        return CudaEngine(device)
    raise UnsupportedError(
        f"there is no transfer engine for `{device}`: this version offloads from `cuda` and `cpu` devices. "
        'Use `Trainer(accelerator="cpu")` or a CUDA device.'
    )


def check_copy(
    source: torch.Tensor, destination: torch.Tensor, from_device: torch.device, to_device: torch.device
) -> None:
    """Refuse a copy that would convert, broadcast, or start on the wrong side.

    Raises:
        ValueError: naming what differs.
    """
    if source.shape != destination.shape or source.dtype != destination.dtype:
        raise ValueError(
            f"a transfer copies between tensors of the same shape and dtype, got {tuple(source.shape)} {source.dtype} "
            f"to {tuple(destination.shape)} {destination.dtype}: convert on one side first"
        )
    if source.device != from_device or destination.device != to_device:
        raise ValueError(
            f"this transfer goes from `{from_device}` to `{to_device}`, got tensors on `{source.device}` and "
            f"`{destination.device}`"
        )
