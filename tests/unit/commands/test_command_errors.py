"""Errors of the command line end as one message, whatever they are; errors of training keep their traceback."""

import errno
import os
import signal
import subprocess
import sys
import types

import pytest

from lightning_cxl import __main__ as front
from lightning_cxl.commands.parsers import check_target, write_text
from lightning_cxl.errors import ConfigError


@pytest.fixture
def run(monkeypatch):
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
def test_errors_are_one_message(run, error, message):
    with pytest.raises(SystemExit, match=message):
        run(error)


def test_ctrl_c_is_one_message_and_the_status_of_shells(run, capsys):
    with pytest.raises(SystemExit) as caught:
        run(KeyboardInterrupt())
    assert caught.value.code == 130
    assert capsys.readouterr().err == "`python -m lightning_cxl plan` was interrupted\n"


@pytest.mark.parametrize("name", ["fit", "predict"])
@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("of the user's loader")])
def test_errors_inside_of_training_keep_their_traceback(run, error, name):
    with pytest.raises(type(error)):
        run(error, name)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_no_traceback():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lightning_cxl", "env"]
        done = subprocess.run(command, text=True, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("`python -m lightning_cxl env` cannot ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("lines", [1, 10_000])
def test_a_closed_pipe_is_no_error(run, monkeypatch, lines):
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:  # closing it flushes it, as the end of the process does
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run(lambda: print("what it found\n" * lines)) is None


def test_ctrl_c_while_the_package_is_imported_is_no_traceback():
    code = (
        "import sys, runpy, signal, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "class Stops(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stops())\n"
        "sys.argv, sys.orig_argv = ['-m', 'env'], ['python', '-m', 'lightning_cxl', 'env']\n"
        "import lightning_cxl\n"
    )
    stopped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert stopped.returncode == -signal.SIGINT
    assert stopped.stderr == "python -m lightning_cxl env: importing torch and Lightning ...\n"


def test_a_file_that_cannot_be_written_is_refused_before_or_named(tmp_path):
    check_target(None)
    check_target(tmp_path / "new.json")
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_target(tmp_path / "none" / "a.json")
    with pytest.raises(ConfigError, match="it is a folder"):
        check_target(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot write .*: Is a directory"):
        write_text(tmp_path, "")
