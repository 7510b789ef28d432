"""`ShortErrors`: the parser of the main job; says what is wrong with an option in a few lines, and the nearest name."""

import difflib
import re
from collections.abc import Iterable
from typing import IO, Any, NoReturn

from lightning_cxl.integrations.lightning.lightning_api import LightningArgumentParser

_UNKNOWN = re.compile(r"unrecognized arguments: .*?--(?P<typed>[\w.-]+)|does not accept option '(?P<read>[\w.-]+)'")
_MODEL_IS_NO_FILE = re.compile(r'Parser key "model":\s+Unable to load config')


class ShortErrors(LightningArgumentParser):
    """A parser whose errors do not begin with the usage of all options, which fills more than a screen."""

    def print_usage(self, file: IO[str] | None = None) -> None:
        """Print nothing: ``--help`` shows all options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """End the process with a message and advice.

        Args:
            message: of jsonargparse.
            ex: its error; holds the subcommand's parser where that one failed.
        """
        parser: Any = getattr(ex, "subcommand_parser", None) or self
        super().error(message + advice(message, parser._option_string_actions), ex)
        raise AssertionError("the parser goes on after an error")


def advice(message: str, options: Iterable[str]) -> str:
    """Return what to write instead, to be put behind a message of jsonargparse; empty if it is not known.

    Args:
        message: of jsonargparse.
        options: that there are, such as ``--model.lr``.
    """
    if _MODEL_IS_NO_FILE.search(message):
        return "\n`--model` takes a file with options: write `--model.name_or_path` for a folder or a hub id"
    if found := _UNKNOWN.search(message):
        near = difflib.get_close_matches(f"--{found['typed'] or found['read']}", options, n=1)
        return f"\ndid you mean `{near[0]}`?" if near else ""
    return ""
