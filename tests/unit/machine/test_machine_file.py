"""Machines in YAML: what is read, written, and refused."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.speeds import (
    Cache,
    Device,
    Machine,
    MachineLinks,
    MachineSsd,
    MachineTier,
    load_machine,
    load_overrides,
    save_machine,
)
from lightning_cxl.machine.topology import TierKind

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


def written(tmp_path, text):
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return path


def test_sizes_and_rates_are_read_as_people_write_them(tmp_path):
    machine = load_machine(written(tmp_path, SMALL))
    tier = MachineTier(
        name="dram0",
        kind=TierKind.DRAM,
        capacity_bytes=8 * GIB,
        adam_bytes_per_s=40e9,
        device_read_bytes_per_s=50e9,
        device_write_bytes_per_s=2 * GIB,
    )
    device = Device(flops=1e12, h2d_bytes_per_s=12e9, d2h_bytes_per_s=12e9)
    assert machine == Machine(name="small", tiers=(tier,), device=device)


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_every_example_is_read_and_comes_back_from_a_file(path, tmp_path):
    machine = load_machine(path)
    assert machine.name == path.stem
    assert machine.source
    save_machine(machine, tmp_path / "copy.yaml")
    assert load_machine(tmp_path / "copy.yaml") == machine


def test_every_field_comes_back_from_a_file(tmp_path):
    tier = MachineTier(
        name="near",
        kind=TierKind.DRAM,
        capacity_bytes=3,
        num_nodes=2,
        adam_bytes_per_s=1 / 3,
        device_read_bytes_per_s=1e-7,
        device_write_bytes_per_s=1e20,
        device_write_buffer_bytes=7,
        latency_ns=1e2,
    )
    machine = Machine(
        name="ünusual: name",
        tiers=(tier, replace(tier, name="far", kind=TierKind.CXL, backed_by="near", latency_ns=None)),
        device=Device(
            name="cpu", flops=0.1, h2d_bytes_per_s=1, d2h_bytes_per_s=2, copy_latency_s=1e-5, count=3, is_host=True
        ),
        cache=Cache(nbytes=5, bytes_per_s=math.inf),
        write_contention=4.5,
        source="measured, 1 run",
        host_bytes=11,
        has_speeds=False,
        links=MachineLinks(
            devices_per_port=3,
            port_bytes_per_s=1e-3,
            peer_bytes_per_s=1 / 3,
            peer_latency_s=1e-6,
            network_bytes_per_s=1e12,
            network_latency_s=0.5,
        ),
        ssd=MachineSsd(capacity_bytes=13, read_bytes_per_s=1 / 7, write_bytes_per_s=None, num_drives=2, versions=2),
    )
    save_machine(machine, tmp_path / "machine.yaml")
    assert load_machine(tmp_path / "machine.yaml") == machine


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: small", "nam: small", "the file has the unknown key 'nam'; its keys are: name, tiers, device, cache"),
        ("    kind: dram\n", "", "tier 1 of 1 lacks kind; its keys are: name, kind, capacity_bytes"),
        ("kind: dram", "kind: tape", "tier 1 of 1: kind must be one of gpu, dram, cxl, ssd, got 'tape'"),
        ("8GiB", "8 apples", "tier 1 of 1: capacity_bytes: cannot read '8 apples' as a size"),
        ("8GiB", "[8]", "tier 1 of 1: capacity_bytes: a size must be"),
        ("40 GB/s", "fast", "tier 1 of 1: adam_bytes_per_s must be a number of bytes per second, or text such as"),
        ("40 GB/s", "0 GB/s", "tier 1 of 1: adam_bytes_per_s must be positive, got 0.0"),
        ("40 GB/s", "-.inf", "adam_bytes_per_s must be positive, got -inf"),
        ("40 GB/s", ".inf", "adam_bytes_per_s must be finite, got inf"),
        ("1.0e+12", "true", "the file: device: flops must be a number, got True"),
        ("1.0e+12", ".nan", "the file: device: flops must be a number, got nan"),
        ("  flops", "  count: 1.5\n  flops", "the file: device: count must be a whole number, got 1.5"),
        ("  flops", "  is_host: 1\n  flops", "the file: device: is_host must be true or false, got 1"),
        ("  flops", "  name: 5\n  flops", "the file: device: name must be text, got 5"),
        ("device:", "cache: {size: 5}\ndevice:", "the file: cache has the unknown key 'size'; its keys are: nbytes"),
        ("kind: dram", "kind: dram\n    backed_by: cxl", "the file: there is no tier 'cxl'; machine `small` has"),
        ("name: small", "name: small\nwrite_contention: 0.5", "write_contention must be at least 1, got 0.5"),
        ("kind: dram", "kind: ssd", "has the tier 'ssd' among `tiers`, which are memory: describe it under `ssd`"),
        ("name: dram0", "name: ssd", "has the tier 'ssd' among `tiers`"),
        ("device:", "ssd: {read_bytes_per_s: 1}\ndevice:", "the file: ssd lacks capacity_bytes; its keys are"),
        ("device:", "ssd: {capacity_bytes: 1, num_drives: 0}\ndevice:", "ssd: num_drives must be at least 1"),
        ("device:", "ssd: {capacity_bytes: 1, versions: 3}\ndevice:", "versions must be 1 or 2, got 3"),
        ("device:", "links: 5\ndevice:", "the file: links must map devices_per_port, port_bytes_per_s, peer_bytes"),
        ("device:", "links: {peer_bytes_per_s: 0}\ndevice:", "links: peer_bytes_per_s must be positive, got 0"),
        ("device:", "links: {network_bytes_per_s: fast}\ndevice:", "network_bytes_per_s must be a number of bytes per"),
        ("device:", "links: {devices_per_port: 0}\ndevice:", "devices_per_port must be at least 1, got 0"),
        (
            "device:",
            "links: {devices_per_port: 2}\ndevice:",
            "2 devices share a port, and port_bytes_per_s does",
        ),
        (
            "device:",
            "links: {peer_latency_s: -1}\ndevice:",
            "links: peer_latency_s must be at least 0, got -1",
        ),
    ],
)
def test_a_file_that_says_something_else_is_refused(old, new, message, tmp_path):
    assert old in SMALL
    path = written(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError) as refused:
        load_machine(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file must map name, tiers, device"),
        ("- 1", "the file must map name, tiers, device"),
        ("name: x\ntiers: 3\ndevice: {}", "tiers must be a list, each entry with name, kind"),
        ("{", "is not YAML"),
    ],
)
def test_what_is_no_machine_is_refused(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_machine(written(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the machine file .*nowhere.yaml: No such file"):
        load_machine(tmp_path / "nowhere.yaml")


def test_the_tier_ssd_is_read_as_people_write_it(tmp_path):
    text = SMALL + "ssd: {capacity_bytes: 1TiB, read_bytes_per_s: 7 GB/s, write_bytes_per_s: 6.0e+9}\n"
    found = load_machine(written(tmp_path, text))
    assert found.ssd == MachineSsd(capacity_bytes=1 << 40, read_bytes_per_s=7e9, write_bytes_per_s=6e9)
    assert found.ssd.has_speeds
    assert found.names == ("dram0",)
    assert not MachineSsd(capacity_bytes=1, read_bytes_per_s=7e9).has_speeds


def test_links_are_read_as_people_write_them_and_left_out_by_files_of_one_device(tmp_path):
    text = SMALL + "links: {peer_bytes_per_s: 360 GB/s, network_bytes_per_s: 5.0e+10, network_latency_s: 2.0e-5}\n"
    found = load_machine(written(tmp_path, text)).links
    assert found == MachineLinks(peer_bytes_per_s=360e9, network_bytes_per_s=5e10, network_latency_s=2e-5)
    assert load_machine(written(tmp_path, SMALL)).links == MachineLinks()


def test_links_of_this_machine_may_be_in_a_file_of_overrides(tmp_path):
    found = load_overrides(written(tmp_path, "links: {peer_bytes_per_s: 25 GB/s}\n"))
    assert found.machine == {"links": MachineLinks(peer_bytes_per_s=25e9)}


def test_devices_share_a_port_with_those_that_are_used():
    small = Device(name="gpu", flops=1e12, h2d_bytes_per_s=50e9, d2h_bytes_per_s=40e9, count=4)
    tier = MachineTier(
        name="dram0",
        kind=TierKind.DRAM,
        capacity_bytes=1,
        adam_bytes_per_s=1,
        device_read_bytes_per_s=1,
        device_write_bytes_per_s=1,
    )
    links = MachineLinks(devices_per_port=2, port_bytes_per_s=60e9)
    machine = Machine(name="ports", tiers=(tier,), device=small, links=links)
    assert machine.with_devices(1).device == replace(small, count=1)
    for count in (2, 3, 4):
        expected = replace(small, count=count, h2d_bytes_per_s=30e9, d2h_bytes_per_s=30e9)
        assert machine.with_devices(count).device == machine.with_devices(count).with_devices(count).device == expected
    for count in (0, 5):
        with pytest.raises(ConfigError, match=f"`ports` has 4 x gpu, got {count} devices: choose 1 to 4 of each"):
            machine.with_devices(count)
    cpu = replace(machine, device=replace(small, is_host=True, count=1))
    assert cpu.with_devices(4).device == replace(small, is_host=True, count=4, flops=0.25e12)
