"""Machines as YAML files: `load_machine` and `save_machine`.

A file has the fields of `Machine`: ``tiers`` is a list with the fields of `MachineTier`, ``device`` has those of
`Device`, ``cache`` those of `Cache`. Sizes may be written as ``128GiB``, bytes per second as ``51.8 GiB/s``.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import yaml

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.machine import Cache, Device, Machine, MachineTier, field_names
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.units import parse_bytes


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine from a YAML file.

    Raises:
        ConfigError: the file cannot be read, lacks a key, has one that nobody knows, or a value that no machine has.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the machine file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the machine file {path} is not YAML: {error}") from error
    try:
        machine: Machine = _build(Machine, content, "the file")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return machine


def dump_machine(machine: Machine) -> str:
    """Return a machine as YAML that `load_machine` reads back exactly."""
    content = asdict(machine)
    content["tiers"] = [{**tier, "kind": tier["kind"].value} for tier in content["tiers"]]
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def save_machine(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine to a YAML file."""
    Path(path).write_text(dump_machine(machine))


def read_fields(kind: type, content: object, where: str) -> dict[str, Any]:
    """Return those fields of a `kind` that a mapping gives, as their types.

    Args:
        kind: one of the types of `lightning_cxl.machine.machine`.
        content: what a YAML file has.
        where: names the place in messages.

    Raises:
        ConfigError: no mapping, an unknown key, or a value that is not of the field's type.
    """
    names = field_names(kind)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must map {', '.join(names)} to values, got {content!r}")
    unknown = [key for key in content if key not in names]
    if unknown:
        raise ConfigError(
            f"{where} has the unknown key {', '.join(map(repr, unknown))}; its keys are: {', '.join(names)}"
        )
    values: dict[str, Any] = {}
    for f in fields(kind):
        if f.name in content:
            value = content[f.name]
            if value is None and f.default is None:
                values[f.name] = None
            else:
                values[f.name] = _reader(kind, f.name)(value, f"{where}: {f.name}")
    return values


def _build(kind: type, content: object, where: str) -> Any:
    """Return a `kind` from a mapping of its fields; `where` is for messages."""
    values = read_fields(kind, content, where)
    missing = [
        f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; its keys are: {', '.join(field_names(kind))}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _reader(kind: type, name: str) -> Callable[[object, str], Any]:
    """Return what reads the values of a field."""
    if name == "tiers":
        return _tiers
    if name in ("device", "cache"):
        return lambda value, where: _build(Device if name == "device" else Cache, value, where)
    if name == "kind":
        return _tier_kind
    if name in ("name", "source", "backed_by"):
        return _text
    if name in ("is_host", "has_speeds"):
        return _flag
    if name in ("num_nodes", "count"):
        return _count
    if name.endswith("bytes_per_s"):
        return _rate
    return _size if name.endswith("bytes") else _number


def _tiers(value: object, where: str) -> tuple[MachineTier, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, each entry with {', '.join(field_names(MachineTier))}")
    return tuple(_build(MachineTier, each, f"tier {number} of {len(value)}") for number, each in enumerate(value, 1))


def _tier_kind(value: object, where: str) -> TierKind:
    try:
        return TierKind(value)
    except ValueError:
        raise ConfigError(
            f"{where} must be one of {', '.join(each.value for each in TierKind)}, got {value!r}"
        ) from None


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be text, got {value!r}")
    return value


def _flag(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    return value


def _count(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{where} must be a whole number, got {value!r}")
    return value


def _size(value: object, where: str) -> int:
    try:
        return parse_bytes(value)  # type: ignore[arg-type]  # it refuses other types itself
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _rate(value: object, where: str) -> float:
    if isinstance(value, str) and value.rstrip().endswith("B/s"):
        return float(_size(value.rstrip().removesuffix("/s"), where))
    rate = _number(value, where)
    if rate <= 0:
        raise ConfigError(f"{where} must be positive, got {value!r}")
    return rate


def _number(value: object, where: str) -> float:
    # YAML 1.1 takes 278e9, without point and sign, for text
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        unit = ' of bytes per second, or text such as "51.8 GiB/s"' if where.endswith("bytes_per_s") else ""
        raise ConfigError(f"{where} must be a number{unit}, at least 0, got {value!r}")
    return number
