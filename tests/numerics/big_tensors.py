"""Tensors of billions of elements in little memory: a small file mapped again and again, with own pages in places."""

import ctypes
import mmap
import os

import torch

PAGE = mmap.PAGESIZE
FILE_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _NO_ACCESS = 0x10, 0


class BigMemory:
    """A range of addresses that is zero, all of it the same few pages: what is written to one place shows at others.

    `window` gives places memory of their own. For kernels that leave zeros as they are.
    """

    def __init__(self, num_bytes: int) -> None:
        self.size = -(-num_bytes // FILE_BYTES) * FILE_BYTES
        self._file = os.memfd_create("big")
        os.ftruncate(self._file, FILE_BYTES)
        self.address = self._map(0, self.size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        for offset in range(0, self.size, FILE_BYTES):
            self._map(self.address + offset, FILE_BYTES, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._file)

    def window(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Give the pages that hold this range memory of their own, zero, and return the range as a tensor."""
        start, stop = offset // PAGE * PAGE, -(-(offset + num_bytes) // PAGE) * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        self._map(self.address + start, stop - start, _READ_WRITE, flags, -1)
        buffer = (ctypes.c_uint8 * num_bytes).from_address(self.address + offset)
        return torch.frombuffer(buffer, dtype=dtype)

    def free(self) -> None:
        """Unmap; no window may be used any more."""
        _libc.munmap(self.address, self.size)
        os.close(self._file)

    @staticmethod
    def _map(address: int, size: int, protection: int, flags: int, file: int) -> int:
        result = _libc.mmap(address, size, protection, flags, file, 0)
        if result == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"cannot map {size} bytes")
        return int(result)


_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
