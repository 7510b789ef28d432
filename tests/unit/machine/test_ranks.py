import multiprocessing
import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.numa import binding as torch_binding

from lightning_cxl import OffloadConfig, Topology, devices
from lightning_cxl.machine import binding
from lightning_cxl.machine.binding import RankFacts, bind_rank, decide_places, device_node, id_ranges, read_host_cpus
from lightning_cxl.machine.speeds import describe_machine
from lightning_cxl.native import _cpu

GIB = 1 << 30
TWO_CARDS = ("10 21 17 25", "21 10 25 17", "17 25 10 29", "25 17 29 10")
"""Distances of two sockets, nodes 0 and 1, with a card at each, nodes 2 and 3."""


def write_machine(root, nodes, distances, *, siblings=(), devices=None):
    """Describe a machine in an empty folder by its nodes, each with CPUs or a card, and their rows of distances.

    Every node with CPUs is a socket, and has 4 GiB, all free. Every CPU is a core, or each row of `siblings` has the
    threads of one. `devices` are nodes by PCI address.
    """
    text = {"sys/devices/system/cpu/online": id_ranges([cpu for cpus in nodes for cpu in cpus])}
    every = id_ranges(range(len(nodes)))
    for name in ("online", "has_memory", "has_normal_memory"):
        text[f"sys/devices/system/node/{name}"] = every
    kib = 4 << 20
    for node, cpus in enumerate(nodes):
        base = f"sys/devices/system/node/node{node}"
        text[f"{base}/cpulist"] = id_ranges(cpus)
        text[f"{base}/distance"] = distances[node]
        text[f"{base}/meminfo"] = f"Node {node} MemTotal: {kib} kB\nNode {node} MemFree: {kib} kB"
        for cpu in cpus:
            core = next((each for each in siblings if cpu in each), [cpu])
            base = f"sys/devices/system/cpu/cpu{cpu}/topology"
            text[f"{base}/physical_package_id"] = str(node)
            text[f"{base}/thread_siblings_list"] = id_ranges(core)
    for address, node in (devices or {}).items():
        text[f"sys/bus/pci/devices/{address}/numa_node"] = str(node)
    total = kib * len(nodes)
    text["proc/meminfo"] = f"MemTotal: {total} kB\nMemFree: {total} kB\nMemAvailable: {total} kB"
    text["proc/self/status"] = f"Name:\tpython\nMems_allowed_list:\t{every}"
    for path, content in text.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content + "\n")
    return root


EVERY = tuple(range(16))


@pytest.fixture
def host(tmp_path):
    """Return the CPUs of two sockets with four cores of two hardware threads each."""
    nodes = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15], [], [])
    siblings = [(core, core + 8) for core in range(8)]
    return read_host_cpus(write_machine(tmp_path, nodes, TWO_CARDS, siblings=siblings), EVERY)


def decide(host, device_nodes, mode="auto", allowed=EVERY):
    return decide_places([RankFacts(node, tuple(allowed)) for node in device_nodes], mode, host)


def cpus_of(places):
    return [place.cpus for place in places]


@pytest.mark.parametrize(
    ("device_nodes", "cpus", "node_ids"),
    [
        # ranks of a socket share its cores, and keep hardware threads together
        ([0, 0, 1, 1], [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)], [(0,), (0,), (1,), (1,)]),
        # without a node of the device, ranks fill the sockets in order
        ([None] * 4, None, [(0,), (0,), (1,), (1,)]),
        ([None] * 3, None, [(0,), (0,), (1,)]),
        ([1, None], None, [(1,), (1,)]),
        # a device at a node without usable CPUs takes the nearest
        ([3, 2], None, [(1,), (0,)]),
        # eight GPUs in any order
        ([1, 0, 1, 0, 0, 1, 0, 1], None, [(1,), (0,), (1,), (0,), (0,), (1,), (0,), (1,)]),
    ],
)
def test_ranks_get_cores_of_the_socket_of_their_device(host, device_nodes, cpus, node_ids):
    places = decide(host, device_nodes)
    assert [place.node_ids for place in places] == node_ids
    assert cpus is None or cpus_of(places) == cpus
    assert all(place.is_bound and place.num_sharers == 1 and not place.notes for place in places)
    given = sorted(cpu for place in places for cpu in place.cpus)
    assert len(given) == len(set(given)), "none twice"
    assert ({len(place.cpus) for place in places} == {2} and given == list(EVERY)) or len(device_nodes) < 8


