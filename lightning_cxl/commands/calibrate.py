"""``python -m lightning_cxl calibrate``: measures how fast memory, caches, devices and disks are, and keeps it."""

import datetime
import errno
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_cxl.commands import parsers
from lightning_cxl.commands.measuring import (
    Contender,
    Roof,
    Stream,
    Timings,
    cpu_seconds,
    machine_facts,
    measure,
    others_fraction,
    read,
    update,
    write,
)
from lightning_cxl.commands.parsers import check_target, write_text
from lightning_cxl.devices.device_type import devices_apart
from lightning_cxl.errors import ConfigError, LightningCXLError, TierFullError
from lightning_cxl.machine.machine import save_machine
from lightning_cxl.machine.nodes import nearest_cpu_nodes, parse_id_list, read_text, usable_cpus
from lightning_cxl.machine.speeds import (
    Calibration,
    DeviceSpeeds,
    NodeSpeeds,
    SsdSpeeds,
    cpu_model,
    machine_of,
    save_calibration,
)
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.host_memory import Pinner, make_pinner
from lightning_cxl.memory.resource import PAGE_BYTES, MemoryResource, NumaResource
from lightning_cxl.native import _cpu, _membench
from lightning_cxl.ssd_options import SsdOptions
from lightning_cxl.tables import table_lines
from lightning_cxl.transfer.engine import HostEngine, TransferEngine, make_engine
from lightning_cxl.units import format_bytes, parse_bytes

READ, WRITE, ADAM = "read", "write", "Adam's mix"
H2D, D2H = "h2d", "d2h"
_CACHES = 4  # a buffer is so many times as large: then at most a quarter of its bytes come from the last sweep
_SMALLEST_BYTES = 64 << 20
_FEW_BYTES = 4096
_BLOCK_BYTES = 16 << 20
_IN_FLIGHT = 4  # blocks; a disk alone with one request at a time waits for the next
_SSD_ROUNDS = 3
_SCALES = {"B/s": (1e-9, "GB/s"), "FLOP/s": (1e-12, "TFLOP/s"), "ns": (1.0, "ns"), "s": (1e6, "us")}


class Figure(NamedTuple):
    """A median, and how far the fastest and the slowest round are apart in medians."""

    value: float
    spread: float


class Row(NamedTuple):
    """One number to show; its unit is one of `_SCALES`."""

    name: str
    unit: str
    figure: Figure


class NamedEngine(NamedTuple):
    """A device's name, and the engine that copies to it."""

    name: str
    engine: TransferEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Sizes and rounds. Buffers for memory have at least four times the caches, whatever is said here."""

    rounds: int = 9
    node_bytes: int = 1 << 30  # for bandwidths; a long sweep hides how threads start
    chase_bytes: int = 512 << 20  # for latency; 64 MiB exceed the caches, more the second level of TLBs, too
    chase_steps: int = 300_000
    copy_bytes: int = 256 << 20  # a link is at its full speed from 32 MiB on
    matmul_sizes: tuple[int, ...] = (1024, 2048, 4096, 8192)
    matmul_seconds: float = 1.0  # sizes that would take longer are left out; small ones tell more of starting
    ssd_bytes: int = 4 << 30


QUICK = Options(
    rounds=3,
    node_bytes=64 << 20,
    chase_bytes=64 << 20,
    chase_steps=100_000,
    copy_bytes=32 << 20,
    matmul_seconds=0.1,
    ssd_bytes=256 << 20,
)


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments ask for, print a table, and keep the result."""
    args = parsers.calibrate().parse_args(arguments)
    check_target(args.json)
    check_target(args.output)
    for folder in args.ssd:
        check_ssd(folder)
    start, busy = time.perf_counter(), cpu_seconds()
    topology, devices = Topology.detect(), devices_apart()
    engines = [NamedEngine(f"{each.name} {i}", make_engine(each.device)) for i, each in enumerate(devices)]
    threads = torch.get_num_threads()
    torch.set_num_threads(_cpu.available_threads())
    try:
        calibration, rows = measure_machine(topology, engines, QUICK if args.quick else Options(), ssds=args.ssd)
    finally:
        torch.set_num_threads(threads)
    calibration = replace(calibration, others_fraction=others_fraction(busy, cpu_seconds()))
    shown = []
    for name, unit, figure in rows:
        scale, shown_unit = _SCALES[unit]
        shown.append((name, f"{figure.value * scale:.2f}", shown_unit, f"{figure.spread:.0%}"))
    print("\n".join(table_lines(("", "", "", "spread"), shown, indent=2)))
    if calibration.doubtful:
        print(
            f"  doubtful: other processes took {calibration.others_fraction:.0%} of the CPU time meanwhile; measure "
            "again without them"
        )
    kept = save_calibration(calibration, topology, [each.name for each in devices])
    print(f"\n{time.perf_counter() - start:.0f} s; kept in {kept}")
    if args.json:
        write_text(args.json, json.dumps({"machine": machine_facts(), "rows": _rows_data(rows)}, indent=1))
    if args.output:
        drives = tuple(folder.resolve() for folder in args.ssd)
        described = topology.with_ssd(SsdOptions(drives)) if drives else topology
        found = machine_of(described, devices[0].device.type if devices else "cpu")
        if found is None:
            raise LightningCXLError(
                f"{args.output} was not written: not every node could be measured, see above. Free memory on the "
                "others and measure again."
            )
        save_machine(found, args.output)
        print(f"written: {args.output}")


