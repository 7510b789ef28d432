from array import array

import numpy as np
import pytest

from lightning_cxl.native import _cpu, _membench

ISAS = _cpu.supported_isas()
CHUNK = 262144
SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77]
PATTERN = 0x8123_4567_89AB_CDEF
MARGIN = 64
ACCESSES = [_membench.READ, _membench.UPDATE, _membench.WRITE, _membench.WRITE_PAST_CACHE]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("nbytes", SIZES)
def test_every_byte_of_a_stream_is_touched_once_and_no_other(nbytes, access, isa):
    """Random bytes, with a margin on both sides."""
    room = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3 * MARGIN, dtype=np.uint8)
    start = -room.ctypes.data % MARGIN + MARGIN
    expected = room.copy()
    inside = expected[start : start + nbytes]
    words = np.zeros(-(-nbytes // 8) * 8, dtype=np.uint8)  # the last one filled up
    words[:nbytes] = inside
    pattern = np.resize(np.frombuffer(PATTERN.to_bytes(8, "little"), dtype=np.uint8), nbytes)
    if access == _membench.UPDATE:
        inside ^= pattern
    elif access != _membench.READ:
        inside[:] = pattern
    found = _membench.sweep(array("Q", [0, room.ctypes.data + start, nbytes, access]), 2, isa, PATTERN)
    assert np.array_equal(room, expected)
    assert found == (np.bitwise_or.reduce(words.view(np.uint64), initial=0) if access == _membench.READ else 0)
