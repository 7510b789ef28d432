"""Devices: `CudaDevices`, what differs between kinds of them, and copies between a device and host memory.

Another kind that torch knows needs an object with the same methods; `register_device_type` adds it. Everything else
speaks to devices through `torch.accelerator`. No other module has copy streams and events.

[Note: Copies and streams]
Two copy streams, one per direction, so that neither direction waits for the other.

* Start. A copy begins after what `after` names. Without it, after everything that the caller's current stream has
  queued so far: the source of a `d2h` has been computed by then, and memory that the caching allocator handed out for
  the destination of an `h2d` is no longer read by kernels of its former owner. An event recorded behind the copy on
  its own stream says when it is done. Copies of one direction are done in the order in which they were started.
* Wait. `Transfer.wait` orders device work: kernels that the current stream queues from there on run after the copy, so
  they may read its destination and overwrite its source; the host does not block. `Transfer.wait_host` blocks the host,
  which may then read the destination. Until one of them, nobody may touch the destination or change the source.
* Alive, on the host: a pool would hand the memory out again while the copy still uses it. So the engine holds host
  tensors until the event has passed (`_in_flight`, looked through at the next copy and by `synchronize`).
* Alive, on the device: the engine holds the tensor until the event has passed. The caching allocator gives freed memory
  to the stream that it was allocated on, and only that stream's order makes reuse right. So where the caller knows that
  it was allocated on the current stream (`from_here`), the engine lets go of it as soon as this stream waits for the
  copy. FSDP2 with a replicated mesh calls hooks on another stream than the one that has allocated the gradients.
  ``record_stream`` would not do. It keeps the memory, but not the tensor: autograd adds in place into storage that has
  no other owner, while it is still read. And it gives memory back only when the host sees that the copy is done,
  so that a host that runs ahead takes new memory for every unit.
* Pageable host memory needs no other path. The driver stages it: an `h2d` has read its source when the call returns, a
  `d2h` blocks until it is done. Both are on the copy streams, so that the device goes on computing.
"""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from lightning_cxl import timing
from lightning_cxl.errors import PinnedMemoryError, UnsupportedError
from lightning_cxl.text import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class CudaDevices:
    """The operations that differ between kinds of devices, for CUDA."""

    name = "cuda"  # the type of ``torch.device``; AMD's torch answers to the same name

    def num_devices(self) -> int:
        """Return how many devices this process can use; 0 where torch or the machine has none."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def describe(self, index: int) -> tuple[str, int]:
        """Return the name of a device and its memory in bytes."""
        properties = torch.cuda.get_device_properties(index)
        return properties.name, properties.total_memory

    def is_integrated(self, index: int) -> bool:
        """Return whether a device computes in the memory of the host, such as GB10's."""
        return bool(torch.cuda.get_device_properties(index).is_integrated)

    def pci_address(self, index: int) -> str | None:
        """Return where a device is on the machine's PCI buses, as in ``"0000:dc:00.0"``; None where it is on none."""
        properties = torch.cuda.get_device_properties(index)
        # torch's annotations leave these out
        domain, bus, device = (int(getattr(properties, f"pci_{part}_id")) for part in ("domain", "bus", "device"))
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock ``[address, address + nbytes)`` and let the driver of every device copy from and to it directly."""
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:  # torch without CUDA, or no driver
            raise PinnedMemoryError(f"CUDA cannot be used: {error}") from error
        if code == 0:
            return
        # the failure also stays behind as the runtime's "last error": let a launch that does not matter report it
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise PinnedMemoryError(f"cudaHostRegister of {format_bytes(nbytes)} failed with CUDA error {code}")

    def unregister(self, address: int) -> None:
        """Undo `register`. Never raises: it runs while buffers die, when the driver may be gone already."""
        with contextlib.suppress(Exception):
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class DeviceInfo(NamedTuple):
    device: torch.device
    name: str
    memory_bytes: int


_known: dict[str, CudaDevices] = {"cuda": CudaDevices()}


def register_device_type(device_type: CudaDevices) -> None:
    _known[device_type.name] = device_type


def device_type_of(device: torch.device) -> CudaDevices:
    if device.type not in _known:
        names = ", ".join(f"`{name}`" for name in ("cpu", *_known))
        raise UnsupportedError(
            f"weights and activations cannot be offloaded from `{device}`: this version knows {names}. Lightning and "
            "Fabric have `accelerator=`, Accelerate and transformers `cpu=True` and `use_cpu=True`."
        )
    return _known[device.type]


def process_device_type() -> CudaDevices:
    """Return the kind of this process's accelerator; without one CUDA's, whose errors then say what is missing."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return _known.get("" if accelerator is None else accelerator.type, _known["cuda"])


