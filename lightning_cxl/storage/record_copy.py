"""`RecordCopy`: bytes of records become bytes of another file, shared where the filesystem can."""

import errno
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.native._numa import Range
from lightning_cxl.storage.drive import BLOCK_BYTES, Drive
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.system import System

log = logging.getLogger(__name__)


class RecordCopy:
    """Puts parts of records into one file.

    Whole blocks are shared with the record's drive (a reflink) if both lie on one filesystem that can do that. Else
    they are written past the page cache. What does not begin at a block goes through the page cache.

    Args:
        file: open for writing, buffered.
        path: of the file.
        system: makes the system calls.
    """

    def __init__(self, file: BinaryIO, path: Path, system: System | None = None) -> None:
        self.shared_bytes = 0
        """How much of the file takes no space of its own yet."""
        self._file = file
        self._system = system or System()
        self._refuse: set[Drive] = set()  # to share
        self._checksums = ThreadPoolExecutor(1)  # a checksum takes as long as the write beside it
        self._fd = -1
        try:
            self._fd = self._system.open(path, os.O_WRONLY | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            log.debug("`%s` goes through the page cache: the filesystem refuses O_DIRECT", path)

    def put(self, record: Record, memory: Buffer, start: int, nbytes: int, at: int) -> int:
        """Put a part of a record's present bytes into the file, which is then to be written on behind them.

        Args:
            record: nobody writes it meanwhile.
            memory: has these bytes, of the whole record.
            start: of the part, in the record.
            nbytes: of the part.
            at: where it begins in the file.

        Returns:
            The part's CRC-32.

        Raises:
            OSError: the file cannot be written.
        """
        view = memoryview(Range(memory.address + start, nbytes, memory))
        checksum = self._checksums.submit(zlib.crc32, view)
        try:
            done = 0
            for drive, offset, length in record.extents(start, nbytes):
                self._put(view[done : done + length], memory.address + start + done, drive, offset, at + done)
                done += length
            self._file.seek(at + nbytes)
        finally:
            value = checksum.result()  # it reads the memory
        return value

    def _put(self, view: memoryview, address: int, drive: Drive | None, offset: int, at: int) -> None:
        done = 0
        if at % BLOCK_BYTES == 0:
            whole = view.nbytes // BLOCK_BYTES * BLOCK_BYTES
            if self._share(drive, offset, whole, at):
                done = whole
            elif address % BLOCK_BYTES == 0:
                done = self._write_directly(view[:whole], at)
        if done < view.nbytes:
            self._file.seek(at + done)
            self._file.write(view[done:])

    def _share(self, drive: Drive | None, offset: int, nbytes: int, at: int) -> bool:
        """Return whether blocks of the drive are now blocks of the file, too."""
        if drive is None or drive in self._refuse or not nbytes or offset % BLOCK_BYTES:
            return False
        try:
            # the next write to the record takes the space that a copy would have taken now
            if self._system.free(self._file.fileno()) < self.shared_bytes + nbytes:
                return False
            self._system.share(drive.fd, offset, nbytes, self._file.fileno(), at)
        except OSError as error:  # another filesystem, or one that cannot; where the disk fails, the copy says so
            log.debug("`%s` shares nothing with `%s`: %s", drive.path, self._file.name, error)
            self._refuse.add(drive)
            return False
        self.shared_bytes += nbytes
        return True

    def _write_directly(self, view: memoryview, at: int) -> int:
        """Write past the page cache; return how many bytes were written before the filesystem refused that."""
        done = 0
        while self._fd >= 0 and done < view.nbytes:
            try:
                count = self._system.pwritev(self._fd, [view[done:]], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._close_file()
                break
            if count <= 0:
                raise OSError(errno.EIO, "no byte was written")
            done += count
        return done

    def close(self) -> None:
        """Close what was opened; the file stays open. Idempotent."""
        self._checksums.shutdown()
        self._close_file()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._system.close(fd)
