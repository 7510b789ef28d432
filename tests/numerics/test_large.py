"""Spans of more elements than 32 bits can count: offsets, scales and random numbers stay right beyond 2^31 and 2^32.

Tensors of billions of elements take little memory: a small file is mapped again and again, with own pages in places.
"""

import ctypes
import mmap
import os
from array import array

import psutil
import pytest
import torch

from lightning_cxl.native import _cpu, _grads
from lightning_cxl.optim import kernels as formats
from tests.numerics.adam_case import ISAS, PLAIN, TENSORS, Case, Formats, scalars_at, update
from tests.numerics.reference import gradients as grad_reference

PAGE = mmap.PAGESIZE
FILE_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _NO_ACCESS, _READ_WRITE = 0x10, 0, mmap.PROT_READ | mmap.PROT_WRITE


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
        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(self.address + offset), dtype=dtype)

    def free(self) -> None:
        _libc.munmap(self.address, self.size)
        os.close(self._file)

    @staticmethod
    def _map(address: int, size: int, protection: int, flags: int, file: int) -> int:
        result = _libc.mmap(address, size, protection, flags, file, 0)
        if result == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"cannot map {size} bytes")
        return int(result)


WIDTH = 3 * 65536 + 512
"""Elements of each part that is looked at: more than two chunks."""
GAP = 2**20
"""Elements between two parts: their scales do not share a page."""
SMALLEST = Formats(torch.bfloat16, formats.WEIGHTS_SPLIT, "8bit")
ROUNDED = Formats(torch.float16, formats.WEIGHTS_FP32, "bf16")


def element_bytes(case: Case, name: str) -> float:
    return case[name].element_size() / (256 if name.endswith("_scale") else 1)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize(
    ("combination", "after", "lead"),
    [(PLAIN, 2**31, 0), (SMALLEST, 2**31, 1000), (ROUNDED, 2**32, 1000)],
    ids=["fp32", "split-8bit", "bf16-2^32"],
)
def test_more_elements_than_32_bits_can_count(combination, after, lead):
    """All is zero but the first elements, those around 2^31 and 2^32, and the last: they equal the definition."""
    if psutil.virtual_memory().available < 2 << 30:
        pytest.skip("needs 2 GiB of memory, for page tables above all")
    numel = after + GAP + WIDTH + 17
    around = [middle - 2 * 65536 for middle in (2**31, 2**32) if middle <= after]
    starts = [0, *around, (numel - WIDTH // 2) // 256 * 256]
    parts = [Case.random(min(WIDTH, numel - start), combination, index) for index, start in enumerate(starts)]
    key = parts[0].key
    present = [name for name in TENSORS if parts[0].tensors[name] is not None]
    memories = {name: BigMemory(int(numel * element_bytes(parts[0], name)) + 4096) for name in present}
    windows = []
    for start, part in zip(starts, parts, strict=True):
        window = Case(combination, key, dict.fromkeys(TENSORS))
        for name, memory in memories.items():
            place = int(start * element_bytes(part, name))
            window.tensors[name] = memory.window(place, part[name].nbytes, part[name].dtype).copy_(part[name])
        windows.append(window)
    span = [memories[name].address if name in memories else 0 for name in TENSORS]
    leading = Case.random(lead)  # so that the chunks of the span do not begin at multiples of their size
    table = [leading.span(), [*span, key, numel, 0, combination.code, 0, 0]]
    update(table, [scalars_at()], ISAS[-1], _cpu.available_threads())
    for start, part, window in zip(starts, parts, windows, strict=True):
        part.key = key
        window.assert_same(part.defined(scalars_at(), start), start)
    window, windows = None, None
    for memory in memories.values():
        memory.free()


@pytest.mark.slow
@pytest.mark.full
def test_sums_and_random_bits_beyond_32_bits_of_elements_and_of_counters():
    """One counter serves two elements: these are the first ones behind 2 ** 33."""
    nbytes, key = 1 << 34, 0x0123456789ABCDEF
    memories = [BigMemory(nbytes + PAGE) for _ in range(2)]
    source, sums = (memory.window(nbytes, PAGE, torch.bfloat16)[:1001] for memory in memories)
    source.copy_(torch.rand(1001) * 0.01)
    sums.fill_(1.0)
    expected, wrong = sums.clone(), sums.clone()
    total = grad_reference.accumulate(source, expected, key, first=nbytes // 2)
    grad_reference.accumulate(source, wrong, key)
    assert not torch.equal(wrong, expected)
    results = array("d", [0.0])
    row = [memories[0].address, memories[1].address, nbytes // 2 + 1001, 1, 1, key]
    _grads.accumulate(array("Q", row), results, _cpu.available_threads(), ISAS[-1])
    assert torch.equal(sums, expected)
    assert results[0] == total
    del source, sums
    for memory in memories:
        memory.free()
