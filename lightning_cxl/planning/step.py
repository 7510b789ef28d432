"""Predicted seconds: of an Adam update on the host, of a copy, and of one optimizer step (`predict_step`).

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

A step: resources work side by side: the device, each direction of its link, every memory tier. Each is busy with::

    compute    flops / device.flops
    link h2d   bytes / device.h2d_bytes_per_s, and a copy's latency per unit; link d2h alike
    tier       cpu / adam_bytes_per_s
               + max(read / device_read_bytes_per_s, written / device_write_bytes_per_s,
                     (read + written) / adam_bytes_per_s)

where ``read`` and ``written`` are copies of all devices and ``cpu`` is what the host's cores read and write. A phase
fetches, computes and writes back unit after unit, in a pipeline of stages that take F, C and W seconds in all, and
where several ranks gather weights and reduce gradients, G and R::

    F = max(link h2d, read of every tier)       W = soft maximum(link d2h, written of the slowest tier)
    phase = max((F + G + C + R + W) / units + (1 - 1 / units) * max(F, G, C, R, W), busiest shared + C / units)

The first term is such a pipeline's exact length when units are alike: its longest stage, and of the others one unit's
part, the fill and the drain. The second says that what may serve several stages, a tier, peer links or the network,
rests while one unit is computed.
`soft_maximum` is how writes of copies slow down, see above; a cache that takes in a copy's
writes does not help here, as a step writes many times its size.

What lies on the tier `ssd` visits memory to be updated, one visit after the other, each with all records of one unit:
one is read while another is updated and a third is written, reads and writes side by side, each at the speed of all
drives together. With R and V the seconds in which all of it is read and written, the update takes, as such a pipeline::

    update = (R + U + V) / visits + (1 - 1 / visits) * max(R, U, V)

where U is what it takes without that. Behind a backward or forward, reads and writes are two more resources of it, and
the phase takes no less than either. So are reads of weights that lie there, in every forward and backward. The
traffic of memory for these transfers is left out.

The update is a phase of its own (`Overlap` "none"), or it shares the resources of the backward or of the next forward,
except for one unit's part: the last unit's gradients are there only when the backward ends, and the first unit's
weights must be new before the forward starts. On a machine whose device is the host nothing is copied: the CPUs read
and write what would be. Several devices each do the job's copies and flops on an own link, and share tiers; the update
runs once, each rank that of its shards. A tier that another one backs uses that one's bandwidth.

A gather or a reduction takes as long as the busier of two ways, and its latencies::

    peer links    peer_bytes / peer_bytes_per_s          each device sends and receives at the same time
    network       network_bytes / network_bytes_per_s    so does each machine
                  + steps * latency                      of the network where machines take part, else of peer links

Where devices have no links to each other, what they exchange goes through host memory: out over the link of one device,
and in over that of another one. Where the CPU is the device, it is written and read by it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_cxl.config import SSD
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.tensors import Overlap
from lightning_cxl.machine.machine import Machine, MachineTier, Split, check_split
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.planning.job import SSD_MOVES, Job, Phase

ADAM_BYTES_PER_ELEMENT = 28
"""Of float32 Adam: 16 read, 12 written."""
_ADAM_STORED_BYTES = 16


def predict_adam_seconds(num_elements: int, split: Split, machine: Machine) -> float:
    """Return how long one float32 Adam update takes on the host, as a benchmark measures it.

    A benchmark updates the same arrays again and again, so that the cache still has a part of them. A training step
    touches each element once: the cache then matters only for what it happens to hold at the end, and
    `lightning_cxl.planning.step` leaves it out.

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


