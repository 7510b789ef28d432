import ctypes
import mmap

import pytest

from lightning_cxl.memory.heap import HeapTrimmer, large_blocks_apart

_LIBC = ctypes.CDLL(None)


class Counting(HeapTrimmer):
    """Counts the calls instead of making them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self._malloc_trim = self.count

    def count(self, _pad: int) -> None:
        self.calls += 1


@pytest.mark.parametrize(("added", "calls"), [(16 << 20, 0), (96 << 20, 1)])
def test_trims_once_when_the_process_has_grown(added: int, calls: int) -> None:
    trimmer = Counting()
    trimmer.trim()
    assert trimmer.calls == 0
    with mmap.mmap(-1, added) as memory:
        memory.write(b"x" * added)
        trimmer.trim()
        trimmer.trim()
    assert trimmer.calls == calls


def test_growth_counts_from_the_lowest_point() -> None:
    memory = mmap.mmap(-1, 96 << 20)
    memory.write(b"x" * (96 << 20))
    trimmer = Counting()  # starts high
    memory.close()
    trimmer.trim()
    with mmap.mmap(-1, 80 << 20) as again:
        again.write(b"x" * (80 << 20))
        trimmer.trim()
    assert trimmer.calls == 1


def test_without_malloc_trim_nothing_happens() -> None:
    trimmer = Counting()
    trimmer._malloc_trim = None
    with mmap.mmap(-1, 96 << 20) as memory:
        memory.write(b"x" * (96 << 20))
        trimmer.trim()


class _MallInfo(ctypes.Structure):
    """What ``mallinfo2`` of glibc returns."""

    _fields_ = [(str(index), ctypes.c_size_t) for index in range(10)]


def num_blocks_with_own_pages() -> int:
    _LIBC.mallinfo2.restype = _MallInfo
    return int(getattr(_LIBC.mallinfo2(), "3"))


def has_own_pages(nbytes: int) -> bool:
    """Whether a block that is made now is not cut from the heap."""
    _LIBC.malloc.restype, _LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    _LIBC.free.argtypes = [ctypes.c_void_p]
    before = num_blocks_with_own_pages()
    address = _LIBC.malloc(nbytes)
    try:
        return num_blocks_with_own_pages() > before
    finally:
        _LIBC.free(address)


@pytest.mark.skipif(not hasattr(_LIBC, "mallinfo2"), reason="needs glibc 2.33")
def test_large_blocks_have_pages_of_their_own_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 24 << 20  # glibc's own limit rises to this when the first such block is freed
    has_own_pages(nbytes)
    with large_blocks_apart():
        _LIBC.malloc_trim(0)
        with large_blocks_apart():
            has_own_pages(nbytes)
        assert [has_own_pages(nbytes) for _ in range(3)] == [True] * 3
    assert not has_own_pages(nbytes)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "33554432")
    with large_blocks_apart():
        assert not has_own_pages(nbytes)
