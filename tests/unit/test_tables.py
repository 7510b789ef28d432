"""Tables are plain text whose cells are whole, whatever the terminal."""

import pytest

from lightning_cxl.text import table_lines, text_width, wrapped


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")


def test_columns_are_side_by_side_and_numbers_to_the_right():
    lines = table_lines(("tier", "of", "used"), [("dram", "all", "1.5 GiB"), ("cxl0", "", "12 MiB")], left=2)
    assert lines == ["tier  of      used", "dram  all  1.5 GiB", "cxl0        12 MiB"]
    assert table_lines(("", ""), [("a", "1"), ("b", "10")], indent=2) == ["  a   1", "  b  10"]


def test_cells_are_never_cut_wrapped_or_taken_for_markup():
    cells = ["[bold]x[/bold] :smile:", "y" * 150, "z" * 150]
    (line,) = table_lines(("", "", ""), [cells])
    assert line.split("  ") == cells
    assert "\x1b" not in line


def test_the_width_is_that_of_the_terminal_and_at_least_100_columns(monkeypatch):
    assert text_width() == 100
    monkeypatch.setenv("COLUMNS", "150")
    assert text_width() == 150


def test_sentences_are_wrapped_with_indented_lines():
    lines = wrapped("a sentence of many-many words " * 8)
    assert len(lines) == 3 and max(map(len, lines)) <= 100
    assert lines[0].startswith("a sentence") and all(line.startswith("    ") for line in lines[1:])
    assert wrapped("a short one", width=8) == ["a short", "    one"]