_PHASES: tuple[Phase, ...] = ("forward", "backward", "update")
_KINDS = ("h2d", "d2h", "cpu")
_NEAREST = 0
# The load of one phase is a flat list. Its parts begin at these places: seconds of compute; bytes on the link, to and
# from the device; bytes read from and written to drives; seconds of peer links and network for gathers, and for
# reductions; then for every tier the bytes copied to devices, copied from them, and moved by the CPUs.
_COMPUTE, _LINK, _SSD, _GATHER, _REDUCE, _TIERS = 0, 1, 3, 5, 7, 9


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a step."""

    seconds: float
    """Its part of the step."""
    resources: Mapping[str, float]
    """Seconds that each resource is busy: ``"compute"``, ``"link h2d"``, ``"link d2h"``, ``"tier <name>"``, and where
    state is on the tier `ssd`, ``"ssd read"`` and ``"ssd write"``; of several ranks ``"peer links"`` and
    ``"network"``."""

    @property
    def bound_by(self) -> str:
        """The resource that is busy longest; ``"nothing"`` for a phase without work."""
        name = max(self.resources, key=lambda each: self.resources[each])
        return name if self.resources[name] > 0 else "nothing"


@dataclass(frozen=True, slots=True)
class StepTime:
    """One optimizer step, phase by phase.

    A phase that the update hides behind has the update's work in its resources, all but one unit's; ``update`` then is
    that one unit's.
    """

    forward: PhaseTime
    backward: PhaseTime
    update: PhaseTime
    overlap: Overlap
    serial_seconds: float
    """Seconds of the same work if the update does not overlap."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.forward.seconds + self.backward.seconds + self.update.seconds

    @property
    def hidden_seconds(self) -> float:
        """Seconds that the overlap saves."""
        return self.serial_seconds - self.seconds

    def phases(self) -> dict[Phase, PhaseTime]:
        """Return the phases by name."""
        return {"forward": self.forward, "backward": self.backward, "update": self.update}

    def describe(self) -> str:
        """Return e.g. ``"forward 1.20 s (compute), backward 3.10 s (compute), update 0.81 s (tier dram0)"``."""
        text = ", ".join(f"{name} {each.seconds:.2f} s ({each.bound_by})" for name, each in self.phases().items())
        if self.overlap == "none":
            return text
        return f"{text}; the update overlaps the {self.overlap} and hides {self.hidden_seconds:.2f} s"


def predict_step(job: Job, splits: Mapping[TensorRole, Split], machine: Machine) -> StepTime:
    """Return how long one optimizer step takes.

    Capacities are not looked at: that is the policies' work. Drives whose speeds are not known count as if they took no
    time.

    Args:
        splits: where the others lie, by role; only classes that move anything need to be in it.
    """
    for split in splits.values():
        check_split(split, machine)
    return StepModel(job, machine).explain(splits)