def _rows_data(rows: Sequence[Row]) -> list[dict[str, Any]]:
    numbers = [(name, figure.value, unit) for name, unit, figure in rows]
    spreads = [(f"{name}, spread", figure.spread, "x median") for name, _, figure in rows]
    pairs = [each for pair in zip(numbers, spreads, strict=True) for each in pair]
    return [{"name": name, "value": v, "unit": unit, "goal": None, "holds": None} for name, v, unit in pairs]


def measure_machine(
    topology: Topology,
    engines: Sequence[NamedEngine],
    options: Options,
    *,
    ssds: Sequence[Path] = (),
    pin: Pinner | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Calibration, list[Row]]:
    """Measure memory, caches, devices and disks.

    Args:
        pin: page-locks memory that devices copy from and to; None leaves it to the driver.
    """
    caches = Caches(frozenset(os.sched_getaffinity(0)), topology.root or Path("/"))
    rows: list[Row] = []
    found = measure_nodes(topology, options, caches, say)
    node_ids = sorted({node_id for node_id, _ in found})
    if not node_ids:
        raise TierFullError("no node has room for a measurement: see above. Free memory, and measure again.")
    latency = measure_latency(topology, options, caches, node_ids)
    copies = None
    if engines:  # a copy from memory that is not page-locked would measure something else
        pin = pin or make_pinner(topology, required=True)
        copies = measure_copies(topology, [each.engine for each in engines], options, node_ids, pin)
    nodes = []
    for node_id in node_ids:
        together = {} if copies is None else {way: copies.together[node_id, way] for way in (H2D, D2H)}
        rows += [Row(f"node {node_id}, {way}", "B/s", found[node_id, way]) for way in (READ, WRITE, ADAM)]
        rows.append(Row(f"node {node_id}, latency", "ns", latency[node_id]))
        rows += [Row(f"node {node_id}, all devices, {way}", "B/s", figure) for way, figure in together.items()]
        nodes.append(
            NodeSpeeds(
                node_id=node_id,
                read_bytes_per_s=found[node_id, READ].value,
                write_bytes_per_s=found[node_id, WRITE].value,
                adam_bytes_per_s=found[node_id, ADAM].value,
                latency_ns=latency[node_id].value,
                **{f"{way}_bytes_per_s": figure.value for way, figure in together.items()},
            )
        )
    cached = measure_cache(caches, options)
    if cached is not None:
        rows.append(Row("caches, Adam's mix", "B/s", cached))
    host = NamedEngine(f"cpu, {_cpu.available_threads()} threads", HostEngine())
    devices = [_device(host, None, None, options, rows)]
    devices += [_device(each, copies, index, options, rows) for index, each in enumerate(engines)]
    calibration = Calibration(
        date=datetime.date.today().isoformat(),
        num_threads=_cpu.available_threads(),
        nodes=tuple(nodes),
        devices=tuple(devices),
        cache_bytes=caches.all_bytes,
        cache_bytes_per_s=None if cached is None else cached.value,
        ssds=tuple(_ssd(folder, options, say, rows) for folder in ssds),
    )
    return calibration, rows


