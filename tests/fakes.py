"""Doubles: host memory that reuses and poisons what dies, and engines that note what they copy."""

import weakref

import numpy as np
import torch

from lightning_cxl.devices import DeviceEngine
from lightning_cxl.machine import topology
from lightning_cxl.machine.topology import Node, Topology
from lightning_cxl.text import parse_bytes
from tests import training_device


class LoggingDeviceEngine(DeviceEngine):
    """The device's engine, and direction and bytes of every copy that it has started."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log: list[tuple[str, int]] = []

    def d2h(self, source, destination, **options):
        self.log.append(("d2h", source.nbytes))
        return super().d2h(source, destination, **options)

    def h2d(self, source, destination, *, after=None):
        self.log.append(("h2d", source.nbytes))
        return super().h2d(source, destination, after=after)


class _Bytes:
    def __init__(self, chunk):
        self._chunk = chunk

    def tensor(self, shape, dtype):
        return torch.from_numpy(self._chunk).view(dtype)[: int(np.prod(shape))].view(tuple(shape))


class RecyclingMemory:
    """Host memory that overwrites what dies with NaN and hands it out again at once; `allocate` fits ActivationOffload.

    Page-locked where the test has a device.

    Args:
        limit_bytes: more than this at a time is a MemoryError.
    """

    def __init__(self, limit_bytes=None):
        self.limit_bytes = limit_bytes
        self.live_bytes = self.peak_bytes = self.num_live = 0
        self.requests: list[tuple[int, str]] = []
        self._free: dict[int, list[np.ndarray]] = {}

    def allocate(self, nbytes, unit):
        self.requests.append((nbytes, unit))
        if self.limit_bytes is not None and self.live_bytes + nbytes > self.limit_bytes:
            raise MemoryError(f"{nbytes} bytes for {unit} on top of {self.live_bytes}")
        free = self._free.setdefault(nbytes, [])
        memory = free.pop() if free else _aligned(nbytes)
        chunk = memory[:]  # dies with the last tensor over it
        weakref.finalize(chunk, self._take_back, memory).atexit = False
        self.live_bytes += nbytes
        self.num_live += 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return _Bytes(chunk)

    def _take_back(self, memory):
        memory[:] = 0xFF  # NaN in every floating-point type
        self.live_bytes -= memory.nbytes
        self.num_live -= 1
        self._free[memory.nbytes].append(memory)


def _aligned(nbytes):
    pinned = training_device.current.type != "cpu"
    raw = torch.empty(nbytes + 64, dtype=torch.uint8, device="cpu", pin_memory=pinned).numpy()
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + nbytes]


def fake_topology(dram=("64GiB",), cxl=("256GiB", "256GiB")):
    """Return a machine with one node per size, ids in order."""
    sizes = [(True, size) for size in dram] + [(False, size) for size in cxl]
    nodes = [Node(node, cpus, parse_bytes(size), 10 if cpus else 24) for node, (cpus, size) in enumerate(sizes)]
    return Topology(topology._group(nodes), backs_cxl=True)


def failing(monkeypatch, owner, name, number, error):
    """Let the call with this number fail: a function of a module or a method of a class."""
    function, calls = getattr(owner, name), []

    def fail(*args):
        calls.append(args)
        if len(calls) == number:
            raise error
        return function(*args)

    monkeypatch.setattr(owner, name, fail)
