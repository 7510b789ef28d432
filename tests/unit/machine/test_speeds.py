"""Machines in YAML, measured speeds that are kept, and which source of speeds wins."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError, LightningCXLWarning, TierNotFoundError
from lightning_cxl.machine import speeds
from lightning_cxl.machine.speeds import load_calibration, load_machine, machine_of, save_calibration
from lightning_cxl.machine.topology import TierKind, Topology

MACHINES = sorted((Path(__file__).resolve().parents[3] / "examples" / "machines").glob("*.yaml"))
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
    """Return ``written(text)``: a YAML file with that text."""

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


def test_every_example_is_read_and_comes_back_from_a_file(tmp_path):
    assert len(MACHINES) > 1
    for path in MACHINES:
        machine = load_machine(path)
        assert machine.name == path.stem and machine.source
        speeds.save_machine(machine, tmp_path / "copy.yaml")
        assert load_machine(tmp_path / "copy.yaml") == machine


def test_every_field_comes_back_from_a_file(tmp_path):
    rates = {"adam_bytes_per_s": 1 / 3, "device_read_bytes_per_s": 1e-7, "device_write_bytes_per_s": 1e20}
    more = {"num_nodes": 2, "device_write_buffer_bytes": 7, "latency_ns": 1e2}
    near = speeds.MachineTier(name="near", kind=TierKind.DRAM, capacity_bytes=3, **rates, **more)
    far = replace(near, name="far", kind=TierKind.CXL, backed_by="near", latency_ns=None)
    device = speeds.Device(
        name="cpu", flops=0.1, h2d_bytes_per_s=1, d2h_bytes_per_s=2, copy_latency_s=1e-5, is_host=True
    )
    links = speeds.MachineLinks(devices_per_port=3, port_bytes_per_s=1e-3, peer_bytes_per_s=1 / 3, peer_latency_s=1e-6)
    other = {"write_contention": 4.5, "source": "measured, 1 run", "host_bytes": 11, "has_speeds": False}
    machine = speeds.Machine(
        name="ünusual: name",
        tiers=(near, far),
        device=replace(device, count=3),
        cache=speeds.Cache(nbytes=5, bytes_per_s=math.inf),
        **other,
        links=replace(links, network_bytes_per_s=1e12, network_latency_s=0.5),
        ssd=speeds.MachineSsd(
            capacity_bytes=13, read_bytes_per_s=1 / 7, write_bytes_per_s=None, num_drives=2, versions=2
        ),
    )
    speeds.save_machine(machine, tmp_path / "machine.yaml")
    assert load_machine(tmp_path / "machine.yaml") == machine


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: small", "nam: small", "the file has the unknown key 'nam'; its keys are: name, tiers, device, cache"),
        ("    kind: dram\n", "", "tier 1 of 1 lacks kind; its keys are: name, kind, capacity_bytes"),
        ("kind: dram", "kind: tape", "tier 1 of 1: kind must be one of gpu, dram, cxl, ssd, got 'tape'"),
        ("8GiB", "8 apples", "tier 1 of 1: capacity_bytes: cannot read '8 apples' as a size"),
        ("40 GB/s", "fast", "tier 1 of 1: adam_bytes_per_s must be a number of bytes per second, or text such as"),
        ("40 GB/s", "0 GB/s", "tier 1 of 1: adam_bytes_per_s must be positive, got 0.0"),
        ("40 GB/s", ".inf", "adam_bytes_per_s must be finite, got inf"),
        ("1.0e+12", "true", "the file: device: flops must be a number, got True"),
        ("  flops", "  count: 1.5\n  flops", "the file: device: count must be a whole number, got 1.5"),
        ("  flops", "  is_host: 1\n  flops", "the file: device: is_host must be true or false, got 1"),
        ("  flops", "  name: 5\n  flops", "the file: device: name must be text, got 5"),
        ("kind: dram", "kind: dram\n    backed_by: cxl", "the file: there is no tier 'cxl'; machine `small` has"),
        ("name: small", "name: small\nwrite_contention: 0.5", "write_contention must be at least 1, got 0.5"),
        ("kind: dram", "kind: ssd", "has the tier 'ssd' among `tiers`, which are memory: describe it under `ssd`"),
        ("device:", "ssd: {capacity_bytes: 1, num_drives: 0}\ndevice:", "ssd: num_drives must be at least 1"),
        ("device:", "ssd: {capacity_bytes: 1, versions: 3}\ndevice:", "versions must be 1 or 2, got 3"),
        ("device:", "links: 5\ndevice:", "the file: links must map devices_per_port, port_bytes_per_s, peer_bytes"),
        (
            "device:",
            "links: {devices_per_port: 2}\ndevice:",
            "2 devices share a port, and port_bytes_per_s is not given",
        ),
        ("device:", "links: {peer_latency_s: -1}\ndevice:", "links: peer_latency_s must be at least 0, got -1"),
    ],
)
def test_a_file_that_says_something_else_is_refused(old, new, message, written):
    assert old in SMALL
    path = written(SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        load_machine(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


def test_what_is_no_machine_is_refused(written):
    tiers = "tiers must be a list, each entry with name, kind"
    texts = {"- 1": "the file must map name, tiers, device", "name: x\ntiers: 3\ndevice: {}": tiers, "{": "is not YAML"}
    for text, message in texts.items():
        with pytest.raises(ConfigError, match=message):
            load_machine(written(text))
    with pytest.raises(ConfigError, match=r"cannot read the machine file .*nowhere.yaml: No such file"):
        load_machine("nowhere.yaml")


def test_devices_share_a_port_with_those_that_are_used(written):
    device = speeds.Device(name="gpu", flops=1e12, h2d_bytes_per_s=50e9, d2h_bytes_per_s=40e9, count=4)
    links = speeds.MachineLinks(devices_per_port=2, port_bytes_per_s=60e9)
    machine = replace(load_machine(written(SMALL)), device=device, links=links)
    assert machine.with_devices(1).device == replace(device, count=1)
    for count in (2, 3, 4):
        expected = replace(device, count=count, h2d_bytes_per_s=30e9, d2h_bytes_per_s=30e9)
        assert machine.with_devices(count).device == machine.with_devices(count).with_devices(count).device == expected
    for count in (0, 5):
        with pytest.raises(ConfigError, match=f"`small` has 4 x gpu, got {count} devices: choose 1 to 4 of each"):
            machine.with_devices(count)
    cpu = replace(machine, device=replace(device, is_host=True, count=1))
    assert cpu.with_devices(4).device == replace(device, is_host=True, count=4, flops=0.25e12)


# -- measured speeds are kept for this very machine, whole or not at all -----------------------------------------------

NODE = "sys/devices/system/node"


SLOW = {"read_bytes_per_s": 10e9, "write_bytes_per_s": 8e9, "h2d_bytes_per_s": 7e9, "d2h_bytes_per_s": 5e9}
CALIBRATED = "calibration of 2026-01-31 with 2 threads"
CALIBRATION = speeds.Calibration(
    date="2026-01-31",
    num_threads=2,
    nodes=(
        speeds.NodeSpeeds(
            node_id=0, read_bytes_per_s=30e9, write_bytes_per_s=20e9, adam_bytes_per_s=25e9, latency_ns=90.5
        ),
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
    save_calibration(CALIBRATION, Topology.fake(), [])
    assert load_calibration(Topology.fake(), []) is None, "an invented machine was not measured"


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


def test_other_devices_and_other_cpus_of_the_process_are_another_machine(two_nodes):
    cpus = frozenset({0, 1})
    names = {
        speeds.calibration_path(replace(two_nodes, measured_on=allowed), devices)
        for devices, allowed in [([], cpus), (["H100"], cpus), (["H100", "H100"], cpus), ([], frozenset({0}))]
    }
    assert len(names) == 4


@pytest.mark.parametrize(
    ("written", "instead", "message"),
    [
        ("}", "", "JSONDecodeError"),
        ('"version": 2', '"version": 1', "its version is 1, this program writes 2"),
        ('"adam_bytes_per_s": 25000000000.0', '"adam_bytes_per_s": 0', "adam_bytes_per_s must be positive"),
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(two_nodes, written, instead, message):
    path = save_calibration(CALIBRATION, two_nodes, [])
    assert written in path.read_text()
    path.write_text(path.read_text().replace(written, instead))
    with pytest.warns(LightningCXLWarning, match=rf"{path}.*{re.escape(message)}") as caught:
        assert load_calibration(two_nodes, []) is None
    assert len(caught) == 1


def test_a_write_that_fails_leaves_the_old_file(two_nodes, monkeypatch):
    path = save_calibration(CALIBRATION, two_nodes, [])
    monkeypatch.setattr("os.replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_calibration(replace(CALIBRATION, num_threads=5), two_nodes, [])
    assert list(path.parent.iterdir()) == [path] and load_calibration(two_nodes, []) == CALIBRATION


# -- file, calibration, firmware: which wins ---------------------------------------------------------------------------


def ratings(node: int, **values: int | None) -> dict[str, str | None]:
    """Files of firmware's ratings of a node: None removes one."""
    folder = f"{NODE}/node{node}/access1/initiators"
    return {f"{folder}/{name}": None if value is None else f"{value}\n" for name, value in values.items()}


