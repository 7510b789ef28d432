"""Doubles for hardware: a transfer engine that is late, and host memory that reuses and poisons what dies."""

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lightning_cxl.streaming.unit_weights import UnitWeights
from lightning_cxl.transfer.engine import FinishedTransfer, Transfer, check_copy


class DelayedTransfer:
    """A copy that a worker reads late, and whose destination is poison until it is waited for.

    Args:
        number: counts the copies of an engine; an index into its `log`.
    """

    def __init__(
        self, source: torch.Tensor, destination: torch.Tensor, after: Sequence[Transfer], *, to_host: bool, number: int
    ) -> None:
        self.number = number
        self._source: torch.Tensor | None = source
        self._destination: torch.Tensor | None = destination
        self._after = after
        self._to_host = to_host
        self._staged: torch.Tensor | None = None
        self._read = threading.Event()
        self._lock = threading.Lock()
        poison(destination)

    def run(self) -> None:
        """Read the source (on the worker)."""
        for transfer in self._after:
            transfer.wait_host()
        with torch.no_grad():
            self._staged = self._source.clone(memory_format=torch.contiguous_format)
        self._source, self._after = None, ()
        self._read.set()

    def is_free(self) -> bool:
        """Return whether nothing has to be done before this one."""
        return all(transfer.done() for transfer in self._after)

    def wait(self) -> None:
        """From here on the source may change; only a copy to the device is also delivered to its reader."""
        self._read.wait()
        if not self._to_host:
            self._deliver()

    def wait_host(self) -> None:
        """Deliver."""
        self._read.wait()
        self._deliver()

    def done(self) -> bool:
        """Return whether the worker has read the source."""
        return self._read.is_set()

    def _deliver(self) -> None:
        with self._lock, torch.no_grad():
            if self._destination is not None:
                self._destination.copy_(self._staged)
            self._destination = self._staged = None


class JoinedTransfer:
    """Several copies as one."""

    def __init__(self, transfers):
        self._transfers = transfers

    def wait(self) -> None:
        for each in self._transfers:
            each.wait()

    def wait_host(self) -> None:
        for each in self._transfers:
            each.wait_host()

    def done(self) -> bool:
        return all(each.done() for each in self._transfers)


class DelayingEngine:
    """Copies in a worker thread, `delay_s` late; whoever forgets to wait sees NaN or an overwritten source.

    Args:
        delay_s: how long the worker sleeps before each copy.
        computes_on_host: False makes the CPU play a device with memory of its own.
    """

    device = torch.device("cpu")

    def __init__(self, delay_s: float = 0.002, *, computes_on_host: bool = True) -> None:
        self.computes_on_host = computes_on_host
        self.log: list[tuple[str, int]] = []  # direction and bytes of every started copy
        self._delay_s = delay_s
        self._jobs: queue.SimpleQueue[DelayedTransfer | None] = queue.SimpleQueue()
        self._started: weakref.WeakSet[DelayedTransfer] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._worker: threading.Thread | None = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def d2h(self, source, destination, *, after=None) -> DelayedTransfer:
        return self._start("d2h", source, destination, after)

    def d2h_all(self, copies, *, after=None) -> Transfer:
        return JoinedTransfer([self.d2h(source, destination, after=after) for source, destination in copies])

    def h2d(self, source, destination, *, after=None) -> DelayedTransfer:
        return self._start("h2d", source, destination, after)

    def mark(self) -> Transfer:
        return FinishedTransfer()

    def use_in_this_thread(self) -> None:
        pass

    def _start(self, direction, source, destination, after) -> DelayedTransfer:
        check_copy(source, destination, self.device, self.device)
        with self._lock:
            number = len(self.log)
            self.log.append((direction, source.numel() * source.element_size()))
            transfer = DelayedTransfer(
                source.detach(), destination.detach(), after or (), to_host=direction == "d2h", number=number
            )
            self._started.add(transfer)
            self._jobs.put(transfer)
        return transfer

    def _work(self) -> None:
        while (transfer := self._jobs.get()) is not None:
            time.sleep(self._delay_s)
            transfer.run()
            del transfer

    def synchronize(self) -> None:
        with self._lock:
            started = list(self._started)
        for transfer in started:
            transfer.wait_host()

    def close(self) -> None:
        self.synchronize()
        if self._worker is not None:
            self._jobs.put(None)
            self._worker.join()
            self._worker = None