class StepModel:
    """Predicts the step of one job on one machine for many splits; asking costs some ten microseconds.

    `seconds` is convex in the splits' fractions. It trusts them: `check_split` is the caller's.
    """

    def __init__(self, job: Job, machine: Machine) -> None:
        self._machine = machine
        self._overlap = job.overlap
        self._units = max(1, job.num_units)
        self._alone = 1.0 if job.overlap == "none" else 1 / self._units  # part of the update that nothing hides
        self._device = machine.device
        self._index = {name: machine.names.index(machine.tier(name).backed_by or name) for name in machine.names}
        self._speeds = [
            (1 / t.device_read_bytes_per_s, 1 / t.device_write_bytes_per_s, 1 / t.adam_bytes_per_s)
            for t in machine.tiers
        ]
        self._fixed = [[0.0] * (_TIERS + len(_KINDS) * len(machine.tiers)) for _ in _PHASES]
        self._fixed[0][_COMPUTE] = job.forward_flops / self._device.flops
        self._fixed[1][_COMPUTE] = job.backward_flops / self._device.flops
        self._has_exchanges = bool(job.exchanges)
        for phase, through_host in enumerate(self._exchange(job)):
            if through_host:
                ways = [self._copied(phase, kind, through_host) for kind in (0, 1)]
                self._add(self._fixed, ways, {machine.tiers[_NEAREST].name: 1.0})
        self._visits = max(1, job.num_visits)
        self._ssd_speeds = (0.0, 0.0)  # seconds per byte; as if it took no time where they are not known
        if machine.ssd is not None and machine.ssd.read_bytes_per_s and machine.ssd.write_bytes_per_s:
            self._ssd_speeds = (1 / machine.ssd.read_bytes_per_s, 1 / machine.ssd.write_bytes_per_s)
        self._free: dict[TensorRole, list[tuple[int, int, float]]] = {}
        for each in job.in_one_order():
            moves = []
            for move in each.moves:
                if move.kind in SSD_MOVES:
                    self._fixed[_PHASES.index(move.phase)][_SSD + SSD_MOVES.index(move.kind)] += move.nbytes
                    continue
                phase, kind = _PHASES.index(move.phase), _KINDS.index(move.kind)
                moves.append((phase, kind, move.nbytes) if kind == 2 else self._copied(phase, kind, move.nbytes))
            if each.tier is None:
                if moves:
                    self._free.setdefault(each.role, []).extend(moves)
            else:  # what is on drives is updated in memory, in slots
                tier = machine.tiers[_NEAREST] if each.tier == SSD else machine.tier(each.tier)
                self._add(self._fixed, moves, {tier.name: 1.0})

    def seconds(self, splits: Mapping[TensorRole, Split]) -> float:
        """Return the seconds of the whole step; see `predict_step`."""
        work, update = self._work(splits)
        return sum(map(self._seconds, work)) + self._alone * self._update_seconds(update)

    def explain(self, splits: Mapping[TensorRole, Split]) -> StepTime:
        """Return the whole step, phase by phase; see `predict_step`."""
        work, update = self._work(splits)
        forward, backward = (PhaseTime(self._seconds(load), self._resources(load)) for load in work)
        part = {name: busy * self._alone for name, busy in self._resources(update).items()}
        after = PhaseTime(self._alone * self._update_seconds(update), part)
        *others, update = self._loads(splits)
        serial = sum(map(self._seconds, others)) + self._update_seconds(update)
        return StepTime(forward, backward, after, self._overlap, serial)

    def _exchange(self, job: Job) -> list[float]:
        """Add the seconds of links that ranks use, and return bytes by phase that devices send through host memory."""
        links, through_host = self._machine.links, [0.0] * len(_PHASES)
        for each in job.exchanges:
            if each.network_bytes and links.network_bytes_per_s is None:
                raise ConfigError(
                    f"machines exchange data, and machine `{self._machine.name}` does not say how fast: give "
                    f"network_bytes_per_s under `links` in its file (--tiers), what one machine sends over all of its "
                    "adapters, such as `network_bytes_per_s: 50 GB/s`; examples/machines/eight_gpus.yaml has all links"
                )
            phase, crosses = _PHASES.index(each.phase), each.network_bytes > 0
            latency = each.steps * (links.network_latency_s if crosses else links.peer_latency_s)
            network = each.network_bytes / (links.network_bytes_per_s or 1.0) + latency if crosses else 0.0
            peer = 0.0 if crosses else latency
            if links.peer_bytes_per_s is None or self._device.is_host:
                through_host[phase] += each.peer_bytes
            else:
                peer += each.peer_bytes / links.peer_bytes_per_s
            way = _GATHER if each.kind == "gather" else _REDUCE
            self._fixed[phase][way] += peer
            self._fixed[phase][way + 1] += network
        return through_host

    def _work(self, splits: Mapping[TensorRole, Split]) -> tuple[list[list[float]], list[float]]:
        """Return the loads of forward and backward as they overlap with the update, and the update."""
        *loads, update = self._loads(splits)
        if self._overlap != "none":
            host = _PHASES.index(self._overlap)
            part = 1 - self._alone
            loads[host] = [own + part * extra for own, extra in zip(loads[host], update, strict=True)]
        return loads, update

    def _loads(self, splits: Mapping[TensorRole, Split]) -> list[list[float]]:
        loads = [list(each) for each in self._fixed]
        for role, moves in self._free.items():
            if role not in splits:
                raise ConfigError(
                    f"there is no split for {role.value}, which no rule places: "
                    f"got {', '.join(each.value for each in splits)}"
                )
            self._add(loads, moves, splits[role])
        return loads

    def _copied(self, phase: int, kind: int, nbytes: float) -> tuple[int, int, float]:
        """Return what copies of each device ask of tiers; the CPUs read and write it where the host is the device."""
        together = nbytes * self._device.count
        if self._device.is_host:
            return phase, 2, together
        self._fixed[phase][_LINK + kind] += nbytes
        return phase, kind, together

    def _add(self, loads: list[list[float]], moves: list[tuple[int, int, float]], split: Split) -> None:
        for tier, share in split.items():
            first = _TIERS + len(_KINDS) * self._index[tier]
            for phase, kind, nbytes in moves:
                loads[phase][first + kind] += share * nbytes

    def _seconds(self, load: list[float]) -> float:
        """Return what forward or backward takes; the formulas are the module's."""
        return max(self._seconds_in_memory(load), *self._ssd_seconds(load))

    def _update_seconds(self, load: list[float]) -> float:
        """Return what the update takes where nothing hides it."""
        stages = (self._seconds_in_memory(load), *self._ssd_seconds(load))
        return sum(stages) / self._visits + (1 - 1 / self._visits) * max(stages)

    def _ssd_seconds(self, load: list[float]) -> tuple[float, float]:
        return load[_SSD] * self._ssd_speeds[0], load[_SSD + 1] * self._ssd_speeds[1]

    def _exchange_seconds(self, load: list[float]) -> tuple[float, float]:
        return load[_GATHER] + load[_REDUCE], load[_GATHER + 1] + load[_REDUCE + 1]  # of peer links, and of the network

    def _seconds_in_memory(self, load: list[float]) -> float:
        compute = load[_COMPUTE]
        h2d, d2h = self._link_seconds(load)
        fetch, stored, busiest = h2d, 0.0, max(self._exchange_seconds(load))
        for index, (per_read, per_write, per_byte) in enumerate(self._speeds):
            first = _TIERS + len(_KINDS) * index
            read, written, cpu = load[first : first + len(_KINDS)]
            if read or written or cpu:
                reading, writing = read * per_read, written * per_write
                fetch = max(fetch, reading)
                stored = max(stored, writing)
                busiest = max(busiest, cpu * per_byte + max(reading, writing, (read + written) * per_byte))
        if self._device.is_host:
            return max(compute, busiest)
        store = soft_maximum(d2h, stored, self._machine.write_contention)
        gather, reduction = max(load[_GATHER : _GATHER + 2]), max(load[_REDUCE : _REDUCE + 2])
        stages = (fetch, gather, compute, reduction, store)
        pipeline = sum(stages) / self._units + (1 - 1 / self._units) * max(stages)
        return max(pipeline, busiest + compute / self._units)

    def _link_seconds(self, load: list[float]) -> tuple[float, float]:
        device, latency = self._device, self._device.copy_latency_s * self._units
        h2d, d2h = load[_LINK : _LINK + 2]
        return (
            h2d / device.h2d_bytes_per_s + latency if h2d else 0.0,
            d2h / device.d2h_bytes_per_s + latency if d2h else 0.0,
        )

    def _resources(self, load: list[float]) -> dict[str, float]:
        h2d, d2h = self._link_seconds(load)
        busy = {"compute": load[_COMPUTE]}
        if not self._device.is_host:
            busy |= {"link h2d": h2d, "link d2h": d2h}
        for index, (tier, (per_read, per_write, per_byte)) in enumerate(
            zip(self._machine.tiers, self._speeds, strict=True)
        ):
            if tier.backed_by is None:
                first = _TIERS + len(_KINDS) * index
                read, written, cpu = load[first : first + len(_KINDS)]
                copies = max(read * per_read, written * per_write, (read + written) * per_byte)
                busy[f"tier {tier.name}"] = cpu * per_byte + copies
        if self._has_exchanges:
            busy["peer links"], busy["network"] = self._exchange_seconds(load)
        if load[_SSD] or load[_SSD + 1]:
            busy["ssd read"], busy["ssd write"] = self._ssd_seconds(load)
        return busy
