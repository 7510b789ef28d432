import copy
import os
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError, LightningCXLWarning, MissingTierWarning, TierNotFoundError
from lightning_cxl.machine import speeds
from lightning_cxl.machine import topology as disk_space
from lightning_cxl.machine.speeds import load_calibration, load_machine, machine_of, save_calibration
from lightning_cxl.machine.topology import TierKind, Topology, node_free_bytes, read_nodes, ssd_capacity_bytes
from tests.fakes import fake_topology

MIB = 1 << 20
NODE = "sys/devices/system/node"


def test_nodes_of_a_machine_with_two_cards_and_of_a_kernel_without_numa(machine, tmp_path):
    nodes = read_nodes(machine("3node"))
    found = [(node.node_id, node.has_cpus, node.distance, node.movable) for node in nodes]
    assert found == [(0, True, 10, False), (1, False, 24, False), (2, False, 24, False)]
    card = nodes[1]
    assert card.capacity_bytes == 1032020 * 1024
    assert (card.read_bytes_per_s, card.write_bytes_per_s) == (28672e6, 28672e6)
    assert (card.read_latency_ns, card.write_latency_ns) == (250, 250)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1024 kB\nMemAvailable: 512 kB\n")
    (node,) = read_nodes(tmp_path)
    assert (node.node_id, node.has_cpus, node.capacity_bytes, node.movable) == (0, True, 1 << 20, False)


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
    limited = Topology.detect(machine("3node", {"proc/self/cgroup": "0::/job\n", **v2("/job", 256 * MIB, 200 * MIB)}))
    assert limited.node_free_bytes(1) == 56 * MIB and limited.host_limit_bytes() == 256 * MIB


def test_the_tier_ssd_is_no_tier_of_memory():
    plain = fake_topology(("1GiB",), ("2GiB",))
    topology = plain.with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
    assert topology.names == ("dram", "cxl") and topology.tier("ssd") is topology.ssd
    assert (topology.ssd.capacity_bytes, topology.ssd.node_ids) == (1 << 40, ())
    assert topology.host_limit_bytes() == plain.host_limit_bytes() == 3 << 30
    with pytest.raises(TierNotFoundError, match=r'this machine has: .dram., .cxl.\. Name a folder.*"path": "/nvme'):
        plain.tier("ssd")


UNLIMITED_V1 = "9223372036854771712\n"


@pytest.fixture
def limited(machine):
    """Return limits and what is available of a machine of 4 GiB with 3 GiB available, where files say more."""

    def limits(files):
        root = machine("2node", {"proc/meminfo": "MemTotal: 4194304 kB\nMemAvailable: 3145728 kB\n", **files})
        topology = Topology.detect(root)
        return topology.host_limit_bytes(), topology.host_available_bytes(), len(disk_space.cgroup_limits(root))

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


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ([(1, 1000), (2, 100), (3, 5000)], 294),  # the drive with least free space decides, less two percent
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