class ReorderingEngine(DelayingEngine):
    """Copies that are in flight together finish in a random order, except that none finishes before its `after`.

    Whoever waits for the last of several copies, instead of each, or forgets `after`, sees NaN or an old value.

    Args:
        seed: of the order; the same copies, once they are in flight together, finish in the same order.
        delay_s: how long the worker lets copies gather before it picks the next one.
        computes_on_host: False makes the CPU play a device with memory of its own.
    """

    def __init__(self, seed: int, delay_s: float = 0.002, *, computes_on_host: bool = True) -> None:
        self.finished: list[int] = []  # indices into `log`
        self._random = random.Random(seed)
        super().__init__(delay_s, computes_on_host=computes_on_host)

    def _work(self) -> None:
        in_flight: list[DelayedTransfer | None] = []
        while self._gather(in_flight):
            transfer = in_flight.pop(self._pick(in_flight))
            transfer.run()
            self.finished.append(transfer.number)
            del transfer

    def _gather(self, in_flight: list[DelayedTransfer | None]) -> bool:
        """Add what has been started, waiting for the first; return whether there is anything but the end (None)."""
        if not in_flight:
            in_flight.append(self._jobs.get())
        time.sleep(self._delay_s)
        while not self._jobs.empty():
            in_flight.append(self._jobs.get())
        return in_flight[0] is not None

    def _pick(self, in_flight: list[DelayedTransfer | None]) -> int:
        """Return the index of any copy that waits for no other one."""
        free = [index for index, each in enumerate(in_flight) if each is not None and each.is_free()]
        return self._random.choice(free or [0])


def make_autograd_see_another_device(monkeypatch) -> None:
    """Let autograd forget the nodes of streamed parameters whenever they come and go, as if devices differed."""
    for name in ("enter", "leave"):
        monkeypatch.setattr(UnitWeights, name, _forgetting(getattr(UnitWeights, name)))


def _forgetting(exchange):
    def exchange_and_forget(unit, *args):
        for place in unit.places:
            data, other = place.parameter.data, torch.float64 if place.home.dtype == torch.float32 else torch.float32
            place.parameter.data = torch.empty_like(data, dtype=other)  # does what another device does
            place.parameter.data = data
        exchange(unit, *args)

    return exchange_and_forget


def poison(tensor: torch.Tensor) -> None:
    """Fill with what no computation survives."""
    with torch.no_grad():
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 1)


class _Chunk(np.ndarray):
    """Bytes that go back to their memory when the last tensor over them dies."""

    on_death: Callable[["_Chunk"], None] | None = None

    def __del__(self) -> None:
        if self.on_death is not None:
            self.on_death(self)


class _Bytes:
    def __init__(self, chunk: _Chunk) -> None:
        self._chunk = chunk

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(self._chunk).view(dtype)[: int(np.prod(shape))].view(tuple(shape))


class RecyclingMemory:
    """Host memory that overwrites what dies with NaN and hands it out again at once; `allocate` fits ActivationOffload.

    Args:
        limit_bytes: more than this at a time is a MemoryError.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.live_bytes = 0
        self.requests: list[tuple[int, str]] = []
        self._free: dict[int, list[np.ndarray]] = {}

    def allocate(self, nbytes: int, unit: str) -> _Bytes:
        self.requests.append((nbytes, unit))
        if self.limit_bytes is not None and self.live_bytes + nbytes > self.limit_bytes:
            raise MemoryError(f"{nbytes} bytes for {unit} on top of {self.live_bytes}")
        free = self._free.setdefault(nbytes, [])
        memory = free.pop() if free else _aligned(nbytes)
        chunk = memory.view(_Chunk)
        chunk.on_death = self._take_back
        self.live_bytes += nbytes
        return _Bytes(chunk)

    def _take_back(self, chunk: _Chunk) -> None:
        memory = chunk.view(np.ndarray)
        memory[:] = 0xFF  # NaN in every floating-point type
        self.live_bytes -= memory.nbytes
        self._free[memory.nbytes].append(memory)


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + 64, dtype=np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + nbytes]