def devices_apart() -> tuple[DeviceInfo, ...]:
    """Return the devices of this process that have memory of their own, none where torch or the machine has none."""
    return tuple(
        DeviceInfo(torch.device(kind.name, index), *kind.describe(index))
        for kind in _known.values()
        for index in range(kind.num_devices())
    )


_LONGEST_SLEEP_S = 1e-3

Copy = tuple[torch.Tensor, torch.Tensor]  # source and destination, of the same shape and dtype


class Transfer(Protocol):
    """One started copy, or several that are waited for as one. See [Note: Copies and streams]."""

    def wait(self) -> None:
        """Let device work queued from here on run after the copy; does not block the host where the device is apart."""

    def wait_host(self) -> None:
        """Block until the copy is done; the host may then read the destination."""

    def done(self) -> bool:
        """Return whether the copy is done, without waiting."""


After = Sequence[Transfer] | None  # transfers that must be done before a copy begins; see `TransferEngine.d2h`


class FinishedTransfer:
    def wait(self) -> None: ...

    def wait_host(self) -> None: ...

    def done(self) -> bool:
        return True


class TransferEngine:
    """Starts copies between host memory and one device."""

    device: torch.device
    computes_on_host: bool
    """Whether the device computes on host tensors directly, so that nothing has to be copied back to it."""

    def d2h(
        self, source: torch.Tensor, destination: torch.Tensor, *, after: After = None, from_here: bool = False
    ) -> Transfer:
        """Start copying a device tensor to a host tensor of the same shape and dtype, see [Note: Copies and streams].

        The source may be dropped, but not changed, before the transfer is waited for. The memory of both stays alive
        until the copy is done; that of a source that was allocated `from_here` until the current stream waits for it.
        """
        return self.d2h_all([(source, destination)], after=after, from_here=from_here)

    def d2h_all(self, copies: Sequence[Copy], *, after: After = None, from_here: bool = False) -> Transfer:
        """Start several `d2h` that are waited for as one."""
        raise NotImplementedError

    def h2d(self, source: torch.Tensor, destination: torch.Tensor, *, after: After = None) -> Transfer:
        """Start copying a host tensor to a device tensor that the current stream allocated or the caller keeps."""
        raise NotImplementedError

    def mark(self) -> Transfer:
        """Return what is done when the device work is that the calling thread has queued so far: for `after`."""
        return FinishedTransfer()

    def stall(self, total: timing.Total, name: str) -> AbstractContextManager[None]:
        """Return a region in which the host waits. Added to a total is how long the device has nothing to do then."""
        return timing.timed(total, name)

    def computing(self, name: str) -> AbstractContextManager[None]:
        """Return a region in which the device is given work, which profilers and the page about a run show by name."""
        return timing.named(name)

    def watch(self) -> None:
        """Note when the device computes and copies, from now on: `timing.last_step` has it."""

    def use_in_this_thread(self) -> None:
        """Make the device the calling thread's own, so that nothing it does touches another one."""

    def count_stalls(self) -> None:
        """Add stalls that have ended to their totals."""

    def synchronize(self) -> None:
        """Block until every copy started so far is done."""

    def close(self) -> None:
        """Finish all copies and let go of their buffers. Idempotent."""
        self.synchronize()


