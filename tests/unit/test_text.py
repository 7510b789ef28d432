import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.text import format_bytes, parse_bytes


def test_sizes_are_read_and_what_is_none_is_refused():
    sizes = {4096.0: 4096, "17 B": 17, "2KB": 2000, " 512 MiB ": 512 << 20, "1.5 GB": 1_500_000_000, "0.5tib": 1 << 39}
    assert {size: parse_bytes(size) for size in sizes} == sizes
    for size in ("", "GiB", "-1GiB", "1 apple", "1e9", "1GiBB", -1, 0.5, True, None, [1], float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"a size must be|cannot read"):
            parse_bytes(size)


@given(st.integers(0, 1 << 60))
def test_sizes_read_back_within_rounding_and_whole_numbers_exactly(nbytes):
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.05)
    assert parse_bytes(str(nbytes)) == parse_bytes(nbytes) == nbytes
