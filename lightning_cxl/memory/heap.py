"""Give the C library's free memory back to the OS between forward and backward.

glibc before 2.38 often cannot reuse the aligned blocks that torch frees, so its heap grows well beyond what is in use.
Trimming whenever 64 MiB have been added bounds that, and costs page faults.

Measured with the job of `examples/bench/step.py`, on one core, glibc 2.36: CPU seconds against Lightning with gradient
checkpointing, and bytes per parameter at the peak.

======================================================  ====  ====
trimmed when 64 MiB have been added                     1.06  21.2
trimmed when 128 MiB have been added                    1.04  21.6
64 MiB, ``GLIBC_TUNABLES=glibc.malloc.tcache_count=0``  0.99  20.8
======================================================  ====  ====

The last one needs the variable before Python starts: no call can switch off the thread's cache of small blocks later.
"""

import ctypes
import os
from pathlib import Path

_STATM = Path("/proc/self/statm")
_MIN_GROWTH_BYTES = 64 * 2**20  # less is not worth the system calls and the page faults afterwards


class HeapTrimmer:
    """Trims the heap when the process has grown since the last time; does nothing where the C library cannot."""

    def __init__(self) -> None:
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._lowest_bytes = self._resident_bytes()

    def trim(self) -> None:
        """Trim if at least 64 MiB have been added to the resident memory."""
        resident = self._resident_bytes()
        if resident - self._lowest_bytes >= _MIN_GROWTH_BYTES:
            self.trim_now()
            self._lowest_bytes = self._resident_bytes()
        else:
            self._lowest_bytes = min(self._lowest_bytes, resident)

    def trim_now(self) -> None:
        """Trim, however little there may be."""
        if self._malloc_trim is not None:
            self._malloc_trim(0)

    def _resident_bytes(self) -> int:
        return int(_STATM.read_text().split()[1]) * self._page_bytes