class HostEngine(TransferEngine):
    """The device is the CPU: a copy is done when the call returns."""

    device = torch.device("cpu")
    computes_on_host = True

    def d2h_all(self, copies: Sequence[Copy], *, after: After = None, from_here: bool = False) -> Transfer:
        for source, destination in copies:
            check_copy(source, destination, self.device, self.device)
            for transfer in after or ():
                transfer.wait_host()
            with torch.no_grad():
                destination.copy_(source)
        return FinishedTransfer()

    h2d = TransferEngine.d2h


class DeviceTransfer:
    """Copies on one of the engine's streams, done when their event has passed."""

    __slots__ = ("_from_here", "_on_device", "_on_host", "_origin", "event")

    def __init__(
        self,
        event: torch.Event,
        origin: torch.Stream,
        on_device: Sequence[torch.Tensor] = (),
        on_host: Sequence[torch.Tensor] = (),
        from_here: bool = False,
    ) -> None:
        self.event = event
        self._origin = origin
        self._from_here = from_here
        self._on_device = on_device
        self._on_host = on_host

    def wait(self) -> None:
        stream = torch.accelerator.current_stream(self._origin.device)
        stream.wait_event(self.event)
        if self._from_here and stream == self._origin:
            self._on_device = ()  # see [Note: Copies and streams], alive on the device

    def wait_host(self) -> None:
        # without taking a core from those who compute meanwhile
        start_s = time.monotonic()
        while not self.done():  # `Event.synchronize` would spin; sleeping for an eighth more than needed at most
            time.sleep(min(_LONGEST_SLEEP_S, max(2e-5, (time.monotonic() - start_s) / 8)))

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._on_device = self._on_host = ()
        return True


