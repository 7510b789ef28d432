"""Predicted seconds of single operations: an Adam update on the host, a copy between device and host memory.

Work that is split over tiers uses them side by side: the slowest one decides. With ``n`` elements, or ``N`` bytes, of
which tier ``t`` has the fraction ``share``, and all speeds from a `Machine`::

    Adam:  28 n bytes go through memory: weight, gradient, momentum and variance of 4 bytes are read, all but the
           gradient are written back. Of these, min(16 n, cache) * 28 / 16 are found in the cache.
           seconds = cached / cache rate + max over t of share * (28 n - cached) / adam_bytes_per_s

    h2d:   seconds = latency + max(N / link, devices * N * share / device_read_bytes_per_s)

    d2h:   seconds = latency + soft maximum(N / link, max over t of (devices * N * share - buffer)
                                                                     / device_write_bytes_per_s)

The soft maximum of t1 and t2 is (t1^p + t2^p)^(1/p) with p `Machine.write_contention`: reads were measured to take what
the slower of link and tier takes, but writes take longer than that where both are about equally fast.

What was measured on the machine of arXiv 2507.03305 (its authors' raw data: github.com/DandinPower,
numa-cpu-adam-bench and numa-gpu-xfer-bench) is met within 4 % from 64 M elements and 64 MiB on, one process, one or two
devices; ``examples/machines/paper_a.yaml`` says how each constant was found. The measurements are in
``tests/unit/planning/jobs/test_perf.py``. Smaller sizes stay in caches or are dominated by the start of threads, and
are predicted too fast.
"""

import math
from typing import Literal

from lightning_cxl.machine.machine import Machine, MachineTier, Split, check_split
from lightning_cxl.machine.machine_file import load_machine

__all__ = ["ADAM_BYTES_PER_ELEMENT", "load_machine", "predict_adam_seconds", "predict_copy_seconds", "soft_maximum"]

ADAM_BYTES_PER_ELEMENT = 28
"""Of float32 Adam: 16 read, 12 written."""
_ADAM_STORED_BYTES = 16


def predict_adam_seconds(num_elements: int, split: Split, machine: Machine) -> float:
    """Return how long one float32 Adam update takes on the host, as a benchmark measures it.

    A benchmark updates the same arrays again and again, so that the cache still has a part of them. A training step
    touches each element once: the cache then matters only for what it happens to hold at the end, and
    `lightning_cxl.planning.jobs.step` leaves it out.

    Args:
        num_elements: of the parameters.
        split: the fraction of the elements on each tier.
        machine: with the tiers that `split` names.

    Raises:
        TierNotFoundError: a tier that the machine does not have.
        ValueError: a negative number, or fractions that do not add up to 1.
    """
    _check_count("num_elements", num_elements)
    total = ADAM_BYTES_PER_ELEMENT * num_elements
    cache = machine.cache
    cached = min(_ADAM_STORED_BYTES * num_elements, cache.nbytes) * ADAM_BYTES_PER_ELEMENT / _ADAM_STORED_BYTES
    slowest = max(share / tier.adam_bytes_per_s for tier, share in _by_memory(split, machine))
    return cached / cache.bytes_per_s + (total - cached) * slowest


def predict_copy_seconds(
    num_bytes: int, split: Split, machine: Machine, direction: Literal["h2d", "d2h"] = "h2d", num_devices: int = 1
) -> float:
    """Return how long a copy of page-locked host memory takes.

    Args:
        num_bytes: of each device.
        split: the fraction of the bytes on each tier.
        machine: with the tiers that `split` names.
        direction: to the device or from it.
        num_devices: so many devices copy as much at the same time, each over a link of its own.

    Raises:
        TierNotFoundError: a tier that the machine does not have.
        ValueError: a negative number, an unknown direction, no device, or fractions that do not add up to 1.
    """
    _check_count("num_bytes", num_bytes)
    if direction not in ("h2d", "d2h"):
        raise ValueError(f'direction must be "h2d" or "d2h", got {direction!r}')
    if num_devices < 1:
        raise ValueError(f"num_devices must be at least 1, got {num_devices}")
    parts = [(tier, num_devices * num_bytes * share) for tier, share in _by_memory(split, machine)]
    if num_bytes == 0:
        return 0.0
    device = machine.device
    if direction == "h2d":
        reads = [nbytes / tier.device_read_bytes_per_s for tier, nbytes in parts]
        return device.copy_latency_s + max(num_bytes / device.h2d_bytes_per_s, *reads)
    writing = max(max(0.0, nbytes - t.device_write_buffer_bytes) / t.device_write_bytes_per_s for t, nbytes in parts)
    return device.copy_latency_s + soft_maximum(num_bytes / device.d2h_bytes_per_s, writing, machine.write_contention)


def soft_maximum(first: float, second: float, sharpness: float) -> float:
    """Return the `sharpness`-norm of two durations: at least the longer one, more if they are about equally long."""
    shorter, longer = sorted((first, second))
    if shorter <= 0 or math.isinf(sharpness):
        return longer
    return float(longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness))


def _by_memory(split: Split, machine: Machine) -> list[tuple[MachineTier, float]]:
    """Return the tiers whose memory is used, with their fractions; tiers that another one backs count for that one."""
    check_split(split, machine)
    shares: dict[str, float] = {}
    for name, share in split.items():
        memory = machine.tier(name).backed_by or name
        shares[memory] = shares.get(memory, 0.0) + share
    return [(machine.tier(name), share) for name, share in shares.items()]


def _check_count(name: str, value: int) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value}")
