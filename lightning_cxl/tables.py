"""Tables and sentences as lines of plain text: the same in a terminal, a pipe and a file, without colours."""

import io
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_SMALLEST_WIDTH = 100
"""Of lines, where the terminal is narrower, or where there is none."""
_NARROWEST_PROSE = 40


def text_width() -> int:
    """Return how many columns a line may have: those of the terminal, at least 100."""
    return max(_SMALLEST_WIDTH, shutil.get_terminal_size((_SMALLEST_WIDTH, 24)).columns)


def wrapped(text: str, width: int | None = None) -> list[str]:
    """Return a sentence as lines, all but the first indented; `width` is `text_width` when left out."""
    return textwrap.wrap(text, width or text_width(), subsequent_indent="    ", break_on_hyphens=False)


def table_lines(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, indent: int = 0, prose: bool = False
) -> list[str]:
    """Return a table as lines, columns side by side.

    Args:
        header: a title for each column; no line is printed for titles that are all empty.
        rows: a cell for each column. Cells are never cut or wrapped, so that they can be found by `grep`.
        left: the number of first columns that are aligned to the left; the others are numbers, to the right.
        prose: cells of the last column are sentences: aligned to the left, and wrapped at the terminal's width.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(header))
    last = len(header) - 1
    for number, title in enumerate(header):
        is_prose = prose and number == last
        to_the_left = is_prose or number < left
        table.add_column(
            Text(title),
            justify="left" if to_the_left else "right",
            no_wrap=not is_prose,
            min_width=_NARROWEST_PROSE if is_prose else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    needed = Console(width=1 << 16).measure(table)
    width = max(text_width() - indent, needed.minimum if prose else needed.maximum)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False).print(table)
    return [" " * indent + line.rstrip() for line in out.getvalue().splitlines()]
