"""Tiers of machines, as the kernel describes nodes, limits and drives."""

import copy
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError, MissingTierWarning, TierNotFoundError
from lightning_cxl.machine import topology as disk_space
from lightning_cxl.machine.topology import (
    TierKind,
    Topology,
    cgroup_limits,
    node_free_bytes,
    read_nodes,
    ssd_capacity_bytes,
)
from tests.fakes import fake_topology

MIB = 1 << 20
NODE = "sys/devices/system/node"


# -- nodes -----------------------------------------------------------------------------------------------------------


def test_read_nodes_of_a_machine_with_two_cards(machine):
    nodes = read_nodes(machine("3node"))
    found = [(node.node_id, node.has_cpus, node.distance, node.movable) for node in nodes]
    assert found == [(0, True, 10, False), (1, False, 24, False), (2, False, 24, False)]
    card = nodes[1]
    assert card.capacity_bytes == 1032020 * 1024
    assert (card.read_bytes_per_s, card.write_bytes_per_s) == (28672e6, 28672e6)
    assert (card.read_latency_ns, card.write_latency_ns) == (250, 250)


def test_kernel_without_numa_is_one_node(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1024 kB\nMemAvailable: 512 kB\n")
    (node,) = read_nodes(tmp_path)
    assert (node.node_id, node.has_cpus, node.capacity_bytes, node.movable) == (0, True, 1 << 20, False)


# -- tiers -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "cards"), [("2node", (1,)), ("3node", (1, 2))])
def test_memory_only_nodes_are_cxl(machine, name, cards):
    topology = Topology.detect(machine(name))
    assert topology.names == ("dram", "cxl") and topology.notes == ()
    assert topology.tier("dram").node_ids == (0,)
    cxl = topology.tier("cxl")
    assert (cxl.kind, cxl.node_ids, cxl.emulated) == (TierKind.CXL, cards, False)
    assert cxl.capacity_bytes == {1: 1031208, 2: 1032020 + 1031208}[len(cards)] * 1024
    assert cxl.read_bytes_per_s == cxl.write_bytes_per_s == 28672e6 * len(cards)
    assert cxl.read_latency_ns == 250
    assert copy.deepcopy(topology).tiers == pickle.loads(pickle.dumps(topology)).tiers == topology.tiers
    with pytest.raises(TierNotFoundError, match=r"no tier 'cxl7'.*'dram', 'cxl'"):
        topology.tier("cxl7")


def test_memory_of_a_gpu_and_cards_outside_of_the_cpuset_are_left_out(machine):
    gpu = {"proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node: 1\nStatus: online\n"}
    assert Topology.detect(machine("3node", gpu)).tier("cxl").node_ids == (2,)
    topology = Topology.detect(machine("2node", {"proc/self/status": "Name:\tpython\nMems_allowed_list:\t0\n"}))
    assert topology.names == ("dram",)
    (note,) = topology.notes
    assert "node 1 (CXL, 1007.0 MiB)" in note and "cpuset" in note


@pytest.mark.filterwarnings("error")
def test_two_sockets_without_a_card_are_one_tier_and_no_word_about_it_until_cxl_is_asked_for(machine):
    topology = Topology.detect(machine("2socket"))
    assert topology.names == ("dram",) and topology.tier("dram").node_ids == (0, 1)
    assert "cxl" not in topology.describe().lower()
    with pytest.raises(TierNotFoundError, match=r"no CXL memory.*dram: 2\.9 GiB.*daxctl"):
        Topology.detect(topology.root, on_missing_tier="error")
    with pytest.warns(MissingTierWarning, match="node 0, 1") as caught, ThreadPoolExecutor(8) as pool:
        (cxl,) = set(pool.map(lambda _: topology.tier("cxl"), range(64)))
    assert len(caught) == 1
    assert (cxl.emulated, cxl.kind, cxl.node_ids) == (True, TierKind.CXL, (0, 1))
    assert cxl.describe().endswith("[emulated: backed by DRAM]")
    assert topology.names == ("dram", "cxl") and topology.node_tier(0).name == "dram"


def test_node_free_reads_now_and_counts_file_cache_and_keeps_headroom_within_a_control_group(machine):
    root = machine("2node")
    topology = Topology.detect(root)
    assert 0 < topology.node_free_bytes(1) < topology.tier("cxl").capacity_bytes
    meminfo = ["MemTotal: 1048576 kB", "MemFree: 524288 kB", "Active(file): 1024 kB", "Inactive(file): 2048 kB"]
    (root / NODE / "node1/meminfo").write_text("\n".join(f"Node 1 {line}" for line in meminfo))
    assert node_free_bytes(root, 1, 1 << 30) == (512 << 20) + (3 << 20) - (1 << 30) // 64
    assert topology.node_free_bytes(1) < 516 << 20
    (root / "sys/devices/system/node/has_memory").write_text("0\n")  # the kernel has taken the other one offline
    (root / "sys/devices/system/node/node1/meminfo").unlink()
    assert topology.node_free_bytes(1) == 0 < topology.node_free_bytes(0)
    files = {"proc/self/cgroup": "0::/job\n", **v2("/job", 256 * MIB, 200 * MIB)}
    limited = Topology.detect(machine("3node", files))
    assert limited.node_free_bytes(1) == 56 * MIB and limited.host_limit_bytes() == 256 * MIB


def test_the_tier_ssd_is_no_tier_of_memory():
    plain = fake_topology(("1GiB",), ("2GiB",))
    topology = plain.with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
    assert topology.names == ("dram", "cxl")
    assert (topology.tier("ssd"), topology.select(kind=TierKind.SSD)) == (topology.ssd, (topology.ssd,))
    assert (topology.ssd.capacity_bytes, topology.ssd.node_ids) == (1 << 40, ())
    assert topology.host_limit_bytes() == plain.host_limit_bytes() == 3 << 30
    assert topology.describe().splitlines()[-1] == "ssd: 1.0 TiB in /nvme/run"
    with pytest.raises(TierNotFoundError, match=r'this machine has: .dram., .cxl.\. Name a folder.*"path": "/nvme'):
        plain.tier("ssd")


# -- limits ----------------------------------------------------------------------------------------------------------

UNLIMITED_V1 = "9223372036854771712\n"


@pytest.fixture
def limited(machine):
    """Return limits and what is available of a machine of 4 GiB with 3 GiB available, where files say more."""

    def limits(files):
        root = machine("2node", {"proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 3145728 kB\n", **files})
        topology = Topology.detect(root)
        return topology.host_limit_bytes(), topology.host_available_bytes(), len(cgroup_limits(root))

    return limits


def v1(path, limit, usage=0, inactive_file=0):
    names = {"limit_in_bytes": limit, "usage_in_bytes": usage}
    names["stat"] = f"inactive_file 12345\ntotal_inactive_file {inactive_file}\ntotal_active_file 0"
    return {f"sys/fs/cgroup/memory{path}/memory.{name}": f"{text}\n" for name, text in names.items()}


def v2(path, limit, usage=0, inactive_file=0, high="max"):
    names = {"max": limit, "high": high, "current": usage}
    names["stat"] = f"anon 5\ninactive_file {inactive_file}\nactive_file 0"
    return {f"sys/fs/cgroup{path}/memory.{name}": f"{text}\n" for name, text in names.items()}


@pytest.mark.parametrize(
    ("group", "files", "limit_mib", "available_mib"),
    [
        ("4:memory:/a\n0::/", v1("/a", UNLIMITED_V1) | v1("", UNLIMITED_V1), 4096, 3072),
        ("3:cpuset:/a\n2:name=memory-like:/a", v1("/a", 64 * MIB), 4096, 3072),  # other controllers
        ("0::/a", v2("/a", "max", 10 * MIB, high=64 * MIB), 64, 54),  # v2 has a second limit, and the smaller counts
        ("0::/a", v2("/a", 128 * MIB, 10 * MIB, high=64 * MIB), 64, 54),
        ("0::/a", v2("/a", 64 * MIB, 10 * MIB, high=128 * MIB), 64, 54),
        ("0::/a", v2("/a", 64 * MIB, 70 * MIB), 64, 0),  # a group over its limit
    ],
)
def test_which_limits_count(limited, group, files, limit_mib, available_mib):
    found = limited({"proc/self/cgroup": f"{group}\n", **files})
    assert found == (limit_mib * MIB, available_mib * MIB, int(limit_mib < 4096))


@pytest.mark.parametrize(("version", "prefix"), [(v1, "4:cpu,memory:"), (v2, "0::")])
@pytest.mark.parametrize(
    ("path", "groups", "limit_mib", "available_mib"),
    [
        ("/a/b", {"/a/b": (512 * MIB, 300 * MIB, 100 * MIB)}, 512, 512 - 300 + 100),
        ("/a/b", {"/a/b": (2048 * MIB, 1024 * MIB), "/a": (3072 * MIB, 2944 * MIB)}, 2048, 128),
        ("/docker/0ab", {"": (256 * MIB, 56 * MIB)}, 256, 200),  # a container sees its own group at the mount's top
        ("/../outside/0ab", {"": (256 * MIB, 56 * MIB)}, 256, 200),
    ],
)
def test_every_group_and_ancestor_counts(limited, version, prefix, path, groups, limit_mib, available_mib):
    files = {name: text for group, numbers in groups.items() for name, text in version(group, *numbers).items()}
    found = limited({"proc/self/cgroup": f"{prefix}{path}\n", **files})
    assert found == (limit_mib * MIB, available_mib * MIB, len(groups))


# -- drives ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ([(1, 1000)], 980),  # less two percent
        ([(1, 1000), (2, 100), (3, 5000)], 294),  # the drive with least free space decides
        ([(1, 1000), (1, 1000)], 980),  # folders on one drive share what is free there
    ],
)
def test_without_a_budget_the_capacity_is_what_is_free(monkeypatch, tmp_path, given, blocks):
    drives, free = {}, {}
    for index, (drive, num_blocks) in enumerate(given):
        folder = tmp_path / str(index)
        folder.mkdir()
        drives[folder], free[folder] = drive, SimpleNamespace(f_bavail=num_blocks, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", free.__getitem__)
    monkeypatch.setattr(disk_space, "drive_of", drives.__getitem__)
    monkeypatch.setattr(disk_space, "filesystem_of", lambda folder: "")
    later = tuple(folder / "run" / "state" for folder in drives)  # count as the ones around them
    for folders in (tuple(drives), later):
        assert ssd_capacity_bytes(SsdOptions(folders)) == 4096 * blocks
        assert ssd_capacity_bytes(SsdOptions(folders, 1 << 50)) == 1 << 50, "a budget counts whatever is free"


def test_a_file_and_a_folder_in_memory_are_refused_and_one_on_a_network_is_warned_of(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r'the path .*file/run of "ssd" is no folder: .*file is something else'):
        ssd_capacity_bytes(SsdOptions((tmp_path / "file" / "run",)))
    options = SsdOptions((tmp_path / "new",), 1 << 30)
    for kind in ("tmpfs", "ramfs"):
        monkeypatch.setattr(disk_space, "filesystem_of", lambda folder, kind=kind: kind)
        with pytest.raises(ConfigError, match=f"lies in memory.*is on {kind}.*Give a folder on a drive"):
            ssd_capacity_bytes(options)
    for kind, is_said in (("ext4", False), ("", False), ("nfs4", True), ("fuse.sshfs", True), ("fuseblk", False)):
        caplog.clear()
        monkeypatch.setattr(disk_space, "filesystem_of", lambda folder, kind=kind: kind)
        assert ssd_capacity_bytes(options) == 1 << 30
        assert (f"is on {kind}:" in caplog.text) is is_said
