import mmap

import pytest

from lightning_cxl.memory.heap import HeapTrimmer


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
