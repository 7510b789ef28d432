"""Machines in YAML, measured speeds that are kept, and which source of speeds wins."""

import re
from dataclasses import replace

import pytest

from lightning_cxl.errors import ConfigError, LightningCXLWarning, TierNotFoundError
from lightning_cxl.machine import speeds
from lightning_cxl.machine.speeds import load_calibration, load_machine, machine_of, save_calibration
from lightning_cxl.machine.topology import TierKind, Topology
from tests.fakes import fake_topology

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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: small", "nam: small", "the file has the unknown key 'nam'; its keys are: name, tiers, device, cache"),
        ("    kind: dram\n", "", "tier 1 of 1 lacks kind; its keys are: name, kind, capacity_bytes"),
        ("40 GB/s", "fast", "tier 1 of 1: adam_bytes_per_s must be a number of bytes per second, or text such as"),
        ("kind: dram", "kind: ssd", "has the tier 'ssd' among `tiers`, which are memory: describe it under `ssd`"),
        ("device:", "links: 5\ndevice:", "the file: links must map devices_per_port, port_bytes_per_s, peer_bytes"),
    ],
)
def test_a_file_that_says_something_else_is_refused(old, new, message, written):
    assert old in SMALL
    path = written(SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        load_machine(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


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


# -- file, calibration, firmware: which wins ---------------------------------------------------------------------------


def ratings(node: int, **values: int | None) -> dict[str, str | None]:
    """Files of firmware's ratings of a node: None removes one."""
    folder = f"{NODE}/node{node}/access1/initiators"
    return {f"{folder}/{name}": None if value is None else f"{value}\n" for name, value in values.items()}


UNRATED = dict.fromkeys(("read_bandwidth", "write_bandwidth", "read_latency", "write_latency"))


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
