"""What a user says about this machine: a YAML file with some fields of some tiers, which win over everything else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.machine import Cache, Device, Machine, MachineTier
from lightning_cxl.machine.machine_file import read_fields

_OF_THE_HARDWARE = ("name", "kind", "num_nodes", "backed_by")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Fields by tier, of the device, of the cache, and of the machine itself; only those that a file gives."""

    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    cache: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def load_overrides(path: str | Path) -> Overrides:
    """Read some fields of a machine, written as in a machine file (`lightning_cxl.machine.machine_file`).

    For example::

        tiers:
          - {name: cxl, adam_bytes_per_s: 60 GB/s, capacity_bytes: 200GiB}
        device: {flops: 4.0e+14}

    A whole machine file will do, too. What a tier is made of, and whether the device is the host, is left out: the
    machine knows that itself.

    Raises:
        ConfigError: no such file, no YAML, or something in it that is no field or value; the message names the fields.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read speeds from {path}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    try:
        return _overrides({} if content is None else content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _overrides(content: object) -> Overrides:
    parts = {"tiers", "device", "cache"}
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
    return Overrides(tiers, device, read_fields(Cache, content.get("cache", {}), "cache"), machine)
