"""The table of commands without waiting for torch; errors end as one message, those of training as traceback."""

import errno
import importlib
import os
import re
import subprocess
import sys
import types

import pytest

import lightning_cxl
from lightning_cxl import __main__ as front
from lightning_cxl.commands.parsers import COMMANDS
from lightning_cxl.errors import ConfigError
from lightning_cxl.planning.policies import POLICIES

NAMES = ["fit", "validate", "test", "predict", "export", "convert", "plan", "verify", "env", "calibrate"]


def run(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def test_every_command_is_in_the_table_and_can_be_imported():
    assert list(COMMANDS) == NAMES
    for command in COMMANDS.values():
        assert callable(importlib.import_module(f"lightning_cxl.{command.module}").main)
        assert command.trains == (command.module in ("finetune.cli", "commands.verify"))


ANSWERED_AT_ONCE = [
    (["--help"], 0, "calibrate"),
    (["--version"], 0, f"lightning_cxl {lightning_cxl.__version__}"),
    (["help", "plan"], 0, "usage: python -m lightning_cxl plan "),
    *((["help", "plan"], 0, policy) for policy in POLICIES),
    *(([name, "--help"], 0, f"example: python -m lightning_cxl {name}") for name in NAMES),
    (["plan", "--sqe", "3"], 2, "required: --model"),
    (["fitt"], 2, "did you mean `fit`?"),
]


def test_help_and_wrong_options_import_no_torch():
    """Each is a first import of the package, in one process."""
    code = (
        "import sys, ast\n"
        "for arguments in ast.literal_eval(sys.argv[1]):\n"
        "    sys.argv, sys.orig_argv = ['-m', *arguments], ['python', '-m', 'lightning_cxl', *arguments]\n"
        "    for name in [name for name in sys.modules if name.startswith('lightning_cxl')]: del sys.modules[name]\n"
        "    try:\n"
        "        import lightning_cxl\n"
        "    except SystemExit as stopped:\n"
        "        print(f'status {stopped.code}', flush=True)\n"
        "print(*sys.modules)\n"
    )
    shown = run("-c", code, str([arguments for arguments, _, _ in ANSWERED_AT_ONCE]), stderr=subprocess.STDOUT)
    answers = re.split(r"^status (\d)\n", shown.stdout, flags=re.MULTILINE)
    for (arguments, status, text), answer, found in zip(ANSWERED_AT_ONCE, answers[::2], answers[1::2], strict=False):
        assert int(found) == status and text in answer, arguments
    assert len(answers) == 2 * len(ANSWERED_AT_ONCE) + 1
    imported = set(answers[-1].split())
    assert "lightning_cxl.commands.parsers" in imported
    assert not imported & {"torch", "lightning", "numpy", "transformers"}


@pytest.fixture
def ending(monkeypatch):
    """Runs a command that raises what is given, or returns it; returns what the process would end with."""

    def run(result, name="plan"):
        def main(arguments):
            assert arguments == ["--model", "gpt2"]
            if isinstance(result, BaseException):
                raise result
            return result() if callable(result) else result

        monkeypatch.setattr(sys, "argv", ["lightning_cxl", name, "--model", "gpt2"])
        monkeypatch.setattr(front.importlib, "import_module", lambda module: types.SimpleNamespace(main=main))
        front.main()

    return run


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("no such policy"), "ConfigError: no such policy"),
        (ModuleNotFoundError("x", name="datasets"), "`python -m lightning_cxl plan` needs .*pip install datasets"),
        (OSError(errno.ENOSPC, "No space left on device"), "`python -m lightning_cxl plan` cannot go on: .*No space"),
    ],
)
def test_errors_are_one_message(ending, error, message):
    with pytest.raises(SystemExit, match=message):
        ending(error)


def test_ctrl_c_is_one_message_and_the_status_of_shells(ending, capsys):
    with pytest.raises(SystemExit) as caught:
        ending(KeyboardInterrupt())
    assert caught.value.code == 130
    assert capsys.readouterr().err == "`python -m lightning_cxl plan` was interrupted\n"


@pytest.mark.parametrize("name", ["fit", "predict", "verify"])
@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("of the user's loader")])
def test_errors_inside_of_training_keep_their_traceback(ending, error, name):
    with pytest.raises(type(error)):
        ending(error, name)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_no_traceback():
    with open("/dev/full", "w") as full:
        done = run("-m", "lightning_cxl", "env", stdout=full)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("`python -m lightning_cxl env` cannot ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
