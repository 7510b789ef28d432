"""Give the C library's free memory back to the OS between forward and backward.

glibc often cannot reuse the aligned blocks that torch frees: for such a block it cuts a larger one, and keeps the small
rests in its thread cache, so that the hole that the block leaves is too small for the next one. Trimming before and
after a backward, where 64 MiB have been added, and before memory for a gradient is taken, bounds that and costs page
faults: 2.7 bytes per parameter at the peak for 6 % of a step on the CPU, with a model of 19 M parameters
(`DECISIONS.md` has the run).
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as in <malloc.h>
_FIRST_LIMIT_BYTES = 128 * 2**10  # what glibc begins with
_LAST_LIMIT_BYTES = 32 * 2**20  # and what it never goes beyond
_USERS_CHOICE = (("MALLOC_MMAP_THRESHOLD_", ""), ("GLIBC_TUNABLES", "mmap_threshold"))
_lock = threading.Lock()
_num_inside = 0
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
        if self._malloc_trim is not None:
            self._malloc_trim(0)

    def _resident_bytes(self) -> int:
        return int(_STATM.read_text().split()[1]) * self._page_bytes


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Inside, every block of 128 KiB and more has pages of its own, which go back to the OS when the block is freed.

    glibc begins so, and then raises the limit to the largest block that was freed, up to 32 MiB. Blocks below the limit
    are cut from the heap and leave holes there. Where the CPU computes with quantised weights, these are made anew in
    full precision whenever a layer computes, between gradients that stay. In a QLoRA run of 1.1 B parameters
    (`examples/bench/qlora.py`) the holes were as large as the model, and new pages cost a tenth of the CPU time.

    The whole process is concerned. Where users have set the limit themselves (``MALLOC_MMAP_THRESHOLD_``,
    ``GLIBC_TUNABLES``), or the C library has none, nothing happens. Outside again, when all that are inside have left,
    the limit is 32 MiB, to which glibc's own would have risen.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ and text in os.environ[name] for name, text in _USERS_CHOICE):
        yield
        return

    def count(change: int) -> None:
        global _num_inside
        with _lock:
            before, _num_inside = _num_inside, _num_inside + change
            if bool(before) != bool(_num_inside):
                limit = _FIRST_LIMIT_BYTES if _num_inside else _LAST_LIMIT_BYTES
                mallopt(_MMAP_THRESHOLD, limit)
                mallopt(_TRIM_THRESHOLD, limit if _num_inside else 2 * limit)
                HeapTrimmer().trim_now()  # holes that there are: blocks would be cut from them

    count(+1)
    try:
        yield
    finally:
        count(-1)
