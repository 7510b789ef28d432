"""``python -m lightning_cxl calibrate``: measures how fast memory, caches, devices and disks are, and keeps it."""

import datetime
import errno
import fcntl
import gc
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import torch

from lightning_cxl.commands import parsers
from lightning_cxl.config import SsdOptions
from lightning_cxl.devices import HostEngine, Transfer, TransferEngine, devices_apart, make_engine
from lightning_cxl.errors import ConfigError, LightningCXLError, TierFullError
from lightning_cxl.machine.speeds import (
    Calibration,
    DeviceSpeeds,
    NodeSpeeds,
    SsdSpeeds,
    cpu_model,
    machine_of,
    save_calibration,
    save_machine,
)
from lightning_cxl.machine.topology import Topology, parse_id_list, read_text
from lightning_cxl.memory.host_memory import Pinner, make_pinner
from lightning_cxl.memory.resource import PAGE_BYTES, MemoryResource, NumaResource
from lightning_cxl.native import _cpu, _membench
from lightning_cxl.text import format_bytes, parse_bytes, table_lines

READ, WRITE, ADAM = "read", "write", "Adam's mix"
H2D, D2H = "h2d", "d2h"
_CACHES = 4  # a buffer is so many times as large: then at most a quarter of its bytes come from the last sweep
_SMALLEST_BYTES = 64 << 20
_FEW_BYTES = 4096
_BLOCK_BYTES = 16 << 20
_IN_FLIGHT = 4  # blocks; a disk alone with one request at a time waits for the next
_SSD_ROUNDS = 3
_BLOCK_ROUNDS = 3
_SCALES = {"B/s": (1e-9, "GB/s"), "FLOP/s": (1e-12, "TFLOP/s"), "s": (1e6, "us")}
_TURN_SECONDS = 0.03
# threads of an OpenMP pool wait for more work in a loop for about 10 ms, and torch has a pool of its own
_PAUSE_SECONDS = 0.02
_SWEEP_TRIALS = 5
_MAX_PLACES = 8  # prefetchers of all CPUs we know follow at least so many places at once
_LINE = 64
_Key = TypeVar("_Key")


class Figure(NamedTuple):
    """A median, and how far the fastest and the slowest round are apart in medians."""

    value: float
    spread: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Figure":
        median = statistics.median(seconds)
        return cls(median, (max(seconds) - min(seconds)) / median)

    def per_second(self, amount: float) -> "Figure":
        return Figure(amount / self.value, self.spread)


Row = tuple[str, str, Figure]  # a name, a unit of `_SCALES`, and what was measured


