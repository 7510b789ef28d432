"""What the SSD benchmark times: this package's storage, fio, and a plain loop, all over the same bytes of one file."""

import ctypes
import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_cxl.errors import LightningCXLError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.drive import Drive, Engine, Piece, System
from ssd_bench import fio
from ssd_bench.disk_area import DiskArea
from ssd_bench.fio import Pass

OURS, ALONE, LOOP = "lightning_cxl", "lightning_cxl, tensor by tensor", "plain loop"
_TRIALS = 2
_UNIT_BYTES = 64 << 20
"""Tensors of one unit are read and written as one."""


@dataclass(frozen=True)
class Job:
    """What is read or written in one pass: tensors of one size that follow each other in a file."""

    area: DiskArea
    tensor_bytes: int
    """Whole blocks."""

    @property
    def nbytes(self) -> int:
        """Of all tensors: as many as have room in the area."""
        return self.area.nbytes // self.tensor_bytes * self.tensor_bytes

    def parts(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield offset and size of parts of so many bytes, the last one smaller."""
        for offset in range(0, self.nbytes, nbytes):
            yield offset, min(nbytes, self.nbytes - offset)


@dataclass(frozen=True)
class DiskContender:
    """Something that goes over all bytes of a job."""

    name: str
    go: Callable[[], Pass]


def clocked(job: Job, run: Callable[[], object], *, writes: bool) -> Pass:
    """Return what a pass took that runs in this process; a write counts when it is on the disk."""
    cpu_seconds, seconds = time.process_time(), time.perf_counter()
    run()
    if writes:
        os.fsync(job.area.fd)
    return Pass(time.perf_counter() - seconds, time.process_time() - cpu_seconds)


def plain_loop(job: Job, *, writes: bool) -> DiskContender:
    """Return a loop of one thread that reads or writes tensor after tensor, each with one system call."""

    def run() -> None:
        call = os.pwritev if writes else os.preadv
        with memoryview(job.area.memory) as memory:
            for offset, nbytes in job.parts(job.tensor_bytes):
                with memory[offset : offset + nbytes] as view:
                    done = call(job.area.fd, [view], offset)
                if done != nbytes:
                    raise OSError(errno.EIO, f"{done} of {nbytes} bytes at {offset}")

    return DiskContender(LOOP, lambda: clocked(job, run, writes=writes))


def fio_contenders(job: Job, *, writes: bool) -> Iterator[DiskContender]:
    """Yield fio with each of its engines that works here, with the setting that is fastest; to find it takes passes."""
    for engine in fio.ENGINES:

        def contender(setting: fio.Setting) -> DiskContender:
            return DiskContender(str(setting), lambda: fio.run(job.area, job.nbytes, setting, writes=writes))

        try:
            yield fastest([contender(setting) for setting in fio.settings(engine, job.tensor_bytes)])
        except LightningCXLError as error:
            print(f"skipped: {error}")


def fastest(contenders: Sequence[DiskContender]) -> DiskContender:
    """Return the one with the fastest pass, of two passes of each in random order."""
    best = [float("inf")] * len(contenders)
    order = random.Random(0)
    for _ in range(_TRIALS):
        for index in order.sample(range(len(contenders)), len(contenders)):
            best[index] = min(best[index], contenders[index].go().seconds)
    return contenders[best.index(min(best))]


@contextmanager
def our_engine(area: DiskArea) -> Iterator[Engine]:
    """Open the area for this package's storage."""
    drive = Drive(area.path, System(), make=False)
    try:
        engine = Engine([drive])
        try:
            yield engine
        finally:
            engine.close()
    finally:
        drive.close()


def our_contenders(job: Job, engine: Engine, *, writes: bool) -> Iterator[DiskContender]:
    """Yield this package's storage: small tensors in units, as a run has them; and each by itself, which a run avoids.

    Both compute the checksums that a run computes.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(job.area.memory))
    whole = Buffer(address, job.area.nbytes, (), None, job.area.memory)
    start = engine.write if writes else engine.read

    def contender(name: str, part_bytes: int) -> DiskContender:
        pieces = [Piece(0, offset, whole.slice(offset, nbytes)) for offset, nbytes in job.parts(part_bytes)]

        def run() -> None:
            for transfer in [start([piece]) for piece in pieces]:
                transfer.wait_host()

        return DiskContender(name, lambda: clocked(job, run, writes=writes))

    unit_bytes = max(job.tensor_bytes, _UNIT_BYTES // job.tensor_bytes * job.tensor_bytes)
    yield contender(OURS, unit_bytes)
    if job.tensor_bytes < _UNIT_BYTES:
        yield contender(ALONE, job.tensor_bytes)
