"""`SsdOptions`: what a user says about the tier `ssd`, whose bytes lie in files and not in memory."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lightning_cxl.errors import ConfigError
from lightning_cxl.units import parse_bytes

SSD = "ssd"
"""Name of the one tier that has a path."""
SsdCheckpoint = Literal["copy", "reference"]
_EXAMPLE = '{"ssd": {"path": "/nvme/run", "budget": "1TiB"}}'
_OPTIONS = ("path", "budget", "checkpoint")


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """Where the tier `ssd` lies, and how much of it may be used."""

    paths: tuple[Path, ...]
    """One folder per drive; every record is cut evenly over them."""
    budget_bytes: int | None = None
    """Most bytes on all drives together. None: what is free there."""
    checkpoint: SsdCheckpoint = "copy"
    """``"copy"``: a checkpoint has the state in it. ``"reference"``: it names the version of the state on the drives,
    which is kept until the next checkpoint."""
    is_part: bool = False
    """Whether the folders are those of one of several processes, below the ones that the user has named."""

    @property
    def versions(self) -> int:
        """How often every byte lies on the drives: a version that a checkpoint refers to stays beside the new one."""
        return 2 if self.checkpoint == "reference" else 1


def read_ssd_options(value: object) -> SsdOptions:
    """Return the options of the tier `ssd` as a user writes them in `tiers`."""
    if isinstance(value, Mapping) and "key" in value:  # first: the other messages show the value
        raise ConfigError(
            'tiers: "ssd" has no option "key" any more: this package does not encrypt. Put the folder on a filesystem '
            "that is encrypted, with LUKS (`cryptsetup`) or `fscrypt`, and leave the key out"
        )
    if not isinstance(value, Mapping) or "path" not in value:
        raise ConfigError(f'tiers: "ssd" needs a path, the folder of its files, as in {_EXAMPLE}; got {value!r}')
    unknown = sorted(str(name) for name in value if name not in _OPTIONS)
    if unknown:
        raise ConfigError(
            f'tiers: "ssd" has no option {", ".join(map(repr, unknown))}; its options are {", ".join(_OPTIONS)}'
        )
    checkpoint = value.get("checkpoint", "copy")
    if checkpoint not in ("copy", "reference"):
        raise ConfigError(f'tiers: checkpoint of "ssd" must be "copy" or "reference", got {checkpoint!r}')
    budget = value.get("budget")
    try:
        nbytes = None if budget is None else parse_bytes(budget)
    except ValueError as error:
        raise ConfigError(f'tiers: the budget of "ssd": {error}') from None
    return SsdOptions(_paths(value["path"]), nbytes, checkpoint)


def _paths(value: object) -> tuple[Path, ...]:
    paths = []
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if not isinstance(each, str) or not each:
            raise ConfigError(f'tiers: path of "ssd" must be a folder, or a list with one on each drive, got {value!r}')
        paths.append(Path(os.path.abspath(os.path.expanduser(each))))
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError(f'tiers: path of "ssd" must name at least one folder, and none twice, got {value!r}')
    return tuple(paths)
