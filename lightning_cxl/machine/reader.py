"""The one reader of files about machines: what YAML or JSON has becomes a dataclass, or an error that says where.

The annotations of a dataclass say what a file may give for its fields: text, true or false, whole numbers, numbers, a
word of an enum, another dataclass, a list of dataclasses, and null where the annotation has ``| None``.
"""

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from lightning_cxl.errors import ConfigError
from lightning_cxl.units import parse_bytes

Size = Annotated[int, "bytes"]
"""Bytes; a file may say ``128GiB``."""
Rate = Annotated[float, "bytes per second"]
"""Bytes per second; a file may say ``51.8 GiB/s``."""
Positive = Annotated[float, "positive"]
"""A number above zero."""
_T = TypeVar("_T")


def read(kind: type[_T], content: object, where: str) -> _T:
    """Return a `kind` from a mapping of its fields.

    Args:
        kind: a dataclass.
        content: what a file has.
        where: names the place in messages.

    Raises:
        ConfigError: no mapping, a key that is missing or unknown, or a value that is not of the field's type.
    """
    values = read_fields(kind, content, where)
    missing = [
        f.name
        for f in fields(kind)  # type: ignore[arg-type]  # a dataclass
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values
    ]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}; its keys are: {_names(kind)}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def read_fields(kind: type, content: object, where: str) -> dict[str, Any]:
    """Return those fields of a `kind` that a mapping gives, as their types; see `read`."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where} must map {_names(kind)} to values, got {content!r}")
    types = get_type_hints(kind, include_extras=True)
    unknown = [key for key in content if key not in types]
    if unknown:
        raise ConfigError(f"{where} has the unknown key {', '.join(map(repr, unknown))}; its keys are: {_names(kind)}")
    values = {}
    for f in fields(kind):
        if f.name in content:
            values[f.name] = value = _value(types[f.name], content[f.name], f"{where}: {f.name}")
            if value == math.inf and f.default != math.inf:
                raise ConfigError(f"{where}: {f.name} must be finite, got {value}")
    return values


def _names(kind: type) -> str:
    return ", ".join(f.name for f in fields(kind))


def _value(hint: Any, value: object, where: str) -> Any:
    """Return a value as the type that a field's annotation names."""
    if hint in _READERS:
        return _READERS[hint](value, where)
    arguments = get_args(hint)
    if type(None) in arguments:
        return None if value is None else _value(arguments[0], value, where)
    if get_origin(hint) is tuple:
        return _entries(arguments[0], value, where)
    if isinstance(hint, type) and is_dataclass(hint):
        return read(hint, value, where)
    assert issubclass(hint, enum.Enum), f"no file gives a {hint}"
    try:
        return hint(value)
    except ValueError:
        words = ", ".join(str(each.value) for each in hint)
        raise ConfigError(f"{where} must be one of {words}, got {value!r}") from None


def _entries(kind: type, value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, each entry with {_names(kind)}")
    entry = where.rpartition(" ")[2].removesuffix("s")  # "tiers" has a "tier 1 of 2"
    return tuple(read(kind, each, f"{entry} {number} of {len(value)}") for number, each in enumerate(value, 1))


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
    if value < 0:
        raise ConfigError(f"{where} must not be negative, got {value}")
    return value


def _size(value: object, where: str) -> int:
    try:
        return parse_bytes(value)  # type: ignore[arg-type]  # it refuses other types itself
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _rate(value: object, where: str) -> float:
    if isinstance(value, str) and value.rstrip().endswith("B/s"):
        return float(_size(value.rstrip().removesuffix("/s"), where))
    return _positive(value, where, ' of bytes per second, or text such as "51.8 GiB/s"')


def _positive(value: object, where: str, unit: str = "") -> float:
    number = _number(value, where, unit)
    if number == 0:
        raise ConfigError(f"{where} must be positive, got {value!r}")
    return number


def _number(value: object, where: str, unit: str = "") -> float:
    # YAML 1.1 takes 278e9, without point and sign, for text
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not number >= 0:
        raise ConfigError(f"{where} must be a number{unit}, at least 0, got {value!r}")
    return number


_READERS: dict[Any, Callable[[object, str], Any]] = {
    str: _text,
    bool: _flag,
    int: _count,
    float: _number,
    Size: _size,
    Rate: _rate,
    Positive: _positive,
}
