"""Byte sizes as people write and read them: ``"64GiB"`` to an int and back."""

import re

_FACTORS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(size: int | float | str) -> int:
    """Return `size` in bytes; accepts a count or a string such as ``"512MiB"``, ``"1.5 GB"``."""
    if isinstance(size, bool) or not isinstance(size, (int, float, str)):
        raise ValueError(f"a size must be a number of bytes or a string such as '64GiB', got {size!r}")
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _FACTORS:
            raise ValueError(
                f"cannot read {size!r} as a size: write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
            )
        number = float(match[1]) if "." in match[1] else int(match[1])
        return int(number * _FACTORS[match[2].upper()])
    if size < 0 or size % 1:  # the remainder of infinity and NaN is NaN, which is true
        raise ValueError(f"a size must be a whole, non-negative number of bytes, got {size!r}")
    return int(size)


def format_bytes(num_bytes: int | float) -> str:
    """Return `num_bytes` in binary units with one decimal, e.g. ``"12.1 GiB"``; exact below 1 KiB."""
    value = float(num_bytes)
    if abs(value) < 1024:
        return f"{int(value)} B"
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"