GIB = 2**30
SMALL = """
name: small
tiers:
  - name: dram0
    kind: dram
    capacity_bytes: 8GiB
    adam_bytes_per_s: 40 GB/s
    device_read_bytes_per_s: 50e9
    device_write_bytes_per_s: 2 GiB/s
device:
  flops: 1.0e+12
  h2d_bytes_per_s: 12000000000
  d2h_bytes_per_s: 12 GB/s
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return tmp_path / "mine.yaml"

    return write


def test_a_file_is_read_as_people_write_it(written):
    more = "ssd: {capacity_bytes: 1TiB, read_bytes_per_s: 7 GB/s, write_bytes_per_s: 6.0e+9}\n"
    more += "links: {peer_bytes_per_s: 360 GB/s, network_latency_s: 2.0e-5}\n"
    rates = {"adam_bytes_per_s": 40e9, "device_read_bytes_per_s": 50e9, "device_write_bytes_per_s": 2 * GIB}
    tier = speeds.MachineTier(name="dram0", kind=TierKind.DRAM, capacity_bytes=8 * GIB, **rates)
    device = speeds.Device(flops=1e12, h2d_bytes_per_s=12e9, d2h_bytes_per_s=12e9)
    plain = speeds.Machine(name="small", tiers=(tier,), device=device)
    assert load_machine(written(SMALL)) == plain and plain.links == speeds.MachineLinks()
    ssd = speeds.MachineSsd(capacity_bytes=1 << 40, read_bytes_per_s=7e9, write_bytes_per_s=6e9)
    links = speeds.MachineLinks(peer_bytes_per_s=360e9, network_latency_s=2e-5)
    assert load_machine(written(SMALL + more)) == replace(plain, ssd=ssd, links=links)
    assert ssd.has_speeds and not replace(ssd, write_bytes_per_s=None).has_speeds


def test_a_file_that_says_something_else_is_refused(written):
    for old, new, message in (
        ("name: small", "nam: small", "the file has the unknown key 'nam'; its keys are: name, tiers, device, cache"),
        ("    kind: dram\n", "", "tier 1 of 1 lacks kind; its keys are: name, kind, capacity_bytes"),
        ("40 GB/s", "fast", "tier 1 of 1: adam_bytes_per_s must be a number of bytes per second, or text such as"),
        ("kind: dram", "kind: ssd", "has the tier 'ssd' among `tiers`, which are memory: describe it under `ssd`"),
    ):
        path = written(SMALL.replace(old, new, 1))
        with pytest.raises(ConfigError, match=f"^{path}: .*{re.escape(message)}"):
            load_machine(path)


FAST = {"read_bytes_per_s": 30e9, "write_bytes_per_s": 20e9}
SLOW = {"read_bytes_per_s": 10e9, "write_bytes_per_s": 8e9, "h2d_bytes_per_s": 7e9, "d2h_bytes_per_s": 5e9}
CALIBRATED = "calibration of 2026-01-31 with 2 threads"
CALIBRATION = speeds.Calibration(
    date="2026-01-31",
    num_threads=2,
    nodes=(
        speeds.NodeSpeeds(node_id=0, adam_bytes_per_s=25e9, latency_ns=90.5, **FAST),
        speeds.NodeSpeeds(node_id=1, adam_bytes_per_s=9e9, latency_ns=250.0, **SLOW),
    ),
    devices=(speeds.DeviceSpeeds(kind="cpu", name="some CPU", flops=1e11),),
    cache_bytes=32 << 20,
    cache_bytes_per_s=1e11,
    ssds=(speeds.SsdSpeeds(folder="/nvme", read_bytes_per_s=7e9, write_bytes_per_s=6e9, direct=True),),
)


@pytest.fixture
def two_nodes(machine):
    return Topology.detect(machine("2node"))


def test_what_is_kept_comes_back(two_nodes):
    assert load_calibration(two_nodes, ["gpu"]) is None
    path = save_calibration(CALIBRATION, two_nodes, ["gpu"])
    assert path == speeds.calibration_path(two_nodes, ["gpu"])
    assert load_calibration(two_nodes, ["gpu"]) == CALIBRATION and list(path.parent.iterdir()) == [path]
    later = replace(CALIBRATION, date="2026-02-01")
    save_calibration(later, two_nodes, ["gpu"])
    assert load_calibration(two_nodes, ["gpu"]) == later
    save_calibration(CALIBRATION, fake_topology(), [])
    assert load_calibration(fake_topology(), []) is None, "an invented machine was not measured"


def described(root):
    return speeds.describe_machine(replace(Topology.detect(root), measured_on=frozenset({0, 1})))


@pytest.mark.parametrize(
    ("file", "text", "is_other"),
    [
        ("node1/meminfo", "Node 1 MemTotal: 2097152 kB\n", True),
        ("node1/meminfo", f"Node 1 MemTotal: {1031208 - 2048} kB\n", False),  # kernels differ in what they keep
        ("has_memory", "0\n", True),
        ("node0/cpulist", "0\n", True),
        ("../../../../proc/cpuinfo", "model name\t: Another CPU\n", True),
    ],
)
def test_a_changed_machine_is_not_given_old_numbers(machine, file, text, is_other):
    root = machine("2node", {"proc/cpuinfo": "model name\t: A CPU\n"})
    before = described(root)
    (root / NODE / file).write_text(text)
    assert (described(root) != before) is is_other


def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(two_nodes):
    for written, instead, message in (
        ("}", "", "JSONDecodeError"),
        ('"version": 2', '"version": 1', "its version is 1, this program writes 2"),
        ('"adam_bytes_per_s": 25000000000.0', '"adam_bytes_per_s": 0', "adam_bytes_per_s must be positive"),
    ):
        path = save_calibration(CALIBRATION, two_nodes, [])
        path.write_text(path.read_text().replace(written, instead))
        with pytest.warns(LightningCXLWarning, match=rf"{path}.*{re.escape(message)}") as caught:
            assert load_calibration(two_nodes, []) is None
        assert len(caught) == 1


def test_calibration_wins_over_firmware_where_all_nodes_of_a_tier_were_measured(two_nodes, tmp_path, machine):
    save_calibration(CALIBRATION, two_nodes, [])
    found = machine_of(two_nodes)
    dram, card = found.tiers
    assert (dram.adam_bytes_per_s, dram.latency_ns) == (25e9, 90.5)
    # no device was measured on node 0: the CPU shows what the memory can do
    assert (dram.device_read_bytes_per_s, dram.device_write_bytes_per_s) == (30e9, 20e9)
    assert (card.device_read_bytes_per_s, card.device_write_bytes_per_s) == (7e9, 5e9)
    assert (found.cache.nbytes, found.cache.bytes_per_s) == (32 << 20, 1e11)
    assert f"dram: {CALIBRATED}; cxl: {CALIBRATED}" in found.source
    larger = Topology.detect(machine("3node"))
    save_calibration(CALIBRATION, larger, [])
    found = machine_of(larger)
    assert found.tier("dram").adam_bytes_per_s == 25e9
    assert found.tier("cxl").device_read_bytes_per_s == pytest.approx(2 * 28672e6)
    assert f"dram: {CALIBRATED}; cxl: firmware" in found.source


def test_a_file_wins_field_by_field(two_nodes, written):
    save_calibration(CALIBRATION, two_nodes, [])
    file = written(
        "name: mine\nwrite_contention: 4\nsource: my own hands\ndevice: {flops: 3.0e+12}\ncache: {nbytes: 1MiB}\n"
        "links: {peer_bytes_per_s: 25 GB/s}\n"
        "tiers: [{name: cxl, adam_bytes_per_s: 12e9, device_read_bytes_per_s: 2 GiB/s, capacity_bytes: 512MiB}]\n"
    )
    found = machine_of(two_nodes, file=file)
    card = found.tier("cxl")
    assert (card.adam_bytes_per_s, card.device_read_bytes_per_s, card.capacity_bytes) == (12e9, 2 * GIB, 512 << 20)
    assert (card.device_write_bytes_per_s, card.latency_ns) == (5e9, 250), "still the calibration's"
    assert found.tier("dram").adam_bytes_per_s == 25e9
    assert found.device.flops == 3e12 and found.links == speeds.MachineLinks(peer_bytes_per_s=25e9)
    assert (found.cache.nbytes, found.cache.bytes_per_s) == (1 << 20, 1e11)
    assert (found.name, found.write_contention) == ("mine", 4)
    for text in (f"cxl: file and {CALIBRATED}", "but flops: file", "(my own hands)"):
        assert text in found.source
    with pytest.raises(TierNotFoundError, match="no tier 'nvm'"):
        machine_of(two_nodes, file=written("tiers: [{name: nvm, adam_bytes_per_s: 1}]"))


@pytest.mark.parametrize(
    "missing", [("read_bandwidth", "write_bandwidth", "read_latency", "write_latency"), ("write_bandwidth",)]
)
def test_nothing_is_guessed(machine, written, missing):
    ratings = f"{NODE}/node1/access1/initiators"
    topology = Topology.detect(machine("2node", {f"{ratings}/{name}": None for name in missing}))
    assert machine_of(topology) is None
    assert speeds.tier_speeds(topology.tier("cxl"), None).origin == "unknown"
    fields = "adam_bytes_per_s: 1, device_read_bytes_per_s: 2, device_write_bytes_per_s: 3"
    assert machine_of(topology, file=written(f"tiers: [{{name: cxl, {fields}}}]")).tier("cxl").adam_bytes_per_s == 1
