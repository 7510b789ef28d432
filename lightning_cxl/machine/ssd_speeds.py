"""`ssd_of`: the tier `ssd` of this machine, with the speeds that are known of its drives."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_cxl.machine.calibration import Calibration, SsdSpeeds
from lightning_cxl.machine.disk_space import drive_of, existing_folder
from lightning_cxl.machine.machine import MachineSsd
from lightning_cxl.machine.machine_file import Overrides
from lightning_cxl.machine.topology import Topology


def ssd_of(topology: Topology, calibration: Calibration | None, overrides: Overrides) -> MachineSsd | None:
    """Return the tier `ssd` of a topology; None where it has none.

    Speeds are those of a user's file, else those that ``calibrate --ssd`` has measured in the tier's folders, or
    elsewhere on the same drives. Parts of a record are read and written on all drives at once, so the slowest drive
    decides. Nothing is known as long as one drive was not measured.
    """
    tier = topology.ssd
    if tier is None:
        return None
    values: dict[str, Any] = {} if calibration is None else _measured(tier.folders, calibration.ssds)
    values |= overrides.ssd
    values["capacity_bytes"] = min(tier.capacity_bytes, overrides.ssd.get("capacity_bytes", tier.capacity_bytes))
    return MachineSsd(num_drives=len(tier.folders), versions=tier.versions, **values)


def ssd_origin(ssd: MachineSsd, calibration: Calibration | None, overrides: Overrides) -> str:
    """Return where the speeds of a tier `ssd` that `ssd_of` has made come from."""
    if not ssd.has_speeds:
        return "unknown"
    from_file = [name in overrides.ssd for name in ("read_bytes_per_s", "write_bytes_per_s")]
    origins = ["file"] if any(from_file) else []
    return " and ".join(origins + ([calibration.origin] if calibration is not None and not all(from_file) else []))


def _measured(folders: Sequence[Path], ssds: Sequence[SsdSpeeds]) -> dict[str, float]:
    drives = [drive_of(existing_folder(folder)) for folder in folders]
    sharing = Counter(drives)
    reads, writes = [], []
    for folder, drive in zip(folders, drives, strict=True):
        found = _speeds_of(folder, drive, ssds)
        if found is None:
            return {}
        reads.append(found.read_bytes_per_s / sharing[drive])
        writes.append(found.write_bytes_per_s / sharing[drive])
    return {"read_bytes_per_s": len(folders) * min(reads), "write_bytes_per_s": len(folders) * min(writes)}


def _speeds_of(folder: Path, drive: int, ssds: Sequence[SsdSpeeds]) -> SsdSpeeds | None:
    """Return what was measured in a folder, else elsewhere on its drive."""
    there = [each for each in ssds if Path(each.folder).is_dir() and drive_of(Path(each.folder)) == drive]
    return next((each for each in there if Path(each.folder) == folder.resolve()), next(iter(there), None))
