"""What tests of storage share: memory with known bytes, written to records and read back."""

import os
import threading
import time
from pathlib import Path

import torch

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Mapping, Range
from lightning_cxl.storage.drive import System

BLOCK = 4096
BUDGET = 64 << 20
CHUNK = 4 * BLOCK


class Gate(System):
    """Lets reads and writes wait until they are let through, takes its time, or fails."""

    def __init__(self):
        self.is_open = threading.Event()
        self.is_open.set()
        self.fails = None  # "read", "write" or "both"; or what a write raises
        self.write_seconds = 0.0

    def preadv(self, fd, views, offset):
        self._pass("read")
        return super().preadv(fd, views, offset)

    def pwritev(self, fd, views, offset):
        time.sleep(self.write_seconds)
        self._pass("write")
        return super().pwritev(fd, views, offset)

    def _pass(self, what):
        assert self.is_open.wait(20)
        if self.fails in (what, "both"):
            raise OSError(5, "Input/output error")
        if isinstance(self.fails, BaseException) and what == "write":
            raise self.fails


def eventually(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def memory_of(nbytes):
    mapping = Mapping(nbytes)
    return Buffer(mapping.address, mapping.nbytes, (), None, mapping)


def fill(memory, seed):
    """Fill memory with bytes that no other seed gives; returns them."""
    contents = torch.randint(0, 256, (memory.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    memory.tensor((memory.nbytes,), torch.uint8).copy_(contents)
    return bytes(contents.numpy())


def bytes_of(memory):
    return bytes(memoryview(Range(memory.address, memory.nbytes, memory)))


def put(store, record, seed):
    memory = memory_of(record.padded_nbytes)
    contents = fill(memory, seed)
    store.write(record, memory).wait_host()
    return contents


def get(store, record):
    memory = memory_of(record.padded_nbytes)
    store.read(record, memory).wait_host()
    return bytes_of(memory)


class Fails(System):
    """Calls a function before each system call of a name, with the call's arguments; it may raise."""

    def __init__(self, name, function):
        call = getattr(self, name)
        setattr(self, name, lambda *args: (function(*args), call(*args))[1])


def folders(path, count=1):
    return [path / f"drive{index}" for index in range(count)]


def data_file(folder):
    """Return a path of the one data file in a folder that this process has open, also where that has no name."""
    begin = str(folder / "lightning_cxl-")
    return next(fd for fd in Path("/proc/self/fd").iterdir() if os.path.realpath(fd).startswith(begin))


def damage(folder, at=None):
    """Flip a bit at an offset of the one data file in a folder, or in every block, behind its store's back."""
    data = data_file(folder)
    with open(data, "r+b") as file:
        for offset in range(256 << 10, data.stat().st_size, BLOCK) if at is None else [at]:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())
