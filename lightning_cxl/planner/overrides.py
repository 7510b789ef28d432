"""What a user says about this machine: a YAML file with some fields of some tiers, which win over everything else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_cxl.errors import ConfigError
from lightning_cxl.planner.machine import Cache, Device, Machine, MachineTier, field_names
from lightning_cxl.units import parse_bytes

_TIER_FIELDS = frozenset(field_names(MachineTier)) - {"name", "kind", "num_nodes", "backed_by"}
_DEVICE_FIELDS = frozenset(field_names(Device)) - {"is_host"}
_TEXTS = frozenset({"name", "source"})
_COUNTS = frozenset({"capacity_bytes", "memory_bytes", "device_write_buffer_bytes", "nbytes", "count"})


@dataclass(frozen=True, slots=True)
class Overrides:
    """Fields by tier, of the device, of the cache, and of the machine itself; only those that a file gives."""

    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def load_overrides(path: str | Path) -> Overrides:
    """Read fields of this machine from YAML.

    Such as::

        tiers:
          cxl: {adam_bytes_per_s: 60e9, capacity_bytes: 200GiB}
        device: {flops: 4e14}

    A file with a whole machine will do, too: what tiers are made of is left out, this machine knows that itself.

    Raises:
        ConfigError: no such file, no YAML, or something in it that is no field; the message names those that are.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read speeds from {path}: {error}") from error
    top = _mapping(path, "the file", {} if content is None else content)
    own = frozenset(field_names(Machine))
    _refuse_unknown(path, "the file", top, own)
    return Overrides(
        tiers={
            name: _fields(path, f"tier `{name}`", row, _TIER_FIELDS, MachineTier) for name, row in _tiers(path, top)
        },
        device=_fields(path, "device", top.get("device", {}), _DEVICE_FIELDS, Device),
        cache=_fields(path, "cache", top.get("cache", {}), frozenset(field_names(Cache)), Cache),
        machine=_fields(
            path, "the file", {k: top[k] for k in top if k in ("name", "write_contention", "source")}, own, Machine
        ),
    )


def _tiers(path: Path, top: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names and fields of tiers, given by name or as a list of tiers with names."""
    tiers = top.get("tiers", {})
    if isinstance(tiers, list):
        for row in tiers:
            if not isinstance(row, dict) or "name" not in row:
                raise ConfigError(f"{path}: each tier of the list `tiers` needs a `name`, got {row!r}")
        return [(str(row["name"]), {key: row[key] for key in row if key != "name"}) for row in tiers]
    return [(str(name), row) for name, row in _mapping(path, "tiers", tiers).items()]


def _fields(path: Path, what: str, row: object, wanted: frozenset[str], kind: type) -> dict[str, Any]:
    row = _mapping(path, what, row)
    _refuse_unknown(path, what, row, frozenset(field_names(kind)))
    return {name: _value(path, what, name, value) for name, value in row.items() if name in wanted}


def _value(path: Path, what: str, name: str, value: object) -> Any:
    """Return a number from what YAML makes of it: `60e9`, without a point, is a text to it, as is `200GiB`."""
    if name in _TEXTS:
        return str(value)
    try:
        if name in _COUNTS:
            return parse_bytes(value)  # type: ignore[arg-type]  # refuses the rest itself
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"got {value!r}")
        return float(value)
    except ValueError as error:
        raise ConfigError(f"{path}: {name} of {what} must be a number: {error}") from error


def _mapping(path: Path, what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {what} must be a mapping of names to values, got {value!r}")
    return value


def _refuse_unknown(path: Path, what: str, row: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(set(map(str, row)) - known):
        raise ConfigError(f"{path}: {what} has no field {unknown[0]!r}; there are: {', '.join(sorted(known))}")
