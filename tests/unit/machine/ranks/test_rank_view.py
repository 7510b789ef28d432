"""The tiers as one process sees them, and its share of their budgets."""

import pytest

from lightning_cxl import Topology
from lightning_cxl.machine.binding import read_host_cpus, seen_from, share_budgets
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
    assert describe_machine(seen) == describe_machine(topology, allowed=frozenset(range(4)))


def test_tier_cxl_that_dram_stands_in_for_is_near_too(tmp_path):
    root = write_machine(tmp_path / "plain", ([0, 1], [2, 3]), ("10 21", "21 10"))
    seen = seen_from(Topology.detect(root), (1,), read_host_cpus(root, range(4)), range(4))
    with pytest.warns(match="backed by DRAM"):
        emulated = seen.tier("cxl")
    assert emulated.node_ids == (1, 0) and emulated.nearest_first and emulated.emulated


FREE = {0: 90 * GIB, 1: 100 * GIB, 2: 40 * GIB, 3: 40 * GIB}


def share(root, host, near, budgets=None, free=None, available=1000 * GIB):
    return share_budgets(Topology.detect(root), budgets or {}, free or FREE, available, near, host)


def test_processes_of_a_socket_divide_what_is_near(root, host):
    shares = share(root, host, [(0,), (0,), (1,), (1,)])
    assert [each["dram"] // GIB for each in shares] == [45, 45, 50, 50]
    assert [each["cxl"] // GIB for each in shares] == [20] * 4


def test_a_budget_is_the_machine_s_and_divided(root, host):
    shares = share(root, host, [(0,), (1,)], {"dram": 19 * GIB, "cxl": 1000 * GIB})
    assert [each["dram"] // GIB for each in shares] == [9, 10]
    assert [each["cxl"] // GIB for each in shares] == [40, 40], "no more than what is free"


def test_who_would_get_too_little_by_nearness_gets_an_even_share(root, host):
    assert [each["dram"] // GIB for each in share(root, host, [(0,), (0,), (0,), (1,)])] == [47] * 4
    one_card = {**FREE, 3: 0}
    assert [each["cxl"] // GIB for each in share(root, host, [(0,), (1,)], free=one_card)] == [20, 20]
    assert [each["dram"] // GIB for each in share(root, host, [(0,), (0,)])] == [95, 95], (
        "the other socket's memory, too"
    )


def test_a_control_group_s_limit_is_divided_once(root, host):
    shares = share(root, host, [(0,), (1,)], free=dict.fromkeys(FREE, 50 * GIB), available=50 * GIB)
    assert sum(sum(each.values()) for each in shares) == pytest.approx(50 * GIB, rel=1e-6)
