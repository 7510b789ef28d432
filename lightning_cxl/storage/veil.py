"""`Veil`: what windows show in the place of encrypted bytes: every byte is 0xFF, which no number is."""

import os

from lightning_cxl.errors import StorageError
from lightning_cxl.native._numa import Mapping
from lightning_cxl.storage.drive import BLOCK_BYTES

_MAPPED_PIECES = 2**13  # of all windows together, beside one for each; the kernel allows 65,530 ranges of addresses
_LEAST_BYTES = 2**21
_NOT_A_NUMBER = b"\xff"


class Veil:
    """A small file in memory that covers ranges of addresses of any size: it is mapped again and again.

    Not thread-safe.

    Args:
        most_bytes: that all ranges have together. The file has at most a 8192nd of it, and at least 2 MiB, and never
            more than the largest range needs.
    """

    def __init__(self, most_bytes: int) -> None:
        self._piece_nbytes = max(_LEAST_BYTES, -(-most_bytes // (_MAPPED_PIECES * BLOCK_BYTES)) * BLOCK_BYTES)
        self._nbytes = 0
        self._fd = -1

    def cover(self, mapping: Mapping) -> None:
        """Let a mapping show 0xFF throughout; private pages are dropped.

        Raises:
            StorageError: the kernel has no memory for it; a part may then read as zeros.
        """
        try:
            self._grow(min(mapping.nbytes, self._piece_nbytes))
            for start in range(0, mapping.nbytes, self._nbytes):
                mapping.show(start, min(self._nbytes, mapping.nbytes - start), self._fd, 0)
        except OSError as error:
            raise StorageError(
                f"cannot cover {mapping.nbytes} bytes of encrypted state: {error.strerror}", errno=error.errno
            ) from None

    def _grow(self, nbytes: int) -> None:
        if self._fd < 0:
            self._fd = os.memfd_create("lightning_cxl veil")
        while self._nbytes < nbytes:
            step = _NOT_A_NUMBER * min(_LEAST_BYTES, nbytes - self._nbytes)
            self._nbytes += os.pwrite(self._fd, step, self._nbytes)

    def close(self) -> None:
        """Close the file; what it covers stays covered. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
