import ctypes
import subprocess
import sys

import pytest

_LARGE_BLOCKS = """
import ctypes, os
from lightning_cxl.memory.host_memory import large_blocks_apart

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

class MallInfo(ctypes.Structure):
    _fields_ = [(str(index), ctypes.c_size_t) for index in range(10)]

libc.mallinfo2.restype = MallInfo

def has_own_pages(nbytes=24 << 20):
    before = getattr(libc.mallinfo2(), "3")  # blocks that are not cut from the heap
    address = libc.malloc(nbytes)
    after = getattr(libc.mallinfo2(), "3")
    libc.free(address)
    return after > before

has_own_pages()  # the limit of glibc's own rises to this block when it is freed
assert not has_own_pages()
with large_blocks_apart():
    with large_blocks_apart():
        has_own_pages()
    assert [has_own_pages() for _ in range(3)] == [True] * 3
assert not has_own_pages()
os.environ["MALLOC_MMAP_THRESHOLD_"] = "33554432"
with large_blocks_apart():
    assert not has_own_pages()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_large_blocks_have_pages_of_their_own_inside() -> None:
    """In a process of its own: from a heap with large holes, blocks are cut as before."""
    subprocess.run([sys.executable, "-c", _LARGE_BLOCKS], check=True)
