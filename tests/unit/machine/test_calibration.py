"""The cache of measured speeds: for this very machine, whole or not at all."""

import json
import re
from dataclasses import replace

import pytest

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.machine.speeds import (
    Calibration,
    DeviceSpeeds,
    NodeSpeeds,
    SsdSpeeds,
    calibration_path,
    describe_machine,
    load_calibration,
    save_calibration,
)
from lightning_cxl.machine.topology import Topology

NODE = "sys/devices/system/node"
CALIBRATION = Calibration(
    date="2026-01-31",
    num_threads=2,
    nodes=(
        NodeSpeeds(node_id=0, read_bytes_per_s=30e9, write_bytes_per_s=20e9, adam_bytes_per_s=25e9, latency_ns=90.5),
        NodeSpeeds(
            node_id=1,
            read_bytes_per_s=10e9,
            write_bytes_per_s=8e9,
            adam_bytes_per_s=9e9,
            latency_ns=250.0,
            h2d_bytes_per_s=7e9,
            d2h_bytes_per_s=5e9,
        ),
    ),
    devices=(
        DeviceSpeeds(kind="cpu", name="some CPU", flops=1e11),
        DeviceSpeeds(
            kind="cuda", name="gpu", flops=4e14, h2d_bytes_per_s=5e10, d2h_bytes_per_s=4e10, copy_latency_s=1e-5
        ),
    ),
    cache_bytes=32 << 20,
    cache_bytes_per_s=1e11,
    ssds=(SsdSpeeds(folder="/nvme", read_bytes_per_s=7e9, write_bytes_per_s=6e9, direct=True),),
)


def test_what_is_kept_comes_back(machine):
    topology = Topology.detect(machine("2node"))
    path = save_calibration(CALIBRATION, topology, ["gpu"])
    assert path == calibration_path(topology, ["gpu"])
    assert load_calibration(topology, ["gpu"]) == CALIBRATION
    assert list(path.parent.iterdir()) == [path]
    later = replace(CALIBRATION, date="2026-02-01")
    save_calibration(later, topology, ["gpu"])
    assert load_calibration(topology, ["gpu"]) == later


def test_nothing_is_known_of_a_machine_that_was_not_measured_or_is_invented(machine):
    assert load_calibration(Topology.detect(machine("2node")), []) is None
    invented = Topology.fake()
    save_calibration(CALIBRATION, invented, [])
    assert load_calibration(invented, []) is None


@pytest.mark.parametrize(
    "files",
    [
        {f"{NODE}/node1/meminfo": "Node 1 MemTotal: 2097152 kB\n"},
        {f"{NODE}/has_memory": "0\n"},
        {f"{NODE}/node0/cpulist": "0\n"},
        {"proc/cpuinfo": "model name\t: Another CPU\n"},
    ],
)
def test_a_changed_machine_is_not_given_old_numbers(machine, tmp_path, files):
    before = described(machine("2node", {"proc/cpuinfo": "model name\t: A CPU\n"}))
    root = tmp_path / "2node"
    for path, text in files.items():
        (root / path).write_text(text)
    assert described(root) != before


def described(root):
    return describe_machine(replace(Topology.detect(root), measured_on=frozenset({0, 1})))


def test_other_devices_and_other_cpus_of_the_process_are_another_machine(machine):
    topology = Topology.detect(machine("2node"))
    cpus = frozenset({0, 1})
    names = {
        json.dumps(describe_machine(replace(topology, measured_on=allowed), devices))
        for devices, allowed in [([], cpus), (["H100"], cpus), (["H100", "H100"], cpus), ([], frozenset({0}))]
    }
    assert len(names) == 4
    save_calibration(CALIBRATION, topology, ["H100"])
    assert load_calibration(topology, []) is None


def test_another_kernel_is_the_same_machine(machine, tmp_path):
    """Kernels differ in what they keep of a node."""
    before = describe_machine(Topology.detect(machine("2node")))
    meminfo = tmp_path / "2node" / NODE / "node1/meminfo"
    total = int(re.search(r"MemTotal:\s+(\d+)", meminfo.read_text())[1])
    meminfo.write_text(f"Node 1 MemTotal: {total - 2048} kB\n")
    assert describe_machine(Topology.detect(tmp_path / "2node")) == before


def changed(content: dict, *keys, value) -> str:
    part = content
    for key in keys[:-1]:
        part = part[key]
    if value is None:
        del part[keys[-1]]
    else:
        part[keys[-1]] = value
    return json.dumps(content)


DAMAGE = {
    "cut off": (lambda content: json.dumps(content)[:-40], "JSONDecodeError"),
    "old": (lambda content: changed(content, "version", value=0), "its version is 0, this program writes 1"),
    "moved": (lambda content: changed(content, "machine", "cpu", value="other"), "it is of another machine"),
    "zero": (
        lambda content: changed(content, "speeds", "nodes", 0, "adam_bytes_per_s", value=0),
        "adam_bytes_per_s must be positive",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(machine, name):
    topology = Topology.detect(machine("2node"))
    path = save_calibration(CALIBRATION, topology, [])
    damage, message = DAMAGE[name]
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.warns(LightningCXLWarning, match=re.escape(message)) as caught:
        assert load_calibration(topology, []) is None
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    save_calibration(CALIBRATION, topology, [])
    assert load_calibration(topology, []) == CALIBRATION


def test_a_write_that_fails_leaves_the_old_file(machine, monkeypatch):
    topology = Topology.detect(machine("2node"))
    path = save_calibration(CALIBRATION, topology, [])

    def fail(*args, **kwargs):
        raise OSError("no space")

    monkeypatch.setattr(json, "dump", fail)
    with pytest.raises(OSError, match="no space"):
        save_calibration(replace(CALIBRATION, num_threads=5), topology, [])
    assert list(path.parent.iterdir()) == [path]
    assert load_calibration(topology, []) == CALIBRATION
