"""`Wear`: what a run writes to the drives of the tier `ssd`, and how long a consumer drive would last.

Flash wears with every write. Makers rate a drive by the terabytes that may be written to it (TBW): 600 for consumer
drives of 1 TB such as Samsung's 990 PRO and Western Digital's WD_BLACK SN850X, by their data sheets. Drives for servers
are rated for 1 to 3 writes of the whole drive per day over five years, which is three to nine times as much.
"""

import logging
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.machine.machine import Machine
from lightning_cxl.machine.speeds import machine_of
from lightning_cxl.machine.topology import Topology
from lightning_cxl.planning.compare import can_predict
from lightning_cxl.planning.jobs.job import Job
from lightning_cxl.planning.jobs.model_job import model_job
from lightning_cxl.planning.jobs.step import predict_step

log = logging.getLogger(__name__)
RATED_DRIVE_WRITES = 600
"""How often all of a consumer drive may be written, by its rating."""
_DAY_S = 86400
_YEAR_DAYS = 365
_ADVICE = (
    'state="bf16" writes half as much of momentum and variance and state="8bit" a quarter; memory for more units keeps '
    "their state and weights off the drive; a larger drive lasts longer"
)


@dataclass(frozen=True, slots=True)
class Wear:
    """Bytes written to the tier `ssd`, and what they do to its drives."""

    written_bytes: float
    """In one step."""
    drive_bytes: int
    """Size of the drives together."""
    step_seconds: float | None = None
    """None where it is not known."""

    @property
    def drive_writes_per_day(self) -> float | None:
        """How often a day the drives are written as a whole; None where the seconds of a step are not known."""
        if not self.step_seconds:
            return None
        return self.written_bytes / self.step_seconds * _DAY_S / self.drive_bytes

    @property
    def rated_steps(self) -> float:
        """Steps after which consumer drives of this size have been written as often as they are rated for."""
        return RATED_DRIVE_WRITES * self.drive_bytes / self.written_bytes

    @property
    def rated_days(self) -> float | None:
        """Days of such steps after which that is so; None where the seconds of a step are not known."""
        return self.rated_steps * self.step_seconds / _DAY_S if self.step_seconds else None

    @property
    def wears_out(self) -> bool:
        """Whether that is within a year."""
        return self.rated_days is not None and self.rated_days < _YEAR_DAYS

    def describe(self) -> str:
        """Return e.g. ``"31.50 GB written per step, 2.27 drive writes per day: ..."``."""
        text = f"{self.written_bytes / 1e9:.3g} GB written per step"
        rating = f"a consumer drive, rated for {RATED_DRIVE_WRITES} TB per TB of its size, is worn out after"
        if self.rated_days is None or self.drive_writes_per_day is None:
            return f"{text}, {self.written_bytes / 1e9:.3g} TB per 1,000 steps: {rating} {self.rated_steps:,.0f} steps"
        days = self.rated_days
        lasts = f"{days:,.1f} days" if days < _YEAR_DAYS else f"{days / _YEAR_DAYS:,.1f} years"
        return f"{text}, {self.drive_writes_per_day:.3g} drive writes per day: {rating} {lasts} of such steps"

    def as_data(self) -> dict[str, Any]:
        """Return all of it as JSON-able data."""
        return {
            "written_bytes_per_step": self.written_bytes,
            "drive_bytes": self.drive_bytes,
            "drive_writes_per_day": self.drive_writes_per_day,
            "rated_steps": self.rated_steps,
            "rated_days": self.rated_days,
            "wears_out_within_a_year": self.wears_out,
        }


def wear_advice(wear: Wear) -> str:
    """Return the warning about a drive that would be worn out within a year."""
    return f"this would wear out a consumer drive within a year: {wear.describe()}. {_ADVICE}."


def predicted_wear(job: Job, machine: Machine | None, drive_bytes: int) -> Wear:
    """Return the wear of a run before it starts.

    Its step is predicted as if all memory were the nearest tier: the shortest that it can be. Without speeds, or where
    the size of a batch is not known, the seconds are not known.

    Args:
        job: with state on the tier `ssd`.
        machine: None where speeds are not known.
        drive_bytes: size of the drives.
    """
    seconds = None
    if machine is not None and job.num_tokens and can_predict(job, machine):
        nearest = {machine.tiers[0].name: 1.0}
        seconds = predict_step(job, dict.fromkeys(job.free_classes(), nearest), machine).seconds
    return Wear(job.ssd_written_bytes, drive_bytes, seconds)


def say_wear(inventory: Inventory, topology: Topology, device: torch.device, machine_file: str | None) -> None:
    """Say before a run what it writes: a warning where a consumer drive would be worn out within a year.

    Args:
        inventory: with state on the tier `ssd`.
        topology: has that tier.
        device: what computes.
        machine_file: see `machine_of`.
    """
    assert topology.ssd is not None
    machine = machine_of(topology, device, file=machine_file)
    if machine is not None:  # one process drives one of its devices
        machine = replace(machine, device=replace(machine.device, count=1))
    job = model_job(type(inventory.model).__name__, inventory).job
    if not job.ssd_written_bytes:
        return  # what is only read does not wear
    wear = predicted_wear(job, machine, topology.ssd.drive_bytes)
    if wear.wears_out:
        warnings.warn(wear_advice(wear), LightningCXLWarning, stacklevel=2)
    else:
        log.info(f"tier ssd: {wear.describe()}")