def _device(
    device: NamedEngine, copies: "Copies | None", index: int | None, options: Options, rows: list[Row]
) -> DeviceSpeeds:
    """Measure a device's arithmetic and put it together with its copies from the node that is fastest for it."""
    flops = measure_flops(device.engine, options)
    rows += [Row(f"{device.name}, bf16 product of size {size}", "FLOP/s", figure) for size, figure in flops.items()]
    links: dict[str, float] = {}
    if copies is not None and index is not None:
        alone = [(key, figure) for key, figure in copies.alone.items() if key[0] == index]
        rows += [Row(f"{device.name}, node {node}, {way}", "B/s", figure) for (_, node, way), figure in alone]
        rows.append(Row(f"{device.name}, copy of 4 KiB", "s", copies.latency_s[index]))
        for way in (H2D, D2H):
            links[f"{way}_bytes_per_s"] = max(figure.value for (_, _, each), figure in alone if each == way)
        links["copy_latency_s"] = copies.latency_s[index].value
    return DeviceSpeeds(
        kind=device.engine.device.type if index is not None else "cpu",
        name=device.name if index is not None else cpu_model(),
        flops=max(figure.value for figure in flops.values()),
        **links,
    )


def _ssd(folder: Path, options: Options, say: Callable[[str], None], rows: list[Row]) -> SsdSpeeds:
    read, write, direct = measure_ssd(folder, options.ssd_bytes)
    if not direct:
        say(f"{folder}: its file system cannot read and write past the page cache (O_DIRECT), so memory takes part")
    rows += [Row(f"{folder}, read", "B/s", read), Row(f"{folder}, write", "B/s", write)]
    speeds = {"read_bytes_per_s": read.value, "write_bytes_per_s": write.value}
    return SsdSpeeds(folder=str(folder.resolve()), direct=direct, **speeds)


def _speed(timings: Timings, name: str) -> Figure:
    return Figure(timings.traffic_bytes[name] / timings.median(name), timings.spread(name))


# Memory and caches: every node read, written, updated as Adam does it, and followed load by load.


class Caches:
    """Sizes of the last-level caches of some CPUs."""

    def __init__(self, cpus: frozenset[int], root: Path = Path("/")) -> None:
        sizes: dict[tuple[int, ...], int] = {}
        for cpu in cpus:
            found = [
                (int(level), shared, size)
                for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))
                if (level := read_text(index / "level"))
                and (size := read_text(index / "size"))
                and (shared := read_text(index / "shared_cpu_list"))
                and read_text(index / "type") != "Instruction"
            ]
            if found:
                _, shared, size = max(found)
                sizes[parse_id_list(shared)] = parse_bytes(size + "iB")  # the kernel writes 32768K
        self.largest_bytes = max(sizes.values(), default=0)
        self.all_bytes = sum(sizes.values())


def _node_resources(topology: Topology) -> dict[int, MemoryResource]:
    real = [tier for tier in topology.tiers if not tier.emulated]
    return {node_id: NumaResource(tier.name, node_id, topology) for tier in real for node_id in tier.node_ids}


