"""`ShortErrors`: the parser of the main job; says what is wrong with an option in a few lines, and the nearest name."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Iterable
from pydoc import locate
from typing import IO, Any, NoReturn

from lightning_cxl.integrations.lightning.lightning_api import LightningArgumentParser

_UNKNOWN = re.compile(r"unrecognized arguments: .*?--(?P<typed>[\w.-]+)|does not accept option '(?P<read>[\w.-]+)'")
_OF_CLASS = re.compile(r"( *)- Problem with given class_path '(?P<name>[\w.]+)':\n(?P<problem>(?:\1 .*\n?)+)")
_OPTION = re.compile(r"Option '(?P<typed>\w+)[\w.]*' is not accepted")
_MOST_LINES, _MOST_WIDTH = 12, 240
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
        super().error(shortened(message) + advice(message, parser._option_string_actions), ex)
        raise AssertionError("the parser goes on after an error")


def shortened(message: str) -> str:
    """Return a message of jsonargparse without what it repeats of a file, and without all that would have been valid.

    Args:
        message: of jsonargparse; where a class got wrong arguments, what stays is which, and what is wrong.
    """
    if found := list(_OF_CLASS.finditer(message)):
        problems = [f"{each['name']}: {textwrap.dedent(each['problem']).strip()}" for each in found]
        return "\n".join([message.splitlines()[0], *problems, *map(_near_argument, found)]).strip()
    lines = [line if len(line) <= _MOST_WIDTH else f"{line[:_MOST_WIDTH]} ..." for line in message.splitlines()]
    return "\n".join([*lines[:_MOST_LINES], *(["..."] if len(lines) > _MOST_LINES else [])])


def _near_argument(of_class: re.Match[str]) -> str:
    option, made = _OPTION.search(of_class["problem"]), locate(of_class["name"])
    if option is None or not callable(made):
        return ""
    near = difflib.get_close_matches(option["typed"], inspect.signature(made).parameters, n=1)
    return f"did you mean `{near[0]}`?" if near else ""


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
