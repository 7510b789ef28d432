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
    beside_prose = table_lines(("", "", ""), [(*cells[:2], "a few words " * 10)], prose=True)
    assert beside_prose[0].startswith("  ".join(cells[:2])) and len(beside_prose) <= 5


def test_only_prose_is_wrapped_at_a_width_of_at_least_100_columns(monkeypatch):
    sentence = "of many words " * 20
    lines = table_lines(("name", "what"), [("n" * 30, sentence)], prose=True)
    assert 2 < len(lines) < 8 and 90 < max(map(len, lines)) <= 100
    assert " ".join(" ".join(line[30:].split()) for line in lines[1:]).split() == sentence.split()
    monkeypatch.setenv("COLUMNS", "150")
    assert text_width() == 150
    assert len(table_lines(("name", "what"), [("n" * 30, sentence)], prose=True)) < len(lines)


def test_sentences_are_wrapped_with_indented_lines():
    lines = wrapped("a sentence of many-many words " * 8)
    assert len(lines) == 3 and max(map(len, lines)) <= 100
    assert lines[0].startswith("a sentence") and all(line.startswith("    ") for line in lines[1:])
    assert wrapped("a short one", width=8) == ["a short", "    one"]
