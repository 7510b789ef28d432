"""Machines as YAML files: whole ones (`load_machine`, `save_machine`), and some fields of one (`load_overrides`).

A file has the fields of `Machine`: ``tiers`` is a list with the fields of `MachineTier`, ``device`` has those of
`Device`, ``cache`` those of `Cache`, ``ssd`` those of `MachineSsd`, ``links`` those of `MachineLinks`. Sizes may be
written as ``128GiB``, bytes per second as ``51.8 GiB/s``.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.machine import Cache, Device, Machine, MachineSsd, MachineTier
from lightning_cxl.machine.reader import read, read_fields

_OF_THE_HARDWARE = ("name", "kind", "num_nodes", "backed_by")
_OF_THE_DRIVES = ("capacity_bytes", "read_bytes_per_s", "write_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a user says about this machine: fields by tier of memory, of its other parts, and of the machine itself."""

    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    ssd: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine from a YAML file.

    Raises:
        ConfigError: the file cannot be read, lacks a key, has one that nobody knows, or a value that no machine has.
    """
    content = _load(path, "the machine file")
    try:
        return read(Machine, content, "the file")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def save_machine(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Write a machine to a YAML file that `load_machine` reads back exactly."""
    content = asdict(machine)
    content["tiers"] = [{**tier, "kind": tier["kind"].value} for tier in content["tiers"]]
    Path(path).write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


def load_overrides(path: str | os.PathLike[str]) -> Overrides:
    """Read some fields of a machine, which win over everything else that is known of it.

    For example::

        tiers:
          - {name: cxl, adam_bytes_per_s: 60 GB/s, capacity_bytes: 200GiB}
        device: {flops: 4.0e+14}

    A whole machine file will do, too. What a tier is made of, how many drives the tier `ssd` has, and whether the
    device is the host, is left out: the machine knows that itself.

    Raises:
        ConfigError: no such file, no YAML, or something in it that is no field or value; the message names the fields.
    """
    content = _load(path, "speeds from")
    try:
        return _overrides({} if content is None else content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _load(path: str | os.PathLike[str], what: str) -> object:
    """Return what a YAML file has; `what` it is of names the file in messages."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _overrides(content: object) -> Overrides:
    parts = {"tiers", "device", "cache", "ssd"}
    top = {key: content[key] for key in content if key not in parts} if isinstance(content, Mapping) else content
    machine = read_fields(Machine, top, "the file")
    assert isinstance(content, Mapping)  # else refused
    tiers: dict[str, dict[str, Any]] = {}
    rows = content.get("tiers", [])
    if not isinstance(rows, list):
        raise ConfigError(f"tiers must be a list, each entry with a name and what is known of it, got {rows!r}")
    for number, row in enumerate(rows, 1):
        where = f"tier {number} of {len(rows)}"
        values = read_fields(MachineTier, row, where)
        if "name" not in values:
            raise ConfigError(f"{where} needs a name")
        tiers[values["name"]] = {name: values[name] for name in values if name not in _OF_THE_HARDWARE}
    device = read_fields(Device, content.get("device", {}), "device")
    device.pop("is_host", None)
    cache = read_fields(Cache, content.get("cache", {}), "cache")
    ssd = read_fields(MachineSsd, content.get("ssd") or {}, "ssd")
    return Overrides(tiers, device, cache, {name: ssd[name] for name in ssd if name in _OF_THE_DRIVES}, machine)
