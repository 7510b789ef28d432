"""Text for people: byte sizes, tables and sentences. The same in a terminal, a pipe and a file, without colours."""

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence

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


_SMALLEST_WIDTH = 100  # of lines, where the terminal is narrower, or where there is none


def text_width() -> int:
    return max(_SMALLEST_WIDTH, shutil.get_terminal_size((_SMALLEST_WIDTH, 24)).columns)


def wrapped(text: str, width: int | None = None) -> list[str]:
    """Return a sentence as lines, all but the first indented; `width` is `text_width` when left out."""
    return textwrap.wrap(text, width or text_width(), subsequent_indent="    ", break_on_hyphens=False)


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return names as code, at most so many of them."""
    return ", ".join(f"`{name}`" for name in names[:most]) + ", ..." * (len(names) > most)


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, indent: int = 0) -> list[str]:
    """Return a table as lines; the `left` first columns are aligned to the left, the others, numbers, to the right.

    Cells are never cut or wrapped, so that they can be found by `grep`. Titles that are all empty take no line.
    """
    table = [*([header] if any(header) else []), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, strict=True)
        aligned = [cell.ljust(width) if at < left else cell.rjust(width) for at, (cell, width) in enumerate(cells)]
        lines.append(" " * indent + "  ".join(aligned).rstrip())
    return lines
