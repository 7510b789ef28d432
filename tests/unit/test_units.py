import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.text import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (4096, 4096),
        (4096.0, 4096),
        ("17", 17),
        ("17 B", 17),
        ("2KB", 2000),
        ("2KiB", 2048),
        (" 512 MiB ", 512 << 20),
        ("64GiB", 64 << 30),
        ("1.5 GB", 1_500_000_000),
        ("0.5tib", 1 << 39),
    ],
)
def test_parse_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "size", ["", "GiB", "-1GiB", "1 apple", "1e9", "1GiBB", -1, 0.5, True, None, [1], float("nan"), float("inf")]
)
def test_parse_bytes_refuses(size):
    with pytest.raises(ValueError, match=r"a size must be|cannot read"):
        parse_bytes(size)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (64 << 30, "64.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(st.integers(0, 1 << 60))
def test_formatted_sizes_read_back_within_rounding(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.05)


@given(st.integers(0, 1 << 60))
def test_whole_numbers_read_back_exactly(num_bytes):
    assert parse_bytes(str(num_bytes)) == num_bytes
