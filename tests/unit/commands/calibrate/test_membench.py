from array import array

import numpy as np
import pytest
from hypothesis import strategies as st

from lightning_cxl.native import _cpu, _membench

ISAS = _cpu.supported_isas()
CHUNK = 262144
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77]
PATTERN = 0x8123_4567_89AB_CDEF
MARGIN = 64
threads = st.integers(1, 5)


class Memory:
    """Random bytes with a margin on both sides; `shift` moves the stream off its cache line."""

    def __init__(self, nbytes: int, seed: int, shift: int = 0) -> None:
        room = np.random.default_rng(seed).integers(0, 256, nbytes + 3 * MARGIN, dtype=np.uint8)
        self.start = -room.ctypes.data % MARGIN + MARGIN + shift
        self.nbytes = nbytes
        self.room, self.before = room, room.copy()

    @property
    def bytes(self) -> np.ndarray:
        return self.room[self.start : self.start + self.nbytes]

    def row(self, group: int, access: int) -> tuple[int, int, int, int]:
        return group, self.room.ctypes.data + self.start, self.nbytes, access

    def expected(self, access: int) -> np.ndarray:
        result = self.before.copy()
        inside = result[self.start : self.start + self.nbytes]
        pattern = np.resize(np.frombuffer(PATTERN.to_bytes(8, "little"), dtype=np.uint8), self.nbytes)
        if access == _membench.UPDATE:
            inside ^= pattern
        elif access != _membench.READ:
            inside[:] = pattern
        return result

    def words(self) -> int:
        """The OR of all words, the last one filled up with zeros."""
        padded = np.zeros(-(-self.nbytes // 8) * 8, dtype=np.uint8)
        padded[: self.nbytes] = self.before[self.start : self.start + self.nbytes]
        return int(np.bitwise_or.reduce(padded.view(np.uint64), initial=0))


def sweep(rows, num_threads=2, isa=ISAS[-1], pattern=PATTERN) -> int:
    return _membench.sweep(array("Q", [number for row in rows for number in row]), num_threads, isa, pattern)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("access", [_membench.READ, _membench.UPDATE, _membench.WRITE, _membench.WRITE_PAST_CACHE])
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_of_a_stream_is_touched_once_and_no_other(nbytes, access, isa):
    memory = Memory(nbytes, nbytes)
    found = sweep([memory.row(0, access)], isa=isa)
    assert np.array_equal(memory.room, memory.expected(access))
    assert found == (memory.words() if access == _membench.READ else 0)