class DeviceEngine(TransferEngine):
    """Copies on two streams, one per direction, for a device with memory of its own. See [Note: Copies and streams]."""

    computes_on_host = False

    def __init__(self, device: torch.device) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or accelerator.type != device.type:
            raise UnsupportedError(f"torch {torch.__version__} has no `{device}` here, only `{accelerator or 'cpu'}`")
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._d2h_stream, self._h2d_stream = _copy_streams(self.device)
        self._in_flight: deque[DeviceTransfer] = deque()
        self._stalls: deque[tuple[timing.Total, torch.Event, torch.Event]] = deque()
        self._is_stalling = False
        self._watched: deque[tuple[str, str, torch.Event, torch.Event]] = deque(maxlen=8192)
        self._origin: tuple[torch.Event, float] | None = None  # and when it passed; None where nobody watches
        self._lock = threading.Lock()

    def d2h_all(self, copies: Sequence[Copy], *, after: After = None, from_here: bool = False) -> Transfer:
        for source, destination in copies:
            check_copy(source, destination, self.device, torch.device("cpu"))
        sources, destinations = [source for source, _ in copies], [destination for _, destination in copies]
        return self._start(self._d2h_stream, copies, sources, destinations, after, from_here)

    def h2d(self, source: torch.Tensor, destination: torch.Tensor, *, after: After = None) -> Transfer:
        check_copy(source, destination, torch.device("cpu"), self.device)
        return self._start(self._h2d_stream, [(source, destination)], [destination], [source], after, from_here=True)

    def mark(self) -> Transfer:
        stream = torch.accelerator.current_stream(self.device)
        return DeviceTransfer(stream.record_event(), stream)

    @contextmanager
    def stall(self, total: timing.Total, name: str) -> Iterator[None]:
        if self._is_stalling:
            yield
            return
        self._is_stalling = True
        try:  # the first event passes when the device has done all, the second one when the host goes on
            with self._between_events(current_stream(self.device), self._stalls, total), timing.named(name):
                yield
        finally:
            self._is_stalling = False

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        with timing.named(name), self._watching(current_stream(self.device), name, "device: computing"):
            yield

    def watch(self) -> None:
        if self._origin is None:
            origin = self._timed_event(current_stream(self.device))
            origin.synchronize()
            self._origin = origin, time.perf_counter()

    def _watching(self, stream: torch.Stream, name: str, lane: str) -> AbstractContextManager[None]:
        return nullcontext() if self._origin is None else self._between_events(stream, self._watched, name, lane)

    @contextmanager
    def _between_events(self, stream: torch.Stream, kept: deque[Any], *what: str) -> Iterator[None]:
        """Keep `what` this region is, with events of `stream` at its begin and its end."""
        begin = self._timed_event(stream)
        try:
            yield
        finally:
            end = self._timed_event(stream)
            with self._lock:
                kept.append((*what, begin, end))

    def _timed_event(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return event

    def use_in_this_thread(self) -> None:
        torch.accelerator.set_device_index(self.device.index)

    def _start(
        self,
        stream: torch.Stream,
        copies: Sequence[Copy],
        on_device: Sequence[torch.Tensor],
        on_host: Sequence[torch.Tensor],
        after: After,
        from_here: bool,
    ) -> Transfer:
        self._retire()
        nbytes = sum(each.nbytes for each in on_host)
        lane = "device: copies to it" if stream is self._h2d_stream else "device: copies to the host"
        timing.add("h2d_bytes" if stream is self._h2d_stream else "d2h_bytes", nbytes)
        origin = torch.accelerator.current_stream(self.device)
        if after is None:
            stream.wait_stream(origin)
        for transfer in after or ():
            if isinstance(transfer, DeviceTransfer):
                stream.wait_event(transfer.event)
        try:
            with (
                torch.no_grad(),
                torch.Stream(
                    stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
                ),  # an object of its own: it keeps what was current before, which is another stream for another thread
                self._watching(stream, f"copy of {nbytes / 1e6:,.1f} MB", lane),
            ):
                for source, destination in copies:
                    destination.copy_(source, non_blocking=True)
        finally:  # also for copies that have been started before one that fails
            transfer = DeviceTransfer(stream.record_event(), origin, on_device, on_host, from_here)
            with self._lock:
                self._in_flight.append(transfer)
        return transfer

    def count_stalls(self) -> None:
        with self._lock:
            ends = [end for _, _, end in self._stalls]
        for end in ends:
            end.synchronize()
        self._retire()

    def _retire(self) -> None:
        """Let go of the tensors of copies that are done, oldest first."""
        with self._lock:
            while self._in_flight and self._in_flight[0].done():
                self._in_flight.popleft()
            for total, begin, end in _passed(self._stalls):
                timing.add(total, begin.elapsed_time(end) / 1e3)
            for name, lane, begin, end in _passed(self._watched):
                assert self._origin is not None, "else nothing is watched"
                origin, at_s = self._origin
                begin_s, end_s = (at_s + origin.elapsed_time(each) / 1e3 for each in (begin, end))
                timing.note(timing.Span(name, lane, begin_s, end_s))
                if end_s - at_s > 1.0:  # milliseconds of events are float32
                    self._origin = end, end_s

    def synchronize(self) -> None:
        with self._lock:
            in_flight = list(self._in_flight)
        for transfer in in_flight:
            transfer.wait_host()
        self._retire()


def _passed(kept: deque[Any]) -> Iterator[Any]:
    """Take out those whose last event has passed, oldest first."""
    while kept and kept[0][-1].query():
        yield kept.popleft()


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that the calling thread queues work of a device apart on."""
    return torch.accelerator.current_stream(device)


@functools.cache
def _copy_streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """Return the streams of both directions: one pair a device for good, as torch never gives a stream back."""
    return torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)  # before what computes


def make_engine(device: torch.device | str) -> TransferEngine:
    device = torch.device(device)
    if device.type == "cpu":
        return HostEngine()
    device_type_of(device)
    return DeviceEngine(device)


def check_copy(
    source: torch.Tensor, destination: torch.Tensor, from_device: torch.device, to_device: torch.device
) -> None:
    """Refuse a copy that would convert, broadcast, or start on the wrong side."""
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
