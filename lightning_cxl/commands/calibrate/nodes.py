"""Bandwidths of memory: every node read, written, and updated as Adam does it, by all CPUs of this process."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from lightning_cxl.commands.calibrate.options import Figure, Options
from lightning_cxl.commands.measuring.roof import Roof, Stream, read, update, write
from lightning_cxl.commands.measuring.timing import Contender, measure
from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.nodes import parse_id_list, read_text
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import PAGE_BYTES, NumaResource
from lightning_cxl.memory.resource import MemoryResource
from lightning_cxl.native import _cpu
from lightning_cxl.units import format_bytes, parse_bytes

READ, WRITE, ADAM = "read", "write", "Adam's mix"
_CACHES = 4  # a buffer is so many times as large: then at most a quarter of its bytes come from the last sweep
_SMALLEST_BYTES = 64 << 20


class Caches:
    """The last-level caches of CPUs.

    Args:
        cpus: those of this process.
        root: where ``sys`` is found.
    """

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


def node_resources(topology: Topology) -> dict[int, MemoryResource]:
    """Return a resource for every node that the hardware has, by id."""
    return {
        node_id: NumaResource(tier.name, node_id, topology)
        for tier in topology.tiers
        if not tier.emulated
        for node_id in tier.node_ids
    }


def room_bytes(topology: Topology, node_id: int, wanted: int, *, parts: int = 1) -> int:
    """Return how much of a node to take: `wanted`, less where that is more than half of what is free.

    Args:
        topology: says what is free.
        node_id: the node.
        wanted: bytes.
        parts: buffers of that size that exist at the same time, on all nodes.

    Raises:
        TierFullError: a buffer of what is free would say more about caches than about memory.
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
    """Return bytes per second by node and access. Nodes take turns; one that is too full is left out, with a line.

    Memory really lies on its node: `NumaResource` asks the kernel.
    """
    resources = node_resources(topology)
    threads = _cpu.available_threads()
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
            contenders.append(_contender(name, streams, threads, memory))
    if not contenders:
        return {}
    timings = measure(contenders, options.rounds)
    return {
        key: Figure(timings.traffic_bytes[name] / timings.median(name), timings.spread(name))
        for name, key in keys.items()
    }


def measure_cache(caches: Caches, options: Options) -> Figure | None:
    """Return bytes per second of Adam's mix in a quarter of the last-level caches; None where they are not known."""
    nbytes = caches.all_bytes // 4
    if nbytes == 0:
        return None
    memory = torch.zeros(nbytes + 64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 64 :][:nbytes]
    streams = _accesses(memory)[ADAM]
    timings = measure([_contender(ADAM, streams, _cpu.available_threads(), memory)], options.rounds)
    return Figure(timings.traffic_bytes[ADAM] / timings.median(ADAM), timings.spread(ADAM))


def _accesses(memory: torch.Tensor) -> Mapping[str, list[Stream]]:
    """Return the streams of each access; Adam's are weights, momentum, variance, and the gradient, all float32."""
    weights, momentum, variance, gradient = memory.view(4, -1).unbind()
    return {
        READ: [read(memory)],
        WRITE: [write(memory)],
        ADAM: [update(weights), update(momentum), update(variance), read(gradient)],
    }


def _contender(name: str, streams: list[Stream], threads: int, memory: torch.Tensor) -> Contender:
    """Return one sweep over `streams`, which keeps their memory alive."""
    traffic = sum(stream.nbytes for stream in streams)
    if name.endswith(ADAM):
        traffic += sum(stream.nbytes for stream in streams[:3])

    def make(memory: torch.Tensor = memory) -> Callable[[], object]:
        return Roof([streams], threads)

    return Contender(name, make, traffic_bytes=traffic)
