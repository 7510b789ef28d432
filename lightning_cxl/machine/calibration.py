"""Speeds measured on a machine, and the cache that keeps them: `Calibration`, written by the command ``calibrate``."""

import json
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_cxl.cache import cache_folder
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.machine.fingerprint import describe_machine, fingerprint
from lightning_cxl.machine.reader import Positive, Rate, Size, read
from lightning_cxl.machine.topology import Topology

QUIET_FRACTION = 0.03
"""When other processes take more than this part of the CPU time, measured numbers are doubtful."""
_VERSION = 1  # of the files; change it when fields change their names or meaning


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpeeds:
    """One NUMA node, used by all CPUs of the process and by all devices."""

    node_id: int
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    """With stores that do not read the lines first, as a device writes."""
    adam_bytes_per_s: Rate
    """Bytes read and written per second, 16 to 12."""
    latency_ns: Positive
    """Of a load, from the nearest CPU."""
    h2d_bytes_per_s: Rate | None = None
    """All devices together; None without a device."""
    d2h_bytes_per_s: Rate | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpeeds:
    """One device, alone; the CPU has no copies."""

    kind: str
    """``"cpu"``, ``"cuda"`` or another type of ``torch.device``."""
    name: str
    flops: Positive
    """Of bf16 matrix products, the fastest size."""
    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    copy_latency_s: Positive | None = None
    """A copy of a few bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdSpeeds:
    """Large sequential accesses to one folder."""

    folder: str
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    direct: bool
    """Past the page cache; False where the file system cannot do that, then the numbers are partly memory's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """All that was measured in one run."""

    date: str
    """Day, as in ``2026-01-31``."""
    num_threads: int
    nodes: tuple[NodeSpeeds, ...]
    devices: tuple[DeviceSpeeds, ...]
    cache_bytes: Size
    """Last-level caches of the CPUs this process may use; 0 where the kernel does not tell."""
    cache_bytes_per_s: Rate | None = None
    """Adam's mix, over and over the same quarter of them."""
    ssds: tuple[SsdSpeeds, ...] = ()
    others_fraction: float = 0.0
    """Part of the machine's CPU time that other processes took meanwhile."""

    @property
    def origin(self) -> str:
        """What is said of numbers that come from here. Too few threads, or other processes, show in all of them."""
        text = f"calibration of {self.date} with {self.num_threads} threads"
        return text + (f", beside others that took {self.others_fraction:.0%} of the CPU time" if self.doubtful else "")

    @property
    def doubtful(self) -> bool:
        """Whether other processes disturbed it."""
        return self.others_fraction > QUIET_FRACTION

    def node(self, node_id: int) -> NodeSpeeds | None:
        """Return the speeds of a node, None when it was not measured."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def device(self, kind: str, index: int = 0) -> DeviceSpeeds | None:
        """Return the speeds of a device, None when it was not measured."""
        found = [device for device in self.devices if device.kind == kind]
        return found[index] if index < len(found) else None


def calibration_path(topology: Topology, devices: Sequence[str]) -> Path:
    """Return where the calibration of a machine is kept, whether there is one or not."""
    return cache_folder() / "calibration" / f"{fingerprint(describe_machine(topology, devices))}.json"


def save_calibration(calibration: Calibration, topology: Topology, devices: Sequence[str]) -> Path:
    """Keep what was measured on this machine; readers see the old file or the new one, whole.

    Returns:
        The file.
    """
    path = calibration_path(topology, devices)
    content = {"version": _VERSION, "machine": describe_machine(topology, devices), "speeds": asdict(calibration)}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise
    return path


def load_calibration(topology: Topology, devices: Sequence[str]) -> Calibration | None:
    """Return what was measured on this very machine; None when nothing was, or the machine is invented.

    A file that cannot be used is left out with a warning.
    """
    if topology.root is None:
        return None
    path = calibration_path(topology, devices)
    try:
        content = json.loads(path.read_text())
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}, this program writes {_VERSION}")
        if content["machine"] != describe_machine(topology, devices):
            raise ValueError("it is of another machine")
        return read(Calibration, content["speeds"], "what was measured")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        warnings.warn(
            f"the measured speeds in {path} are not used ({type(error).__name__}: {error}). Measure again: `python -m "
            "lightning_cxl calibrate`.",
            LightningCXLWarning,
            stacklevel=2,
        )
        return None
