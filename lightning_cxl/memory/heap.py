"""Give the C library's free memory back to the OS between forward and backward.

glibc before 2.38 often cannot reuse the aligned blocks that torch frees, so its heap grows well beyond what is in use.
Trimming whenever 64 MiB have been added bounds that, and costs page faults.

Measured with the job of `examples/bench/step.py`, 5 or 6 steps, on one core of a busy machine, glibc 2.36: CPU seconds
against Lightning with gradient checkpointing, bytes per parameter at the peak, page faults of a step.

==================================================  ============  ============  ==================
trimmed when 64 MiB have been added                 1.04 to 1.07  20.9 to 21.6  about 200,000
``GLIBC_TUNABLES=glibc.malloc.tcache_count=0`` too  0.99 to 1.06  20.7 to 21.2  120,000 to 180,000
``THP_MEM_ALLOC_ENABLE=1`` too                      0.99 to 1.01  20.5          41,000 to 51,000
both variables too                                  0.99          20.4          15,000
==================================================  ============  ============  ==================

The first variable ends the thread's cache of small blocks. The second makes torch align tensors of 2 MiB and more to
pages, and ask the kernel for huge pages, which it must give on request
(``/sys/kernel/mm/transparent_hugepage/enabled``: not ``never``). glibc reads the first when the process starts, torch
the second with its first tensor: both are for the user to set. Lightning with the second one took 0.97 of its own time.
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