class NamedEngine(NamedTuple):
    name: str
    engine: TransferEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Sizes and rounds. Buffers for memory have at least four times the caches, whatever is said here."""

    rounds: int = 9
    node_bytes: int = 1 << 30  # for bandwidths; a long sweep hides how threads start
    copy_bytes: int = 256 << 20  # a link is at its full speed from 32 MiB on
    block_widths: tuple[int, ...] = (512, 1024, 2048, 4096)
    block_seconds: float = 1.0  # widths that would take longer are left out; small ones tell more of starting
    ssd_bytes: int = 4 << 30


QUICK = Options(rounds=3, node_bytes=64 << 20, copy_bytes=32 << 20, block_seconds=0.2, ssd_bytes=256 << 20)


def main(arguments: Sequence[str]) -> None:
    args = parsers.calibrate().parse_args(arguments)
    parsers.check_target(args.output)
    for folder in args.ssd:
        if not folder.is_dir():
            raise ConfigError(f"--ssd {folder}: there is no such folder")
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
        print(f"  doubtful: others took {calibration.others_fraction:.0%} of the CPU time; measure again without them")
    kept = save_calibration(calibration, topology, [each.name for each in devices])
    print(f"\n{time.perf_counter() - start:.0f} s; kept in {kept}")
    if args.output:
        drives = tuple(folder.resolve() for folder in args.ssd)
        described = topology.with_ssd(SsdOptions(drives)) if drives else topology
        found = machine_of(described, devices[0].device.type if devices else "cpu")
        if found is None:
            raise LightningCXLError(
                f"{args.output} was not written: not every node could be measured. Free memory, and measure again."
            )
        save_machine(found, args.output)
        print(f"written: {args.output}")


def measure_machine(
    topology: Topology,
    engines: Sequence[NamedEngine],
    options: Options,
    *,
    ssds: Sequence[Path] = (),
    pin: Pinner | None = None,
) -> tuple[Calibration, list[Row]]:
    caches = cache_bytes(os.sched_getaffinity(0), topology.root or Path("/"))
    rows: list[Row] = []
    found = measure_nodes(topology, options, caches)
    node_ids = sorted({node_id for node_id, _ in found})
    if not node_ids:
        raise TierFullError("no node has room for a measurement: see above. Free memory, and measure again.")
    copies: dict[Any, Figure] = {}
    if engines:  # a copy from memory that is not page-locked would measure something else
        pin = pin or make_pinner(topology, required=True)
        copies = measure_copies(topology, [each.engine for each in engines], options, node_ids, pin)
    nodes = []
    for node_id in node_ids:
        speeds = {}
        for way, name in ((READ, "read"), (WRITE, "write"), (ADAM, "adam"), (H2D, "h2d"), (D2H, "d2h")):
            own, link = found.get((node_id, way)), copies.get((None, node_id, way))
            if figure := own or link:
                rows.append((f"node {node_id}, {'' if own else 'all devices, '}{way}", "B/s", figure))
                speeds[f"{name}_bytes_per_s"] = figure.value
        nodes.append(NodeSpeeds(node_id=node_id, **speeds))
    cached = measure_cache(caches, options)
    if cached is not None:
        rows.append(("caches, Adam's mix", "B/s", cached))
    host = NamedEngine(f"cpu, {_cpu.available_threads()} threads", HostEngine())
    devices = [_device(host, None, copies, options, rows)]
    devices += [_device(each, index, copies, options, rows) for index, each in enumerate(engines)]
    drives = []
    for folder in ssds:
        read, write, direct = measure_ssd(folder, options.ssd_bytes)
        if not direct:
            print(
                f"{folder}: its file system cannot read and write past the page cache (O_DIRECT), so memory takes part"
            )
        rows += [(f"{folder}, read", "B/s", read), (f"{folder}, write", "B/s", write)]
        speeds = {"read_bytes_per_s": read.value, "write_bytes_per_s": write.value}
        drives.append(SsdSpeeds(folder=str(folder.resolve()), direct=direct, **speeds))
    calibration = Calibration(
        date=datetime.date.today().isoformat(),
        num_threads=_cpu.available_threads(),
        nodes=tuple(nodes),
        devices=tuple(devices),
        cache_bytes=caches,
        cache_bytes_per_s=None if cached is None else cached.value,
        ssds=tuple(drives),
    )
    return calibration, rows


def _device(
    device: NamedEngine, index: int | None, copies: Mapping[Any, Figure], options: Options, rows: list[Row]
) -> DeviceSpeeds:
    flops = measure_flops(device.engine, options)
    rows += [(f"{device.name}, Llama block of width {width}", "FLOP/s", figure) for width, figure in flops.items()]
    links: dict[str, float] = {}
    if index is not None:
        alone = {key[1:]: figure for key, figure in copies.items() if key[0] == index and key[1] is not None}
        latency = copies[index, None, H2D]
        rows += [(f"{device.name}, node {node}, {way}", "B/s", figure) for (node, way), figure in alone.items()]
        rows.append((f"{device.name}, copy of 4 KiB", "s", latency))
        for way in (H2D, D2H):
            links[f"{way}_bytes_per_s"] = max(figure.value for (_, each), figure in alone.items() if each == way)
        links["copy_latency_s"] = latency.value
    return DeviceSpeeds(
        kind=device.engine.device.type if index is not None else "cpu",
        name=device.name if index is not None else cpu_model(),
        flops=max(figure.value for figure in flops.values()),
        **links,
    )


def cpu_seconds() -> tuple[float, float, float]:
    """Return seconds that all CPUs were busy, all there were, and this process and its ended children used."""
    times, children = psutil.cpu_times(), os.times()
    total = sum(times[:8])  # guests, which come last, are in user already
    own = time.process_time() + children.children_user + children.children_system
    return total - times.idle - times.iowait, total, own


def others_fraction(start: tuple[float, float, float], end: tuple[float, float, float]) -> float:
    """Return the part of all CPU time that other processes took between two calls of `cpu_seconds`."""
    busy, total, own = (after - before for before, after in zip(start, end, strict=True))
    return max(0.0, busy - own) / total if total > 0 else 0.0


def measure(runs: Mapping[_Key, Callable[[], object]], rounds: int) -> dict[_Key, Figure]:
    """Return the seconds of each run. They take turns in random order: a noisy machine disturbs all of them alike."""
    estimates = {key: _timed(run) for key, run in runs.items()}
    seconds: dict[_Key, list[float]] = {key: [] for key in runs}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for key in order.sample(list(runs), len(runs)):
                time.sleep(_PAUSE_SECONDS)  # until the threads of the run before have gone to sleep
                repeats = min(1000, max(1, round(_TURN_SECONDS / max(estimates[key], 1e-9))))
                if repeats > 1:
                    runs[key]()  # not counted: caches may be cold
                seconds[key].append(_timed(runs[key], repeats))
    finally:
        gc.enable()
    return {key: Figure.of(each) for key, each in seconds.items()}


def _timed(run: Callable[[], object], repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


# Memory and caches: every node read, written, and updated as Adam does it.


class Stream(NamedTuple):
    """Bytes that are touched once, in order."""

    address: int
    nbytes: int
    access: int

    @classmethod
    def of(cls, tensor: torch.Tensor, access: int) -> "Stream":
        return cls(tensor.data_ptr(), tensor.nbytes, access)


def read(tensor: torch.Tensor) -> Stream:
    return Stream.of(tensor, _membench.READ)


def update(tensor: torch.Tensor) -> Stream:
    return Stream.of(tensor, _membench.UPDATE)


class Sweep:
    """One pass over the bytes of a kernel, the fastest that memory allows; contents that are read stay as they are.

    The fastest loop differs from CPU to CPU by up to a tenth: how wide loads are, and whether a thread walks one place
    of a tensor or several. All are tried, and the fastest is taken.
    """

    def __init__(self, groups: Sequence[Sequence[Stream]], num_threads: int, max_places: int = _MAX_PLACES) -> None:
        self.num_threads = num_threads
        several = max(1, max_places // len(groups[0])) if len(groups) == 1 else 1
        variants = []
        for num_places in sorted({1, several}):
            table = array("Q")
            for index, group in enumerate(groups):
                for stream in group:
                    length = stream.nbytes // num_places // _LINE * _LINE
                    for begin in range(0, num_places * length or 1, length or 1):
                        end = stream.nbytes if begin == (num_places - 1) * length else begin + length
                        table.extend((index, stream.address + begin, end - begin, stream.access))
            variants += [(isa, table) for isa in _cpu.supported_isas()]
        best = [float("inf")] * len(variants)
        for _ in range(_SWEEP_TRIALS):
            for index, (self.isa, self._table) in enumerate(variants):
                best[index] = min(best[index], _timed(self))
        self.isa, self._table = variants[best.index(min(best))]

    def __call__(self) -> None:
        _membench.sweep(self._table, self.num_threads, self.isa)


def cache_bytes(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Return the bytes of the last-level caches of some CPUs; 0 where the kernel does not tell."""
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
    return sum(sizes.values())


