"""One run over the whole machine: `measure_machine` and what it found, as a `Calibration` and as rows to show."""

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_cxl.commands.calibrate.compute import measure_flops
from lightning_cxl.commands.calibrate.copies import D2H, H2D, Copies, measure_copies, pinned
from lightning_cxl.commands.calibrate.latency import measure_latency
from lightning_cxl.commands.calibrate.nodes import ADAM, READ, WRITE, Caches, measure_cache, measure_nodes
from lightning_cxl.commands.calibrate.options import Figure, Options
from lightning_cxl.commands.calibrate.ssd import measure_ssd
from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.calibration import Calibration, DeviceSpeeds, NodeSpeeds, SsdSpeeds
from lightning_cxl.machine.fingerprint import cpu_model
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.split_stacks import Pinner
from lightning_cxl.native import _cpu
from lightning_cxl.transfer.engine import HostEngine, TransferEngine


class Row(NamedTuple):
    """One number to show."""

    name: str
    unit: str
    figure: Figure


class NamedEngine(NamedTuple):
    """A device, what it is called, and what copies to it."""

    name: str
    engine: TransferEngine


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
        topology: the machine, really there.
        engines: accelerators; the CPU is measured anyway.
        options: how thoroughly.
        ssds: folders on disks.
        pin: page-locks memory that devices copy from and to; None leaves it to the driver.
        say: is told what is left out.

    Raises:
        TierFullError: no node has room for a measurement.
        PinnedMemoryError: memory cannot be page-locked.
        ConfigError: a folder cannot be used.
    """
    caches = Caches(frozenset(os.sched_getaffinity(0)), topology.root or Path("/"))
    rows: list[Row] = []
    nodes, copies = _nodes(
        topology, [each.engine for each in engines], options, caches, pin or pinned(topology), say, rows
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


def _nodes(
    topology: Topology,
    engines: Sequence[TransferEngine],
    options: Options,
    caches: Caches,
    pin: Pinner,
    say: Callable[[str], None],
    rows: list[Row],
) -> tuple[list[NodeSpeeds], Copies | None]:
    found = measure_nodes(topology, options, caches, say)
    node_ids = sorted({node_id for node_id, _ in found})
    if not node_ids:
        raise TierFullError("no node has room for a measurement: see above. Free memory, and measure again.")
    latency = measure_latency(topology, options, caches, node_ids)
    copies = measure_copies(topology, engines, options, node_ids, pin) if engines else None
    speeds = []
    for node_id in node_ids:
        together = {} if copies is None else {way: copies.together[node_id, way] for way in (H2D, D2H)}
        rows += [Row(f"node {node_id}, {way}", "B/s", found[node_id, way]) for way in (READ, WRITE, ADAM)]
        rows.append(Row(f"node {node_id}, latency", "ns", latency[node_id]))
        rows += [Row(f"node {node_id}, all devices, {way}", "B/s", figure) for way, figure in together.items()]
        speeds.append(
            NodeSpeeds(
                node_id=node_id,
                read_bytes_per_s=found[node_id, READ].value,
                write_bytes_per_s=found[node_id, WRITE].value,
                adam_bytes_per_s=found[node_id, ADAM].value,
                latency_ns=latency[node_id].value,
                **{f"{way}_bytes_per_s": figure.value for way, figure in together.items()},
            )
        )
    return speeds, copies


def _device(
    device: NamedEngine, copies: Copies | None, index: int | None, options: Options, rows: list[Row]
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
    found = measure_ssd(folder, options.ssd_bytes)
    if not found.direct:
        say(f"{folder}: its file system cannot read and write past the page cache (O_DIRECT), so memory takes part")
    rows += [Row(f"{folder}, read", "B/s", found.read), Row(f"{folder}, write", "B/s", found.write)]
    return SsdSpeeds(
        folder=str(folder.resolve()),
        read_bytes_per_s=found.read.value,
        write_bytes_per_s=found.write.value,
        direct=found.direct,
    )