def test_cpus_stay_where_a_launcher_or_torch_has_bound_them_and_without_binding(host):
    off = decide(host, [0, 1], False)
    assert [(place.cpus, place.is_bound, place.num_sharers) for place in off] == [(EVERY, False, 2)] * 2
    node = decide_places([RankFacts(0, (0, 1)), RankFacts(0, (0, 1)), RankFacts(1, (4, 5))], "node", host)
    assert [place.cpus for place in node] == [(0, 1), (0, 1), (4, 5)]
    assert [(place.node_ids, place.num_sharers) for place in node] == [((0,), 2), ((0,), 2), ((1,), 1)]
    assert all(place.is_bound and not place.notes for place in node)
    first, second = decide_places([RankFacts(0, (4, 5)), RankFacts(1, (6, 7))], "auto", host)
    assert (first.cpus, first.node_ids) == ((4, 5), (1,)) and second.cpus == (6, 7)
    assert "CPUs 4-5 were chosen before" in first.notes[0] and len(second.notes) == 1
    assert "the device is at node 0, and the CPUs are of node 1" in first.notes[1]
    # CPUs of one socket for all
    places = decide(host, [0, 0, 1], allowed=(4, 5, 12))
    assert cpus_of(places) == [(4, 5, 12)] * 3 and all(place.num_sharers == 3 for place in places)
    # cyclic SLURM: other CPUs for each, of both sockets
    spread = decide_places([RankFacts(0, (0, 4)), RankFacts(1, (1, 5))], "auto", host)
    assert cpus_of(spread) == [(0, 4), (1, 5)] and spread[0].node_ids == (0, 1)


