"""How resources that keep memory take the bytes of dead buffers back, whichever thread they die on."""

import threading
from abc import ABC, abstractmethod
from collections import deque

from lightning_cxl.memory.resource import Buffer


class ReclaimingResource(ABC):
    """Notes dying buffers without a lock and takes them back under the lock of the next call.

    See [Note: Life of a Buffer]. A subclass holds `_lock` and calls `_drain` first in everything it offers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dead: deque[tuple[int, int]] = deque()  # (address, nbytes)
        self._closed = False

    def deallocate(self, buffer: Buffer) -> None:
        """Note a dying buffer; its bytes are free from the next call of another method on."""
        self._dead.append((buffer.address, buffer.nbytes))
        if self._closed:  # nobody may ever call again
            self._reclaim_late()

    def trim(self) -> None:
        """Give everything that is free back to where it came from."""
        with self._lock:
            self._drain()
            self._release_free()

    def close(self) -> None:
        """Give back what is free now, and the rest as its last buffers die. Living buffers stay valid."""
        self._closed = True
        self.trim()
        self._reclaim_late()

    def _reclaim_late(self) -> None:
        # Whoever holds the lock looks at the list again after letting go, so a failed attempt loses nothing; waiting
        # here could wait for this very thread.
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._drain()
                self._release_free()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._dead:
            self._take_back(*self._dead.popleft())

    @abstractmethod
    def _take_back(self, address: int, nbytes: int) -> None:
        """Make the bytes of a dead buffer free again; the lock is held."""

    @abstractmethod
    def _release_free(self) -> None:
        """Give everything that is free back to where it came from; the lock is held."""