def room_bytes(topology: Topology, node_id: int, wanted: int, *, parts: int = 1) -> int:
    """Return how much of a node to take: `wanted`, less where that is more than half of what is free.

    Args:
        parts: buffers of that size that exist at the same time, on all nodes.
    """
    free = topology.node_free_bytes(node_id)
    room = min(wanted, free // (2 * parts))
    if room < min(wanted, _SMALLEST_BYTES):
        raise TierFullError(
            f"node {node_id} cannot be measured: {format_bytes(free)} are free, and {parts} buffers of at least "
            f"{format_bytes(min(wanted, _SMALLEST_BYTES))} are needed at a time, half of the memory left to others. "
            "Free memory on that node."
        )
    return room // PAGE_BYTES * PAGE_BYTES


def measure_nodes(
    topology: Topology, options: Options, caches: Caches, say: Callable[[str], None] = print
) -> dict[tuple[int, str], Figure]:
    """Return bytes per second by node and access. Nodes take turns; one that is too full is left out, with a line."""
    resources, threads = _node_resources(topology), _cpu.available_threads()
    contenders: list[Contender] = []
    keys: dict[str, tuple[int, str]] = {}
    for node_id, resource in resources.items():
        wanted = max(options.node_bytes, _CACHES * caches.all_bytes)
        try:
            nbytes = room_bytes(topology, node_id, wanted, parts=len(resources))
            memory = resource.allocate(nbytes).tensor((nbytes,), torch.uint8)
        except TierFullError as error:
            say(f"left out: {error}")
            continue
        if nbytes < wanted:
            say(f"node {node_id}: only {format_bytes(nbytes)} instead of {format_bytes(wanted)}, caches may help")
        for access, streams in _accesses(memory).items():
            name = f"node {node_id} {access}"
            keys[name] = node_id, access
            contenders.append(_sweep(name, streams, threads, memory))
    if not contenders:
        return {}
    timings = measure(contenders, options.rounds)
    return {key: _speed(timings, name) for name, key in keys.items()}


def measure_cache(caches: Caches, options: Options) -> Figure | None:
    """Return bytes per second of Adam's mix in a quarter of the last-level caches; None where they are not known."""
    nbytes = caches.all_bytes // 4
    if nbytes == 0:
        return None
    memory = torch.zeros(nbytes + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][:nbytes]
    sweep = _sweep(ADAM, _accesses(memory)[ADAM], _cpu.available_threads(), memory)
    return _speed(measure([sweep], options.rounds), ADAM)


def _accesses(memory: torch.Tensor) -> Mapping[str, list[Stream]]:
    weights, momentum, variance, gradient = memory.view(4, -1).unbind()  # all float32
    return {
        READ: [read(memory)],
        WRITE: [write(memory)],
        ADAM: [update(weights), update(momentum), update(variance), read(gradient)],
    }


def _sweep(name: str, streams: list[Stream], threads: int, memory: torch.Tensor) -> Contender:
    traffic = sum(stream.nbytes for stream in streams)
    if name.endswith(ADAM):
        traffic += sum(stream.nbytes for stream in streams[:3])

    def make(memory: torch.Tensor = memory) -> Callable[[], object]:  # keeps the memory alive
        return Roof([streams], threads)

    return Contender(name, make, traffic_bytes=traffic)


class Chase:
    """A walk through all cache lines of a memory in random order, each load after the one before; call it to go on.

    It goes on where it was, so a line comes again only after all others: no cache has it any longer.

    Args:
        memory: a power of two of bytes, at least one line; written.
    """

    def __init__(self, memory: torch.Tensor, steps: int, cpus: tuple[int, ...] | None = None) -> None:
        lines = memory.view(torch.int64).view(-1, _membench.LINE_WORDS)
        order = torch.randperm(len(lines))
        lines[order, 0] = order.roll(-1)
        self._links: Any = memory.view(torch.uint64).numpy()
        self._steps, self._cpus = steps, cpus
        self.line = 0

    def __call__(self) -> None:
        """Follow the next `steps` links."""
        before = os.sched_getaffinity(0)
        try:
            if self._cpus is not None:
                os.sched_setaffinity(0, self._cpus)  # of this thread
            self.line = _membench.chase(self._links, self.line, self._steps)
        finally:
            os.sched_setaffinity(0, before)


def measure_latency(topology: Topology, options: Options, caches: Caches, node_ids: list[int]) -> dict[int, Figure]:
    """Return nanoseconds per load by node, from a CPU that is nearest to it, through huge pages where there are any."""
    root = topology.root or Path("/")
    cpus = usable_cpus(root)
    nearest, resources = nearest_cpu_nodes(root, frozenset(cpus)), _node_resources(topology)
    contenders = []
    for node_id in node_ids:
        wanted = 1 << (max(options.chase_bytes, _CACHES * caches.largest_bytes) - 1).bit_length()
        nbytes = 1 << room_bytes(topology, node_id, wanted, parts=len(node_ids)).bit_length() - 1
        memory = resources[node_id].allocate(nbytes).tensor((nbytes,), torch.uint8)
        run_on = cpus.get(nearest.get(node_id, node_id))
        contenders.append(Contender(str(node_id), partial(Chase, memory, options.chase_steps, run_on)))
    timings, scale = measure(contenders, options.rounds), 1e9 / options.chase_steps
    return {n: Figure(timings.median(str(n)) * scale, timings.spread(str(n))) for n in node_ids}


# Devices: copies from and to every node, each device alone and all together, and bf16 matrix products.


class Copies(NamedTuple):
    """Speeds of copies: devices by their number in the list of engines, nodes by their id."""

    alone: Mapping[tuple[int, int, str], Figure]  # bytes per second by device, node and direction
    together: Mapping[tuple[int, str], Figure]  # of all devices at the same time, by node and direction
    latency_s: Mapping[int, Figure]  # of a copy of a few bytes, by device


class _Job(NamedTuple):
    engine: TransferEngine
    device: torch.Tensor
    host: torch.Tensor
    direction: str


def measure_copies(
    topology: Topology, engines: Sequence[TransferEngine], options: Options, node_ids: Sequence[int], pin: Pinner
) -> Copies:
    """Measure copies of every node and device, in turns."""
    resources = _node_resources(topology)
    alone: dict[str, tuple[int, int, str]] = {}
    together: dict[str, tuple[int, str]] = {}
    contenders: list[Contender] = []
    on_device = [torch.empty(options.copy_bytes, dtype=torch.uint8, device=engine.device) for engine in engines]
    for node_id in node_ids:
        nbytes = options.copy_bytes * len(engines)
        host = pin(resources[node_id]).allocate(nbytes).tensor((len(engines), options.copy_bytes), torch.uint8)
        for direction in (H2D, D2H):
            jobs = [_Job(*job, direction) for job in zip(engines, on_device, host, strict=True)]
            for index, job in enumerate(jobs):
                name = f"node {node_id} device {index} {direction}"
                alone[name] = index, node_id, direction
                contenders.append(_copying(name, [job]))
            name = f"node {node_id} {direction}"
            together[name] = node_id, direction
            contenders.append(_copying(name, jobs))
    for index, (engine, device) in enumerate(zip(engines, on_device, strict=True)):
        few = host[index, :_FEW_BYTES]
        contenders.append(_copying(f"device {index}", [_Job(engine, device[:_FEW_BYTES], few, H2D)]))
    timings = measure(contenders, options.rounds)
    return Copies(
        {key: _speed(timings, name) for name, key in alone.items()},
        {key: _speed(timings, name) for name, key in together.items()},
        {i: Figure(timings.median(f"device {i}"), timings.spread(f"device {i}")) for i in range(len(engines))},
    )


def _copying(name: str, jobs: Sequence[_Job]) -> Contender:
    """Return copies that start together; done when all are."""

    def run() -> None:
        started = [
            job.engine.h2d(job.host, job.device) if job.direction == H2D else job.engine.d2h(job.device, job.host)
            for job in jobs
        ]
        for transfer in started:
            transfer.wait_host()

    return Contender(name, lambda: run, traffic_bytes=sum(job.host.numel() for job in jobs))


def measure_flops(engine: TransferEngine, options: Options) -> dict[int, Figure]:
    """Return floating-point operations per second by the size of square bf16 matrices, smallest first.

    The smallest size is always measured, larger ones while they do not take too long.
    """
    contenders: list[Contender] = []
    expected_s = 0.0
    for size in options.matmul_sizes:
        if expected_s > options.matmul_seconds:
            break
        product = _product(engine, size)
        product()  # loads libraries and starts threads
        start = time.perf_counter()
        product()
        expected_s = 8 * (time.perf_counter() - start)
        contenders.append(Contender(str(size), partial(lambda product: product, product)))
    timings = measure(contenders, options.rounds)
    return {
        int(name): Figure(2 * int(name) ** 3 / timings.median(name), timings.spread(name)) for name in timings.seconds
    }


def _product(engine: TransferEngine, size: int) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(size)
    left, right = torch.randn(2, size, size, generator=generator).to(torch.bfloat16).to(engine.device)
    out = torch.empty_like(left)

    def run() -> None:
        torch.mm(left, right, out=out)
        engine.mark().wait_host()

    return run


# Disks: large sequential writes and reads of a temporary file, past the page cache where possible.


def check_ssd(folder: Path) -> None:
    """Refuse a folder that does not exist, before anything is measured."""
    if not folder.is_dir():
        raise ConfigError(f"--ssd {folder}: there is no such folder")


def measure_ssd(folder: Path, nbytes: int) -> tuple[Figure, Figure, bool]:
    """Return bytes per second read and written, and whether that went past the page cache; no file remains.

    Args:
        nbytes: of the file; less where the disk has not twice as much free.
    """
    check_ssd(folder)
    free = shutil.disk_usage(folder).free
    nbytes = min(nbytes, free // 2) // _BLOCK_BYTES * _BLOCK_BYTES
    if nbytes == 0:
        raise ConfigError(
            f"--ssd {folder}: {format_bytes(free)} are free, at least {2 * _BLOCK_BYTES >> 20} MiB needed"
        )
    try:
        handle, path = tempfile.mkstemp(dir=folder, prefix=".lightning_cxl-")
        os.close(handle)
        try:
            file, direct = _open(path)
        finally:
            os.unlink(path)  # the file lives until it is closed, and no longer, whatever happens
    except OSError as error:
        raise ConfigError(f"--ssd {folder}: cannot write a file there: {error}") from error
    try:
        return (*_read_and_write(file, nbytes), direct)
    except OSError as error:
        raise ConfigError(f"--ssd {folder}: {format_bytes(nbytes)} could not be written and read: {error}") from error
    finally:
        os.close(file)


def _open(path: str) -> tuple[int, bool]:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    return os.open(path, os.O_RDWR), False


def _read_and_write(file: int, nbytes: int) -> tuple[Figure, Figure]:
    reads, writes = [], []
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        # mappings are page-aligned, as O_DIRECT wants it; random bytes, because some disks compress
        buffers = [mmap.mmap(-1, _BLOCK_BYTES) for _ in range(_IN_FLIGHT)]
        for buffer in buffers:
            buffer[:] = os.urandom(_BLOCK_BYTES)
        _pass(pool, os.pwritev, file, nbytes, buffers)  # not counted: the file system finds room for it
        for _ in range(_SSD_ROUNDS):
            writes.append(_pass(pool, os.pwritev, file, nbytes, buffers))
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # matters where pages are cached after all
            reads.append(_pass(pool, os.preadv, file, nbytes, buffers))
        del buffer, buffers
    medians = [(statistics.median(seconds), max(seconds) - min(seconds)) for seconds in (reads, writes)]
    read, write = (Figure(nbytes / median, width / median) for median, width in medians)
    return read, write


def _pass(pool: ThreadPoolExecutor, access: Any, file: int, nbytes: int, buffers: list[mmap.mmap]) -> float:
    """Return the seconds of one pass over the file, in blocks that follow each other, several in flight."""

    def lane(index: int) -> None:
        for offset in range(index * _BLOCK_BYTES, nbytes, _IN_FLIGHT * _BLOCK_BYTES):
            done = access(file, [buffers[index]], offset)
            if done != _BLOCK_BYTES:
                raise OSError(errno.EIO, f"{done} of {_BLOCK_BYTES} bytes at {offset}")

    start = time.perf_counter()
    list(pool.map(lane, range(_IN_FLIGHT)))
    os.fsync(file)
    return time.perf_counter() - start
