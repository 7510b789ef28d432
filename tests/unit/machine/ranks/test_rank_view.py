"""The tiers as one process sees them, and what all processes may take of them."""

from dataclasses import replace

import pytest

from lightning_cxl import OffloadConfig, Topology
from lightning_cxl.machine.binding import measure_room, read_host_cpus, seen_from
from lightning_cxl.machine.speeds import describe_machine
from tests.unit.machine.ranks.sysfs import GIB, TWO_CARDS, write_machine

TWO_SOCKETS = ([0, 1], [2, 3], [], [])


@pytest.fixture
def root(tmp_path):
    return write_machine(tmp_path, TWO_SOCKETS, TWO_CARDS)


@pytest.fixture
def host(root):
    return read_host_cpus(root, range(4))


def test_each_socket_s_memory_and_card_come_first(root, host):
    seen = seen_from(Topology.detect(root), (1,), host, range(4))
    assert seen.names == ("dram", "cxl")
    assert seen.tier("dram").node_ids == (1, 0) and seen.tier("cxl").node_ids == (3, 2)
    assert [node.distance for tier in seen.tiers for node in tier.nodes] == [10, 21, 17, 25]
    assert [tier.nearest_first for tier in seen.tiers] == [True, True]
    assert seen.tier("cxl").describe() == "cxl: 8.0 GiB on nodes 3, 2, nearest first"
    assert [node.node_id for node in seen.tier("cxl").near_nodes] == [3]


def test_speeds_are_those_of_the_near_nodes(root, host):
    for node, speed in enumerate((100, 100, 30, 20)):
        folder = root / f"sys/devices/system/node/node{node}/access1/initiators"
        folder.mkdir(parents=True)
        for name in ("read_bandwidth", "write_bandwidth", "read_latency"):
            (folder / name).write_text(f"{speed}\n")
    topology = Topology.detect(root)
    assert topology.tier("cxl").read_bytes_per_s == 50e6
    seen = seen_from(topology, (1,), host, range(4)).tier("cxl")
    assert (seen.read_bytes_per_s, seen.write_bytes_per_s, seen.read_latency_ns) == (20e6, 20e6, 20)


def test_calibration_of_the_whole_machine_is_found_from_a_part_of_it(root, host):
    topology = Topology.detect(root)
    seen = seen_from(topology, (1,), host, range(4))
    assert describe_machine(seen) == describe_machine(replace(topology, measured_on=frozenset(range(4))))


def test_tier_cxl_that_dram_stands_in_for_is_near_too(tmp_path):
    root = write_machine(tmp_path / "plain", ([0, 1], [2, 3]), ("10 21", "21 10"))
    seen = seen_from(Topology.detect(root), (1,), read_host_cpus(root, range(4)), range(4))
    with pytest.warns(match="backed by DRAM"):
        emulated = seen.tier("cxl")
    assert emulated.node_ids == (1, 0) and emulated.nearest_first and emulated.emulated


def test_a_budget_is_the_machine_s_and_no_more_than_what_is_free(root):
    room = measure_room(Topology.detect(root), OffloadConfig(tiers={"dram": 3 * GIB, "cxl": 1000 * GIB}))
    assert room["dram"] == 3 * GIB and 7 * GIB < room["cxl"] < 8 * GIB


def test_a_control_group_s_limit_is_divided_once(root):
    group = root / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job")
    (group / "memory.max").write_text(str(6 * GIB))
    (group / "memory.current").write_text("0")
    assert sum(measure_room(Topology.detect(root), OffloadConfig()).values()) == pytest.approx(6 * GIB, rel=1e-6)
