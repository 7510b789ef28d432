"""`option_errors`: what Lightning and jsonargparse say about options becomes an error of ours, without a traceback."""

import contextlib
import pickle
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from lightning_cxl.errors import ConfigError, LightningCXLError

_PARSERS = frozenset({"lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "jsonargparse"})
_ACCIDENTS = (ArithmeticError, LookupError, AttributeError, AssertionError)
"""Messages that say nothing to whoever gave the options."""
_OUR_READERS = ("lightning_cxl.finetune.", "lightning_cxl.run.checkpoint")
"""Read and write files that options name."""
_READERS = frozenset({"torch", "fsspec", "yaml"})


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Turn errors that options cause into `ConfigError`; all others keep their traceback.

    An option is the cause where Lightning or jsonargparse itself raises, or where a file cannot be read or written that
    they opened, or our code for text, models and checkpoints. What the user's modules raise, torch while it computes
    for them, or the rest of our code, is left alone.

    Raises:
        ConfigError: with the message of the error.
    """
    try:
        yield
    except (LightningCXLError, ModuleNotFoundError):
        raise
    except Exception as error:
        ours = _error_of_ours(error)
        if ours is not None:
            raise ours from error
        if not _is_about_options(error):
            raise
        raise ConfigError(str(error).strip() or type(error).__name__) from error


def _error_of_ours(error: BaseException) -> LightningCXLError | None:
    """Return our error that jsonargparse put into one of its own, None where there is none."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, LightningCXLError):
        cause = cause.__cause__  # not __context__: a bug in what handles our error is no error of ours
    return cause


def _is_about_options(error: Exception) -> bool:
    packages = [_package(each) for each in _frames(error.__traceback__)]
    if isinstance(error, OSError | EOFError | UnicodeError | pickle.UnpicklingError):
        while packages[-1] in _READERS or packages[-1] in sys.stdlib_module_names:
            packages.pop()
        return packages[-1] in {*_PARSERS, *_OUR_READERS}
    return packages[-1] in _PARSERS and not isinstance(error, _ACCIDENTS)


def _frames(traceback: TracebackType | None) -> Iterator[dict[str, Any]]:
    while traceback is not None:
        yield traceback.tb_frame.f_globals
        traceback = traceback.tb_next


def _package(names: dict[str, Any]) -> str:
    name = str(names.get("__name__", ""))
    return next((each for each in _OUR_READERS if name.startswith(each)), name.partition(".")[0])