UNRATED = dict.fromkeys(("read_bandwidth", "write_bandwidth", "read_latency", "write_latency"))


def test_firmware(machine):
    files = ratings(1, read_bandwidth=20000) | ratings(2, write_bandwidth=10000)
    topology = Topology.detect(machine("3node", files))
    found = machine_of(topology)
    assert found.names == ("dram", "cxl")
    cards = found.tier("cxl")
    assert (cards.kind, cards.num_nodes, cards.backed_by) == (TierKind.CXL, 2, None)
    assert cards.capacity_bytes == topology.tier("cxl").capacity_bytes
    # stripes have parts in proportion to read ratings: reads end together, the second card is the last with writes
    assert cards.device_read_bytes_per_s == pytest.approx(20000e6 + 28672e6)
    part = 28672 / (20000 + 28672)
    assert cards.device_write_bytes_per_s == pytest.approx(10000e6 / part)
    assert cards.adam_bytes_per_s == pytest.approx(28 / (16 / 28672e6 + 12 / 10e9) / part)
    assert cards.latency_ns == 250
    assert "dram: firmware; cxl: firmware" in found.source
    assert "\n" not in found.source


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


def test_nodes_without_ratings_have_equal_parts(machine):
    topology = Topology.detect(machine("3node", ratings(1, **UNRATED) | ratings(2, **UNRATED)))
    second = replace(CALIBRATION.node(1), node_id=2, adam_bytes_per_s=6e9)
    save_calibration(replace(CALIBRATION, nodes=(*CALIBRATION.nodes, second)), topology, [])
    found = machine_of(topology).tier("cxl")
    assert (found.adam_bytes_per_s, found.device_read_bytes_per_s) == pytest.approx((2 * 6e9, 2 * 7e9))


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
    for text, error in (
        ("tiers: [{name: nvm, adam_bytes_per_s: 1}]", "no tier 'nvm'"),
        ("tiers: [{adam_bytes_per_s: 1}]", "tier 1 of 1 needs a name"),
    ):
        with pytest.raises((ConfigError, TierNotFoundError), match=error):
            machine_of(two_nodes, file=written(text))


