"""Whether somebody has written to a window: the kernel has made private pages of what was written."""

import mmap
import os

import torch

from lightning_cxl.errors import StorageError

_PAGEMAP = "/proc/self/pagemap"
_ENTRY_BYTES = 8
_FLAGS_SHIFT = 61  # of an entry: bit 61 says "of a file", 62 "swapped", 63 "present"
_CHUNK_ENTRIES = 2**17


def has_private_pages(address: int, nbytes: int) -> bool:
    """Return whether pages of a private mapping of a file are no longer those of the file."""
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    try:
        fd = os.open(_PAGEMAP, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in range(first, last, _CHUNK_ENTRIES):
                count = min(_CHUNK_ENTRIES, last - start)
                entries = os.pread(fd, count * _ENTRY_BYTES, start * _ENTRY_BYTES)
                if len(entries) != count * _ENTRY_BYTES:
                    raise OSError(0, f"{len(entries)} bytes came instead of {count * _ENTRY_BYTES}")
                if _some_private(entries):
                    return True
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(
            f"`{_PAGEMAP}` does not say which pages were written to: {error.strerror}. Weights on tier `ssd` need it; "
            "keep weights in memory here",
            errno=error.errno,
        ) from None
    return False


def _some_private(entries: bytes) -> bool:
    flags = (torch.frombuffer(bytearray(entries), dtype=torch.int64) >> _FLAGS_SHIFT) & 7
    return bool(((flags != 0) & (flags & 1 == 0)).any())
