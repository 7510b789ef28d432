"""`bench NAME`: the names, and that each benchmark gets its own options."""

import sys

import pytest

from lightning_cxl.__main__ import main as command_line
from lightning_cxl.commands.bench.command import main


@pytest.mark.parametrize(("name", "option"), [("adam", "--threads"), ("ssd", "--folder"), ("pools", "--models")])
def test_the_command_line_reaches_each_benchmark(name, option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", "bench", name, "--help"])
    with pytest.raises(SystemExit) as end:
        command_line()
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m lightning_cxl bench {name} " in shown and option in shown


def test_help_names_all_benchmarks(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in ("adam ", "ssd  ", "pools"))


@pytest.mark.parametrize(("arguments", "message"), [([], "required: NAME"), (["none"], "invalid choice: 'none'")])
def test_no_or_a_wrong_name_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err
