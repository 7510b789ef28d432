"""Measurements of memory: buffers large enough, on the right node, and a chain through every line."""

import os

import pytest
import torch

from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import (
    ADAM,
    READ,
    WRITE,
    Caches,
    Chase,
    Figure,
    Options,
    measure_cache,
    measure_latency,
    measure_nodes,
    room_bytes,
)
from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.topology import Topology

TINY = Options(rounds=2, node_bytes=1 << 20, chase_bytes=1 << 16, chase_steps=1000)
CPU = "sys/devices/system/cpu"


def caches(tmp_path, cpus=()) -> Caches:
    return Caches(frozenset(cpus), tmp_path)


@pytest.mark.parametrize("num_lines", [1, 2, 64, 1024])
def test_a_chase_visits_every_line_before_any_comes_again(num_lines):
    chase = Chase(torch.zeros(num_lines * 64, dtype=torch.uint8), steps=1)
    visited = []
    for _ in range(num_lines):
        visited.append(chase.line)
        chase()
    assert sorted(visited) == list(range(num_lines))
    assert chase.line == visited[0]
    if num_lines == 1024:
        assert visited != list(range(num_lines))  # in an order that no prefetcher follows
        assert max(visited.count((line + 1) % num_lines) for line in visited) == 1


def test_a_chase_goes_on_where_it_was_and_gives_its_cpus_back():
    before = os.sched_getaffinity(0)
    memory = torch.zeros(64 * 64, dtype=torch.uint8)
    chase = Chase(memory, steps=10, cpus=(min(before),))
    one = Chase(memory.clone(), steps=1)
    one._links = chase._links
    for _ in range(3):
        chase()
        for _ in range(10):
            one()
        assert chase.line == one.line
    assert os.sched_getaffinity(0) == before


def write_cache(root, cpu, index, level, size, shared, kind="Unified"):
    folder = root / CPU / f"cpu{cpu}/cache/index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared), ("type", kind)):
        (folder / name).write_text(f"{text}\n")


def test_last_level_caches_are_counted_once_and_only_those_of_this_process(tmp_path):
    for cpu in range(6):
        write_cache(tmp_path, cpu, 0, 1, "32K", str(cpu), "Data")
        write_cache(tmp_path, cpu, 1, 1, "32K", str(cpu), "Instruction")
        group = cpu // 2 * 2
        write_cache(tmp_path, cpu, 3, 3, "16384K" if group else "96M", f"{group}-{group + 1}")
    both = caches(tmp_path, [0, 1, 2])
    assert (both.all_bytes, both.largest_bytes) == ((96 + 16) << 20, 96 << 20)
    assert caches(tmp_path, [4]).all_bytes == 16 << 20
    assert caches(tmp_path, [77]).all_bytes == 0


def test_nodes_are_measured_and_memory_has_the_size_it_should(tmp_path, monkeypatch):
    sizes = []
    allocate = calibrate.NumaResource.allocate

    def spy(self, nbytes, **kwargs):
        sizes.append((self.node_id, nbytes))
        return allocate(self, nbytes, **kwargs)

    monkeypatch.setattr(calibrate.NumaResource, "allocate", spy)
    topology = Topology.detect()
    found = measure_nodes(topology, TINY, caches(tmp_path))
    real = [n for tier in topology.tiers if not tier.emulated for n in tier.node_ids]
    assert set(found) == {(n, access) for n in real for access in (READ, WRITE, ADAM)}
    assert sizes == [(n, 1 << 20) for n in real]
    assert all(figure.value > 1e6 and figure.spread >= 0 for figure in found.values())
    sizes.clear()
    big = caches(tmp_path)
    big.all_bytes = 1 << 20
    measure_nodes(topology, TINY, big)
    assert sizes == [(n, 4 << 20) for n in real]  # four times the caches


def test_bytes_that_are_counted(tmp_path, monkeypatch):
    """A second per sweep: reading and writing count every byte once, Adam's three updated arrays twice."""

    def measured(runs, rounds):
        for run in runs.values():
            run()
        return dict.fromkeys(runs, Figure(1.0, 0.0))

    monkeypatch.setattr(calibrate, "measure", measured)
    found = measure_nodes(Topology.detect(), TINY, caches(tmp_path))
    node = min(found)[0]
    assert [found[node, access].value for access in (READ, WRITE, ADAM)] == [1 << 20, 1 << 20, 7 << 18]


def test_a_node_that_is_too_full_is_left_out_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(Topology, "node_free_bytes", lambda self, node_id: 1 << 20)
    lines = []
    assert measure_nodes(Topology.detect(), TINY, caches(tmp_path), lines.append) == {}
    assert "cannot be measured: 1.0 MiB are free" in lines[0]


def test_room_on_a_node(monkeypatch):
    topology = Topology.fake(dram=["1GiB"])
    assert room_bytes(topology, 0, 100 << 20) == 100 << 20
    assert room_bytes(topology, 0, 10 << 30) == 512 << 20  # half of what is free
    assert room_bytes(topology, 0, 10 << 30, parts=2) == 256 << 20
    with pytest.raises(TierFullError, match=r"1.0 GiB are free, and 20 buffers of at least 64.0 MiB"):
        room_bytes(topology, 0, 10 << 30, parts=20)


def test_less_memory_than_the_caches_need_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(Topology, "node_free_bytes", lambda self, node_id: 4 << 20)
    monkeypatch.setattr(calibrate, "_SMALLEST_BYTES", 1 << 20)
    big = caches(tmp_path)
    big.all_bytes = 64 << 20
    lines = []
    assert measure_nodes(Topology.detect(), TINY, big, lines.append)
    assert "2.0 MiB instead of 256.0 MiB, caches may help" in lines[0]


def test_latency(tmp_path, monkeypatch):
    chains = []
    make = calibrate.Chase.__init__

    def spy(self, memory, *args):
        chains.append(memory.numel())
        make(self, memory, *args)

    monkeypatch.setattr(calibrate.Chase, "__init__", spy)
    topology = Topology.detect()
    node = topology.tiers[0].node_ids[0]
    found = measure_latency(topology, TINY, caches(tmp_path), [node])
    assert 0 < found[node].value < 1e5
    big = caches(tmp_path)
    big.largest_bytes = (1 << 20) - 1
    measure_latency(topology, TINY, big, [node])
    assert chains == [1 << 16, 4 << 20]  # a power of two, and four times the cache


def test_the_speed_of_caches_is_measured_where_they_are_known(tmp_path):
    known = caches(tmp_path)
    assert measure_cache(known, TINY) is None
    known.all_bytes = 1 << 20
    assert isinstance(measure_cache(known, TINY), Figure)
