"""Which CPUs processes get: by their device, by sockets, by what a container or launcher has left them."""

import pytest

from lightning_cxl.machine.binding import RankFacts, decide_places, read_host_cpus
from tests.unit.machine.ranks.sysfs import TWO_CARDS, write_machine

TWO_SOCKETS = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15], [], [])
"""Two sockets of four cores with two hardware threads each, and two cards."""
THREADS = [(core, core + 8) for core in range(8)]
EVERY = tuple(range(16))


@pytest.fixture
def host(tmp_path):
    return read_host_cpus(write_machine(tmp_path, TWO_SOCKETS, TWO_CARDS, siblings=THREADS), EVERY)


def decide(host, device_nodes, mode="auto", allowed=EVERY):
    return decide_places([RankFacts(node, tuple(allowed)) for node in device_nodes], mode, host)


def cpus_of(places):
    return [place.cpus for place in places]


def test_ranks_of_a_socket_share_its_cores_and_keep_hardware_threads_together(host):
    places = decide(host, [0, 0, 1, 1])
    assert cpus_of(places) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    assert [place.node_ids for place in places] == [(0,), (0,), (1,), (1,)]
    assert all(place.is_bound and place.num_sharers == 1 and not place.notes for place in places)


def test_eight_gpus_in_any_order_get_cores_of_the_socket_of_each(host):
    places = decide(host, [1, 0, 1, 0, 0, 1, 0, 1])
    assert [place.node_ids for place in places] == [(1,), (0,), (1,), (0,), (0,), (1,), (0,), (1,)]
    assert sorted(cpu for place in places for cpu in place.cpus) == list(EVERY), "all are used, none twice"
    assert {len(place.cpus) for place in places} == {2}


def test_without_a_node_of_the_device_ranks_fill_the_sockets_in_order(host):
    places = decide(host, [None] * 4)
    assert [place.node_ids for place in places] == [(0,), (0,), (1,), (1,)]
    assert [place.node_ids for place in decide(host, [None] * 3)] == [(0,), (0,), (1,)]
    assert [place.node_ids for place in decide(host, [1, None])] == [(1,), (1,)]


def test_without_binding_and_where_torch_has_bound_cpus_stay(host):
    off = decide(host, [0, 1], False)
    assert cpus_of(off) == [EVERY, EVERY] and not any(place.is_bound for place in off)
    assert [place.num_sharers for place in off] == [2, 2]
    facts = [RankFacts(0, (0, 1)), RankFacts(0, (0, 1)), RankFacts(1, (4, 5))]
    node = decide_places(facts, "node", host)
    assert cpus_of(node) == [(0, 1), (0, 1), (4, 5)] and all(place.is_bound and not place.notes for place in node)
    assert [place.node_ids for place in node] == [(0,), (0,), (1,)] and [each.num_sharers for each in node] == [2, 2, 1]


def test_a_socket_of_several_nodes(tmp_path):
    distances = ("10 12 21 21", "12 10 21 21", "21 21 10 12", "21 21 12 10")
    sockets = {0: 0, 1: 0, 2: 1, 3: 1}
    nodes = ([0, 1], [2, 3], [4, 5], [6, 7])
    host = read_host_cpus(write_machine(tmp_path, nodes, distances, sockets=sockets), range(8))

    def decided(device_nodes):
        places = decide(host, device_nodes, allowed=range(8))
        return [(place.cpus, place.node_ids) for place in places]

    assert decided([1, 3]) == [((0, 1, 2, 3), (0, 1)), ((4, 5, 6, 7), (2, 3))]
    assert decided([1, 0, 3, 2]) == [((2, 3), (1,)), ((0, 1), (0,)), ((6, 7), (3,)), ((4, 5), (2,))]


def test_auto_leaves_one_process_and_one_socket_as_they_are(host, tmp_path):
    assert not decide(host, [1])[0].is_bound
    small = read_host_cpus(write_machine(tmp_path / "one", ([0, 1],), ("10",)), (0, 1))
    places = decide(small, [0, 0], allowed=(0, 1))
    assert not any(place.is_bound for place in places) and cpus_of(places) == [(0, 1), (0, 1)]


def test_cores_that_are_offline_or_forbidden_are_not_given(tmp_path):
    nodes = ([0, 1, 3], [4, 5, 6, 7])  # CPU 2 is offline
    host = read_host_cpus(write_machine(tmp_path, nodes, ("10 21", "21 10")), range(8))
    assert cpus_of(decide(host, [0, 1], allowed=(0, 1, 3, 4, 6, 7))) == [(0, 1, 3), (4, 6, 7)]
    # a container with CPUs of both sockets leaves the choice
    assert cpus_of(decide(host, [0, 1], allowed=(1, 3, 4))) == [(1, 3), (4,)]


def test_what_a_launcher_has_bound_stays(host):
    facts = [RankFacts(0, (4, 5)), RankFacts(1, (6, 7))]
    first, second = decide_places(facts, "auto", host)
    assert (first.cpus, first.node_ids) == ((4, 5), (1,)) and second.cpus == (6, 7)
    assert "CPUs 4-5 were chosen before" in first.notes[0] and len(second.notes) == 1
    assert "the device is at node 0, and the CPUs are of node 1" in first.notes[1]


def test_cpus_of_one_socket_for_all_are_what_a_launcher_has_bound(host):
    places = decide(host, [0, 0, 1], allowed=(4, 5, 12))
    assert cpus_of(places) == [(4, 5, 12)] * 3 and all(place.num_sharers == 3 for place in places)
    # cyclic SLURM: other CPUs for each, of both sockets
    spread = decide_places([RankFacts(0, (0, 4)), RankFacts(1, (1, 5))], "auto", host)
    assert cpus_of(spread) == [(0, 4), (1, 5)] and spread[0].node_ids == (0, 1)


def test_a_device_at_a_node_without_usable_cpus_takes_the_nearest(host):
    assert [place.node_ids for place in decide(host, [3, 2])] == [(1,), (0,)]


def test_a_kernel_without_numa_or_topology(tmp_path):
    bare = read_host_cpus(tmp_path, (0, 1, 2))
    assert bare.nodes == {0: (0, 1, 2)} and bare.distance(0, 0) == 10
    assert cpus_of(decide(bare, [None, None], allowed=(0, 1, 2))) == [(0, 1, 2)] * 2
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-1\n")
    assert read_host_cpus(tmp_path, (0,)).nodes == {0: (0, 1)}