def _node_resources(topology: Topology) -> dict[int, MemoryResource]:
    real = [tier for tier in topology.tiers if not tier.emulated]
    return {node_id: NumaResource(tier.name, node_id, topology) for tier in real for node_id in tier.node_ids}


def measure_nodes(topology: Topology, options: Options, caches: int) -> dict[tuple[int, str], Figure]:
    """Return bytes per second by node and access. Nodes take turns; one that is too full is left out, with a line."""
    resources = _node_resources(topology)
    sweeps: dict[tuple[int, str], Sweep] = {}
    traffic: dict[tuple[int, str], int] = {}
    kept = []  # buffers, until all is measured
    wanted = max(options.node_bytes, _CACHES * caches)
    least = min(wanted, _SMALLEST_BYTES)
    for node_id, resource in resources.items():
        free = topology.node_free_bytes(node_id)  # half of it is for others
        nbytes = min(wanted, free // (2 * len(resources))) // PAGE_BYTES * PAGE_BYTES
        try:
            if nbytes < least // PAGE_BYTES * PAGE_BYTES:
                raise TierFullError(
                    f"node {node_id} cannot be measured: {format_bytes(free)} are free, and {len(resources)} buffers "
                    f"of {format_bytes(least)} are needed, half of the memory left to others. Free memory there."
                )
            memory = resource.allocate(nbytes).tensor((nbytes,), torch.uint8)
        except TierFullError as error:
            print(f"left out: {error}")
            continue
        if nbytes < wanted:
            print(f"node {node_id}: only {format_bytes(nbytes)} instead of {format_bytes(wanted)}, caches may help")
        kept.append(memory)
        for access in (READ, WRITE, ADAM):
            sweeps[node_id, access], traffic[node_id, access] = _sweep(memory, access)
    return {key: figure.per_second(traffic[key]) for key, figure in measure(sweeps, options.rounds).items()}


def measure_cache(caches: int, options: Options) -> Figure | None:
    """Return bytes per second of Adam's mix in a quarter of the last-level caches; None where they are not known."""
    nbytes = caches // 4
    if nbytes == 0:
        return None
    memory = torch.zeros(nbytes + _LINE, dtype=torch.uint8)
    sweep, traffic = _sweep(memory[-memory.data_ptr() % _LINE :][:nbytes], ADAM)
    return measure({ADAM: sweep}, options.rounds)[ADAM].per_second(traffic)


def _sweep(memory: torch.Tensor, access: str) -> tuple[Sweep, int]:
    """Return a sweep over a memory that must outlive it, and the bytes that it moves."""
    if access == WRITE:
        streams = [Stream.of(memory, _membench.WRITE_PAST_CACHE)]
    elif access == READ:
        streams = [read(memory)]
    else:
        weights, momentum, variance, gradient = memory.view(4, -1).unbind()  # all float32
        streams = [update(weights), update(momentum), update(variance), read(gradient)]
    traffic = sum(stream.nbytes * (1 + (stream.access == _membench.UPDATE)) for stream in streams)
    return Sweep([streams], _cpu.available_threads()), traffic


# Devices: copies from and to every node, each device alone and all together, and how fast it trains a block.


def measure_copies(
    topology: Topology, engines: Sequence[TransferEngine], options: Options, node_ids: Sequence[int], pin: Pinner
) -> dict[tuple[int | None, int | None, str], Figure]:
    """Return bytes per second of copies by device, node and direction, measured in turns.

    Device None is all of them at the same time; node None are the seconds of a copy of a few bytes.
    """
    resources = _node_resources(topology)
    copies: dict[tuple[int | None, int | None, str], list[Callable[[], Transfer]]] = {}
    on_device = [torch.empty(options.copy_bytes, dtype=torch.uint8, device=engine.device) for engine in engines]
    for node_id in node_ids:
        nbytes = options.copy_bytes * len(engines)
        host = pin(resources[node_id]).allocate(nbytes).tensor((len(engines), options.copy_bytes), torch.uint8)
        for index, (engine, device) in enumerate(zip(engines, on_device, strict=True)):
            starts = {H2D: partial(engine.h2d, host[index], device), D2H: partial(engine.d2h, device, host[index])}
            copies |= {(index, node_id, way): [start] for way, start in starts.items()}
        for way in (H2D, D2H):
            copies[None, node_id, way] = [copies[index, node_id, way][0] for index in range(len(engines))]
    for index, (engine, device) in enumerate(zip(engines, on_device, strict=True)):
        copies[index, None, H2D] = [partial(engine.h2d, host[index, :_FEW_BYTES], device[:_FEW_BYTES])]
    seconds = measure({key: partial(_copy_together, each) for key, each in copies.items()}, options.rounds)
    return {
        key: each if key[1] is None else each.per_second(len(copies[key]) * options.copy_bytes)
        for key, each in seconds.items()
    }


def _copy_together(starts: Sequence[Callable[[], Transfer]]) -> None:
    for transfer in [start() for start in starts]:
        transfer.wait_host()


def measure_flops(engine: TransferEngine, options: Options) -> dict[int, Figure]:
    """Return floating-point operations per second of forward and backward of a block of Llama in bf16, by its width.

    An H200 takes 1.6 times as long as for matrix products alone. The smallest width is always measured, larger ones
    while they do not take too long.
    """
    trains: dict[int, Callable[[], None]] = {}
    flops: dict[int, int] = {}
    expected_s = 0.0
    for width in options.block_widths:
        if expected_s > options.block_seconds:
            break
        trains[width], flops[width] = _block(engine, width)
        trains[width]()  # loads libraries and starts threads
        expected_s = 8 * _timed(trains[width])
    seconds = measure(trains, min(_BLOCK_ROUNDS, options.rounds))
    return {width: each.per_second(flops[width]) for width, each in seconds.items()}


def _block(engine: TransferEngine, width: int) -> tuple[Callable[[], None], int]:
    """Return what computes forward and backward of a block once, with as many tokens as it is wide, and its flops."""
    from transformers import LlamaConfig, LlamaModel

    heads, inner = max(1, width // 128), 7 * width // 2
    config = LlamaConfig(
        vocab_size=8, hidden_size=width, intermediate_size=inner, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4), max_position_embeddings=width, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng([]):
        model: Any = LlamaModel(config).to(engine.device, torch.bfloat16)
        inputs = torch.randn(1, width, width).to(engine.device, torch.bfloat16).requires_grad_()

    def train() -> None:
        model(inputs_embeds=inputs).last_hidden_state.backward(inputs.detach())
        engine.mark().wait_host()

    weights = sum(each.numel() for each in model.layers.parameters())
    return train, 6 * width * (weights + width * width)  # causal attention: half of all pairs


# Disks: large sequential writes and reads of a temporary file, past the page cache where possible.


def measure_ssd(folder: Path, nbytes: int) -> tuple[Figure, Figure, bool]:
    """Return bytes per second read and written, and whether that went past the page cache; no file remains."""
    free = shutil.disk_usage(folder).free
    nbytes = min(nbytes, free // 2) // _BLOCK_BYTES * _BLOCK_BYTES
    if nbytes == 0:
        raise ConfigError(f"--ssd {folder}: {format_bytes(free)} are free, {2 * _BLOCK_BYTES >> 20} MiB needed")
    try:
        # the file lives until it is closed, and no longer, whatever happens
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            direct = True
            try:
                fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                direct = False
            return (*_read_and_write(file.fileno(), nbytes), direct)
    except OSError as error:
        raise ConfigError(f"--ssd {folder}: {format_bytes(nbytes)} could not be written and read: {error}") from error


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
    return Figure.of(reads).per_second(nbytes), Figure.of(writes).per_second(nbytes)


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
