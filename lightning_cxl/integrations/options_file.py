"""`read_options`: the options of a front end whose users have no Lightning CLI."""

from collections.abc import Mapping
from dataclasses import fields
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import yaml

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError

Options = Mapping[str, Any] | OffloadConfig | str | PathLike[str] | None
"""Options of a front end: fields of `OffloadConfig`, or a file with them."""


def read_options(given: Options) -> dict[str, Any]:
    """Return fields of `OffloadConfig`.

    Args:
        given: these fields, an `OffloadConfig`, or the path of a YAML file that has them at its top level; None: no
            field.
    """
    if isinstance(given, OffloadConfig):
        return {each.name: getattr(given, each.name) for each in fields(given)}
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    path = Path(fspath(given))
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the options in `{path}`: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"`{path}` must map names of options to values, such as `stream_weights: true`")
    return dict(found)