@pytest.mark.parametrize("missing", [UNRATED, {"write_bandwidth": None}])
def test_nothing_is_guessed(machine, written, missing):
    topology = Topology.detect(machine("2node", ratings(1, **missing)))
    assert machine_of(topology) is None
    assert speeds.tier_speeds(topology.tier("cxl"), None).origin == "unknown"
    fields = "adam_bytes_per_s: 1, device_read_bytes_per_s: 2, device_write_bytes_per_s: 3"
    assert machine_of(topology, file=written(f"tiers: [{{name: cxl, {fields}}}]")).tier("cxl").adam_bytes_per_s == 1


def test_an_emulated_tier_is_as_fast_as_the_memory_behind_it_also_where_it_is_added_later(machine):
    topology = Topology.detect(machine("2node", {f"{NODE}/has_memory": "0\n"}))
    before = machine_of(topology)
    assert before.names == ("dram",) and speeds.with_new_tiers(before, topology) is before
    assert topology.tier("cxl").emulated
    found = machine_of(topology)
    dram, cxl = found.tiers
    assert (cxl.backed_by, cxl.kind, cxl.adam_bytes_per_s) == ("dram", TierKind.CXL, dram.adam_bytes_per_s)
    assert speeds.with_new_tiers(before, topology).tiers == found.tiers


