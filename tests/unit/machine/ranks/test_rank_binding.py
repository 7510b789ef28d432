"""What `bind_rank` asks, tells the other processes, and changes in its own."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.numa import binding as torch_binding

from lightning_cxl import OffloadConfig, Topology
from lightning_cxl.devices import transfer
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine import binding
from lightning_cxl.machine.binding import RankFacts, bind_rank, device_node, measure_room
from lightning_cxl.native import _cpu
from tests.unit.machine.ranks.sysfs import GIB, TWO_CARDS, write_machine

NODES = ([0, 1, 2, 3], [4, 5, 6, 7], [], [])
GPUS = {"0000:1b:00.0": 0, "0000:dc:00.0": 1, "0001:02:00.0": -1}
CPU = torch.device("cpu")


@pytest.fixture
def root(tmp_path):
    return write_machine(tmp_path, NODES, TWO_CARDS, devices=GPUS)


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """This process, without its CPUs being touched."""
    process = SimpleNamespace(cpus=set(range(8)), moved=None, quota=8, threads=None)
    fake_os = SimpleNamespace(**{name: getattr(os, name) for name in ("environ", "listdir")})
    fake_os.sched_getaffinity = lambda thread: set(process.cpus)
    monkeypatch.setattr(binding, "os", fake_os)
    monkeypatch.setattr(binding, "move_threads", lambda cpus: setattr(process, "moved", tuple(cpus)))
    monkeypatch.setattr(_cpu, "available_threads", lambda: min(process.quota, len(process.cpus)))
    monkeypatch.setattr(binding.torch, "set_num_threads", lambda count: setattr(process, "threads", count))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    gpus = SimpleNamespace(name="cuda", pci_address=lambda index: list(GPUS)[index])
    monkeypatch.setitem(transfer._known, "cuda", gpus)
    yield process
    monkeypatch.undo()
    os.environ.pop("OMP_NUM_THREADS", None)


def bound(root, local_rank=0, count=2, device=CPU, **options):
    """Return what a process gets; the others are like it, but for rank 0, which measures."""
    topology, config = Topology.detect(root), OffloadConfig(**options)

    def gather(own):
        first = own._replace(room=measure_room(topology, config))
        return [own if rank == local_rank != 0 else first for rank in range(count)]

    return bind_rank(local_rank, local_rank, count, device, config, topology, gather)


def test_the_node_of_a_device_is_read_from_its_pci_address(root):
    assert [device_node(torch.device("cuda", index), root) for index in range(3)] == [0, 1, None]
    assert device_node(CPU, root) is None
    (root / "sys/bus/pci/devices/0000:dc:00.0/numa_node").unlink()
    assert device_node(torch.device("cuda", 1), root) is None


def test_cuda_names_the_address_as_sysfs_does(monkeypatch):
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xDC, pci_device_id=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert transfer.CudaDevices().pci_address(0) == "0001:dc:03.0"


def test_a_rank_is_bound_to_its_socket(root, process):
    found = bound(root, 1)
    assert process.moved == (4, 5, 6, 7)
    assert process.threads == 4 and os.environ["OMP_NUM_THREADS"] == "4"
    assert found.topology.tier("dram").node_ids == (1, 0)
    assert found.topology.measured_on == frozenset(range(8))
    assert found.budgets == {} and found.room["dram"] == pytest.approx(4 * GIB, rel=0.05)
    lines = found.notes
    assert lines[0] == "local rank 1 of 2: CPUs 4-7 of node 1 (auto)"
    assert lines[1] == "local rank 1 of 2 sees dram: 8.0 GiB on nodes 1, 0, nearest first"
    assert lines[3:] == (
        "local rank 1 of 2: 4 threads",
        "local rank 1 of 2 may take 3.9 GiB of dram, 3.9 GiB of cxl: the memory of this machine is divided",
    )


def test_a_rank_is_bound_to_the_socket_of_its_device(root, process):
    found = bound(root, 0, device=torch.device("cuda", 1))
    assert process.moved == (4, 5)
    assert found.notes[0] == "local rank 0 of 2: CPUs 4-5 of node 1, device at node 1 (auto)"


def test_the_modes_of_torch_bind_before_the_processes_meet(root, process, monkeypatch):
    asked = []

    def bind(*, gpu_index, numa_options):
        asked.append((gpu_index, numa_options.affinity_mode.value))
        process.cpus = {4, 5}

    name = "_maybe_apply_numa_binding_to_current_process"
    monkeypatch.setattr(torch_binding, name, bind)
    found = bound(root, 1, device=torch.device("cuda", 1), numa_binding="exclusive")
    assert asked == [(1, "exclusive")] and process.moved is None
    assert found.topology.tier("dram").node_ids == (1, 0)
    assert found.notes[0] == "local rank 1 of 2: CPUs 4-5 of node 1, device at node 1 (exclusive)"
    # a CPU has no index that torch knows
    process.cpus = set(range(8))
    bound(root, 1, numa_binding="exclusive")
    assert process.moved == (4, 5, 6, 7) and len(asked) == 1
    monkeypatch.setattr(torch_binding, name, lambda **_: 1 / 0)
    with pytest.raises(ConfigError, match="numa_binding='socket' cannot be honoured: division by zero"):
        bound(root, 1, device=torch.device("cuda", 1), numa_binding="socket")


def test_one_process_stays_as_it_is(root, process):
    found = bind_rank(
        0, 0, 1, CPU, OffloadConfig(tiers={"cxl": GIB}), topology := Topology.detect(root), lambda own: [own]
    )
    assert found.topology is topology and found.notes == ()
    assert found.budgets == {"cxl": GIB} and found.room == {}
    assert process.moved is None and process.threads is None and "OMP_NUM_THREADS" not in os.environ


def test_off_divides_memory_and_nothing_else(root, process):
    found = bound(root, 1, numa_binding=False, tiers={"dram": 2 * GIB})
    assert process.moved is None and process.threads is None
    assert not found.topology.tier("dram").nearest_first
    assert found.budgets == {"dram": GIB} and set(found.room) == {"cxl"} and len(found.notes) == 1


@pytest.mark.parametrize(
    ("given", "torchrun", "quota", "threads"),
    [
        (None, False, 8, 4),
        ("3", False, 8, 3),
        ("1", False, 8, 1),
        ("1", True, 8, 4),  # torchrun's own default
        ("2", True, 8, 2),
        ("16", False, 8, 4),
        (None, False, 4, 2),
        (None, False, 1, 1),
    ],
)
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
