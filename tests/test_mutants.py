"""The lists of mutants follow the code and the tests."""

import re
from pathlib import Path

import pytest

from tests.mutants.__main__ import MUTANTS, ROOT


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_every_protection_is_in_its_file_once(file):
    for mutant in MUTANTS:
        if mutant.file == file:
            original, changed = mutant.texts(ROOT)
            assert original != changed


def test_every_test_that_should_notice_is_there():
    for name in {name for mutant in MUTANTS for name in mutant.tests}:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        if test:
            assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_names_are_told_apart():
    assert len({mutant.takes_away for mutant in MUTANTS}) == len(MUTANTS)


def test_a_text_that_is_gone_or_there_twice_is_an_error(tmp_path: Path):
    mutant = MUTANTS[0]._replace(file="file.py")
    for text in ("", 2 * mutant.old):
        (tmp_path / "file.py").write_text(text)
        with pytest.raises(ValueError, match="its text occurs"):
            mutant.texts(tmp_path)