def test_devices_without_a_measurement_are_marked(two_nodes):
    host, gpu = machine_of(two_nodes, "cpu"), machine_of(two_nodes, torch.device("cuda"))
    assert host.device.is_host and host.device.flops > 0 and "cpu: default" in host.source
    assert host.device.h2d_bytes_per_s == host.tiers[0].device_read_bytes_per_s
    assert not gpu.device.is_host and gpu.device.h2d_bytes_per_s == 51.8 * GIB
    assert "default, as an H100 with PCIe 5.0 x16" in gpu.source


@pytest.fixture
def on_drives(two_nodes, monkeypatch, tmp_path):
    """Return ``on_drives(["drive1/a"], {"drive1/a": (read, written)})``: a machine with the tier ssd in some folders.

    Each folder's parent is a drive of its own; other options are those of the tier.
    """
    for folder in ("drive1/a", "drive1/b", "drive2/c"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr("lightning_cxl.machine.speeds.drive_of", lambda folder: str(folder).split("/drive")[1][0])

    def make(paths, measured, **options):
        ssds = tuple(
            speeds.SsdSpeeds(
                folder=str(tmp_path / folder), read_bytes_per_s=read, write_bytes_per_s=written, direct=True
            )
            for folder, (read, written) in measured.items()
        )
        save_calibration(replace(CALIBRATION, ssds=ssds), two_nodes, [])
        return two_nodes.with_ssd(SsdOptions(tuple(tmp_path / path for path in paths), 1 << 40, **options))

    return make


A, B, C = "drive1/a", "drive1/b", "drive2/c"


@pytest.mark.parametrize(
    ("paths", "measured", "read", "written_", "origin"),
    [
        ([A], {B: (1e9, 1e9), A: (7e9, 6e9)}, 7e9, 6e9, CALIBRATED),
        ([f"{A}/later"], {B: (7e9, 6e9)}, 7e9, 6e9, "calibration"),  # not measured: as fast as its drive
        ([A, C], {A: (7e9, 6e9), C: (3e9, 8e9)}, 2 * 3e9, 2 * 6e9, "calibration"),  # the slowest drive decides
        ([A, B], {A: (7e9, 6e9)}, 7e9, 6e9, "calibration"),  # folders on one drive are no faster than it
        ([A, C], {A: (7e9, 6e9)}, None, None, "unknown; "),  # as long as one drive was not measured
    ],
)
def test_the_tier_ssd_has_what_was_measured_on_its_drives(on_drives, paths, measured, read, written_, origin):
    topology = on_drives(paths, measured, checkpoint="reference")
    found = machine_of(topology)
    ssd = found.ssd
    assert (ssd.capacity_bytes, ssd.read_bytes_per_s, ssd.write_bytes_per_s) == (1 << 40, read, written_)
    assert (found.ssd.num_drives, found.ssd.versions, found.ssd.has_speeds) == (len(paths), 2, read is not None)
    assert f"; ssd: {origin}" in found.source and found.names == ("dram", "cxl")
    assert speeds.machine_without_speeds(topology).ssd == found.ssd


def test_a_file_wins_for_the_tier_ssd_too(on_drives, written):
    topology = on_drives([A], {A: (7e9, 6e9)})
    file = written("ssd: {read_bytes_per_s: 9 GB/s, capacity_bytes: 1GiB, num_drives: 5, versions: 2}\n")
    found = machine_of(topology, file=file)
    assert (found.ssd.read_bytes_per_s, found.ssd.write_bytes_per_s, found.ssd.capacity_bytes) == (9e9, 6e9, 1 << 30)
    assert (found.ssd.num_drives, found.ssd.versions) == (1, 1), "the machine knows that itself"
    assert "; ssd: file and calibration" in found.source
    assert machine_of(replace(topology, ssd=None), file=file).ssd is None
