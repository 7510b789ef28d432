"""``python -m lightning_cxl``: runs a command of `COMMANDS`; errors of the command line end here, as one message."""

import contextlib
import importlib
import os
import signal
import sys

from lightning_cxl.commands.parsers import COMMANDS, PROGRAM, answer_at_once
from lightning_cxl.errors import LightningCXLError

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see answer_before_imports
        signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = sys.argv[1:]
    answer_at_once(arguments)
    name = arguments[0]
    # `--config FILE fit` is for the main job, which finds its own command
    command = COMMANDS.get(name, COMMANDS["fit"])
    try:
        status = importlib.import_module(f"lightning_cxl.{command.module}").main(arguments[1:])
    except LightningCXLError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        # Lightning raises it without a name where jsonargparse is missing, and says what to install
        missing = f"package `{error.name}`, which is not installed: pip install {error.name}" if error.name else error
        sys.exit(f"`{PROGRAM} {name}` needs {missing}")
    except KeyboardInterrupt:
        print(f"`{PROGRAM} {name}` was interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:
        _leave_stdout()
        return
    except OSError as error:
        if command.trains:
            raise
        _flush(name)
        sys.exit(f"`{PROGRAM} {name}` cannot go on: {error}")
    _flush(name)
    if status:
        sys.exit(status)


def _flush(name: str) -> None:
    """Write what waits in stdout: what cannot be written is a message here, and a traceback at the process's end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _leave_stdout()
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            sys.exit(f"`{PROGRAM} {name}` cannot write what it found: {error}")


def _leave_stdout() -> None:
    """Make Python's last flush of stdout go nowhere, so that it does not fail with a second message."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