def test_auto_leaves_one_process_and_one_socket_and_a_kernel_without_numa_as_they_are(host, tmp_path):
    assert not decide(host, [1])[0].is_bound
    small = read_host_cpus(write_machine(tmp_path / "one", ([0, 1],), ("10",)), (0, 1))
    places = decide(small, [0, 0], allowed=(0, 1))
    assert not any(place.is_bound for place in places) and cpus_of(places) == [(0, 1), (0, 1)]
    bare = read_host_cpus(tmp_path / "bare", (0, 1, 2))
    assert bare.nodes == {0: (0, 1, 2)} and bare.distance(0, 0) == 10
    assert cpus_of(decide(bare, [None, None], allowed=(0, 1, 2))) == [(0, 1, 2)] * 2
    (tmp_path / "bare/sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "bare/sys/devices/system/cpu/online").write_text("0-1\n")
    assert read_host_cpus(tmp_path / "bare", (0,)).nodes == {0: (0, 1)}


def test_cores_that_are_offline_or_forbidden_are_not_given(tmp_path):
    nodes = ([0, 1, 3], [4, 5, 6, 7])  # CPU 2 is offline
    host = read_host_cpus(write_machine(tmp_path, nodes, ("10 21", "21 10")), range(8))
    assert cpus_of(decide(host, [0, 1], allowed=(0, 1, 3, 4, 6, 7))) == [(0, 1, 3), (4, 6, 7)]
    # a container with CPUs of both sockets leaves the choice
    assert cpus_of(decide(host, [0, 1], allowed=(1, 3, 4))) == [(1, 3), (4,)]


GPUS = {"0000:1b:00.0": 0, "0000:dc:00.0": 1, "0001:02:00.0": -1}
CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    return write_machine(tmp_path / "root", ([0, 1, 2, 3], [4, 5, 6, 7], [], []), TWO_CARDS, devices=GPUS)


def test_each_socket_s_memory_and_card_come_first(root):
    for node, speed in enumerate((100, 100, 30, 20)):
        folder = root / f"sys/devices/system/node/node{node}/access1/initiators"
        folder.mkdir(parents=True)
        for name in ("read_bandwidth", "write_bandwidth", "read_latency"):
            (folder / name).write_text(f"{speed}\n")
    topology = Topology.detect(root)
    seen = binding.seen_from(topology, (1,), read_host_cpus(root, range(8)), range(8))
    dram, cxl = seen.tiers
    assert (dram.name, cxl.name, dram.node_ids, cxl.node_ids) == ("dram", "cxl", (1, 0), (3, 2))
    assert [node.distance for tier in seen.tiers for node in tier.nodes] == [10, 21, 17, 25]
    assert dram.nearest_first and cxl.nearest_first and [node.node_id for node in cxl.near_nodes] == [3]
    assert cxl.describe() == "cxl: 8.0 GiB on nodes 3, 2, nearest first (0.0 GB/s read, 20 ns)"
    assert (cxl.read_bytes_per_s, cxl.write_bytes_per_s, cxl.read_latency_ns) == (20e6, 20e6, 20)
    assert topology.tier("cxl").read_bytes_per_s == 50e6, "of both cards"
    whole = replace(topology, measured_on=frozenset(range(8)))
    assert describe_machine(seen) == describe_machine(whole), "a calibration of the whole machine is found"


@pytest.fixture
def process(monkeypatch):
    process = SimpleNamespace(cpus=set(range(8)), moved=None, quota=8, threads=None)
    fake_os = SimpleNamespace(**{name: getattr(os, name) for name in ("environ", "listdir")})
    fake_os.sched_getaffinity = lambda thread: set(process.cpus)
    monkeypatch.setattr(binding, "os", fake_os)
    monkeypatch.setattr(binding, "move_threads", lambda cpus: setattr(process, "moved", tuple(cpus)))
    monkeypatch.setattr(_cpu, "available_threads", lambda: min(process.quota, len(process.cpus)))
    monkeypatch.setattr(binding.torch, "set_num_threads", lambda count: setattr(process, "threads", count))
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    gpus = SimpleNamespace(name="cuda", pci_address=lambda index: list(GPUS)[index])
    monkeypatch.setitem(devices._known, "cuda", gpus)
    yield process
    monkeypatch.undo()
    os.environ.pop("OMP_NUM_THREADS", None)


def bound(root, local_rank=0, count=2, device=CPU, **options):
    """Return what a process gets; the others are like it, but for rank 0, which measures."""
    topology, config = Topology.detect(root), OffloadConfig(**options)

    def gather(own):
        first = own._replace(room=binding.measure_room(topology, config))
        return [own if rank == local_rank != 0 else first for rank in range(count)]

    return bind_rank(local_rank, local_rank, count, device, config, topology, gather)


def test_the_node_of_a_device_is_read_from_its_pci_address(root, process, monkeypatch):
    assert [device_node(torch.device("cuda", index), root) for index in range(3)] == [0, 1, None]
    assert device_node(CPU, root) is None
    (root / "sys/bus/pci/devices/0000:dc:00.0/numa_node").unlink()
    assert device_node(torch.device("cuda", 1), root) is None
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert devices.CudaDevices().pci_address(0) == "0001:dc:03.0", "as sysfs names it"


def test_a_rank_is_bound_to_its_socket(root, process):
    found = bound(root, 0, device=torch.device("cuda", 1))
    assert process.moved == (4, 5)
    assert found.notes[0] == "local rank 0 of 2: CPUs 4-5 of node 1, device at node 1 (auto)"
    del os.environ["OMP_NUM_THREADS"]
    found = bound(root, 1)
    assert process.moved == (4, 5, 6, 7)
    assert process.threads == 4 and os.environ["OMP_NUM_THREADS"] == "4"
    assert found.topology.tier("dram").node_ids == (1, 0)
    assert found.topology.measured_on == frozenset(range(8))
    assert found.budgets == {} and found.room["dram"] == pytest.approx(4 * GIB, rel=0.05)
    begins = ("CPUs 4-7 of node 1 (auto)", "sees dram: 8.0 GiB on nodes 1, 0,", "sees cxl", "4 threads", "may take 3.9")
    for note, begin in zip(found.notes, begins, strict=True):
        assert note.removeprefix("local rank 1 of 2").lstrip(": ").startswith(begin)


def test_the_modes_of_torch_bind_before_the_processes_meet(root, process, monkeypatch):
    asked, gpu = [], torch.device("cuda", 1)

    def bind(*, gpu_index, numa_options):
        asked.append((gpu_index, numa_options.affinity_mode.value))
        process.cpus = {4, 5}

    monkeypatch.setattr(torch_binding, "_maybe_apply_numa_binding_to_current_process", bind)
    found = bound(root, 1, device=gpu, numa_binding="exclusive")
    assert asked == [(1, "exclusive")] and process.moved is None
    assert found.topology.tier("dram").node_ids == (1, 0)
    assert found.notes[0] == "local rank 1 of 2: CPUs 4-5 of node 1, device at node 1 (exclusive)"
    # a CPU has no index that torch knows
    process.cpus = set(range(8))
    bound(root, 1, numa_binding="exclusive")
    assert process.moved == (4, 5, 6, 7) and len(asked) == 1


def test_one_process_stays_as_it_is_and_off_divides_memory_alone(root, process):
    config, topology = OffloadConfig(tiers={"cxl": GIB}), Topology.detect(root)
    alone = bind_rank(0, 0, 1, CPU, config, topology, lambda own: [own])
    assert alone.topology is topology and alone.notes == ()
    assert alone.budgets == {"cxl": GIB} and alone.room == {}
    found = bound(root, 1, numa_binding=False, tiers={"dram": 2 * GIB})
    assert not found.topology.tier("dram").nearest_first
    assert found.budgets == {"dram": GIB} and set(found.room) == {"cxl"} and len(found.notes) == 1
    assert process.moved is None and process.threads is None and "OMP_NUM_THREADS" not in os.environ


@pytest.mark.parametrize(
    ("given", "torchrun", "quota", "threads"),
    [
        (None, False, 8, 4), ("3", False, 8, 3), ("16", False, 8, 4), (None, False, 4, 2), (None, False, 1, 1),
        ("1", True, 8, 4), ("2", True, 8, 2),  # one thread is torchrun's own default
    ],
)  # fmt: skip
def test_threads_are_cpus_within_quota_and_limit(root, process, monkeypatch, given, torchrun, quota, threads):
    process.quota = quota
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    bound(root, 1)
    assert process.threads == threads


def test_ranks_divide_the_tier_ssd_and_have_folders_of_their_own(root, process, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    tiers = {"ssd": {"path": list(map(str, folders)), "budget": "8GiB"}}
    config, topology = OffloadConfig(tiers=tiers), Topology.detect(root)
    facts = RankFacts(None, (0, 1), {"dram": GIB, "cxl": GIB, "ssd": 6 * GIB})
    found = bind_rank(7, 1, 3, CPU, config, topology, lambda own: [facts, own, own])
    assert found.ssd.budget_bytes == 2 * GIB, "all divide what local rank 0 has found"
    assert found.ssd.paths == tuple(folder / "rank-7" for folder in folders) and found.ssd.is_part
    assert any("2.0 GiB of ssd" in line and "rank-7" in line for line in found.notes)
    one_of_two_machines = bind_rank(1, 0, 1, CPU, config, topology, lambda own: [own])
    assert one_of_two_machines.ssd.paths == tuple(folder / "rank-1" for folder in folders)
    assert one_of_two_machines.ssd.budget_bytes == 8 * GIB


def _affinities(end, first, second):
    stop, pinned = threading.Event(), threading.Event()

    def elsewhere():
        os.sched_setaffinity(0, {second})
        pinned.set()
        stop.wait()

    threads = [threading.Thread(target=work, daemon=True) for work in (stop.wait, elsewhere)]
    for thread in threads:
        thread.start()
    pinned.wait()
    binding.move_threads((first,))
    threads.append(threading.Thread(target=stop.wait, daemon=True))
    threads[-1].start()
    end.send([os.sched_getaffinity(number) for number in (0, *(thread.native_id for thread in threads))])
    stop.set()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_threads_that_are_there_move_and_those_on_other_cpus_stay():
    first, second = sorted(os.sched_getaffinity(0))[:2]
    ours, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_affinities, args=(end, first, second))
    process.start()
    end.close()
    assert ours.recv() == [{first}, {first}, {second}, {first}]
    process.join()
