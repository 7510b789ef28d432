"""The table of commands, and that it is shown without waiting for torch."""

import importlib
import subprocess
import sys

import pytest

import lightning_cxl
from lightning_cxl.__main__ import main
from lightning_cxl.commands import overview
from lightning_cxl.commands.overview import COMMANDS, answer_at_once, answer_before_imports

NAMES = ["fit", "validate", "test", "predict", "export", "plan", "env", "calibrate"]


def run(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_every_command_is_in_the_table_and_can_be_imported():
    assert list(COMMANDS) == NAMES
    for command in COMMANDS.values():
        assert callable(importlib.import_module(command.module).main)
        assert command.trains == (command.module == "lightning_cxl.finetune.cli")


def test_help_is_one_screen_with_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        answer_at_once(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["command", *NAMES]


def test_help_of_the_module_imports_no_torch():
    shown = run("-X", "importtime", "-m", "lightning_cxl", "--help")
    assert shown.returncode == 0 and "calibrate" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "lightning_cxl.commands.overview" in imported
    assert not imported & {"torch", "lightning", "numpy", "transformers"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "no command was given"), (["fitt"], "no command 'fitt': did you mean `fit`?"), (["xyz"], "no command 'xyz'")],
)
def test_no_or_a_wrong_command_is_answered_with_the_table(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        answer_at_once(arguments)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.err.endswith(f"error: {message}\n") and "calibrate" in shown.err and not shown.out


def test_bench_says_where_it_is_now():
    with pytest.raises(SystemExit, match=r"^`bench` is no command any more: .* in examples/bench$"):
        answer_at_once(["bench", "adam"])


@pytest.mark.parametrize("name", [*NAMES, "--config", "-c", "--print_config"])
def test_commands_and_options_of_the_main_job_are_let_through(name):
    answer_at_once([name, "--help"])


@pytest.mark.parametrize(
    ("argv", "orig_argv", "is_ours"),
    [
        (["-m", "--help"], ["python", "-u", "-m", "lightning_cxl", "--help"], True),
        (["/bin/lightning-cxl", "--help"], ["python", "/bin/lightning-cxl", "--help"], True),
        (["-m", "--help"], ["python", "-m", "pytest", "--help"], False),
        (["train.py", "--help"], ["python", "train.py", "--help"], False),
        (["-m", "lightning_cxl", "--help"], ["python", "-m", "other", "lightning_cxl", "--help"], False),
        (["-c", "--help"], ["python", "-c", "import lightning_cxl", "--help"], False),
    ],
)
def test_only_our_own_process_is_ended_by_the_import_of_the_package(argv, orig_argv, is_ours, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    if is_ours:
        with pytest.raises(SystemExit):
            answer_before_imports()
    else:
        answer_before_imports()
    assert bool(capsys.readouterr().out) == is_ours


def test_a_script_that_imports_the_package_gets_all_of_it():
    shown = run("-c", "import lightning_cxl; print(lightning_cxl.CXLOffloadStrategy.__name__)", "--help")
    assert shown.stdout == "CXLOffloadStrategy\n"
    assert lightning_cxl.CXLOffloadStrategy is not None


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_an_example_in_its_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", name, "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert f"example: {overview.PROGRAM} {name}" in " ".join(capsys.readouterr().out.split())
