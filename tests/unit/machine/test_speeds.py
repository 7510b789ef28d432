"""Which source of speeds wins: file, calibration, firmware, and nothing is guessed."""

from dataclasses import replace

import pytest
import torch

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import ConfigError, TierNotFoundError
from lightning_cxl.machine.speeds import (
    SsdSpeeds,
    machine_of,
    machine_without_speeds,
    save_calibration,
    tier_speeds,
    with_new_tiers,
)
from lightning_cxl.machine.topology import TierKind, Topology
from tests.unit.machine.test_calibration import CALIBRATION

NODE = "sys/devices/system/node"
RATINGS = [f"access1/initiators/{way}_{kind}" for way in ("read", "write") for kind in ("bandwidth", "latency")]


def unrated(node: int) -> dict[str, None]:
    return dict.fromkeys(f"{NODE}/node{node}/{name}" for name in RATINGS)


def rated(node: int, way: str, megabytes_per_s: int) -> dict[str, str]:
    return {f"{NODE}/node{node}/access1/initiators/{way}_bandwidth": f"{megabytes_per_s}\n"}


def test_firmware(machine):
    topology = Topology.detect(machine("3node", rated(1, "read", 20000) | rated(2, "write", 10000)))
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


def test_calibration_wins_over_firmware(machine):
    topology = Topology.detect(machine("2node"))
    save_calibration(CALIBRATION, topology, [])
    found = machine_of(topology)
    dram, card = found.tiers
    assert (dram.adam_bytes_per_s, dram.latency_ns) == (25e9, 90.5)
    # no device was measured on node 0: the CPU shows what the memory can do
    assert (dram.device_read_bytes_per_s, dram.device_write_bytes_per_s) == (30e9, 20e9)
    assert (card.device_read_bytes_per_s, card.device_write_bytes_per_s) == (7e9, 5e9)
    assert (found.cache.nbytes, found.cache.bytes_per_s) == (32 << 20, 1e11)
    assert "cxl: calibration of 2026-01-31 with 2 threads" in found.source


def test_a_tier_with_a_node_that_was_not_measured_keeps_its_ratings(machine):
    topology = Topology.detect(machine("3node"))
    save_calibration(CALIBRATION, topology, [])  # nodes 0 and 1
    found = machine_of(topology)
    assert found.tier("dram").adam_bytes_per_s == 25e9
    assert found.tier("cxl").device_read_bytes_per_s == pytest.approx(2 * 28672e6)
    assert "dram: calibration of 2026-01-31 with 2 threads; cxl: firmware" in found.source


def test_nodes_without_ratings_have_equal_parts(machine):
    topology = Topology.detect(machine("3node", unrated(1) | unrated(2)))
    second = replace(CALIBRATION.node(1), node_id=2, adam_bytes_per_s=6e9)
    save_calibration(replace(CALIBRATION, nodes=(*CALIBRATION.nodes, second)), topology, [])
    assert machine_of(topology).tier("cxl").adam_bytes_per_s == pytest.approx(2 * 6e9)
    assert machine_of(topology).tier("cxl").device_read_bytes_per_s == pytest.approx(2 * 7e9)


def test_a_file_wins_field_by_field(machine, tmp_path):
    topology = Topology.detect(machine("2node"))
    save_calibration(CALIBRATION, topology, [])
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\n"
        "write_contention: 4\n"
        "source: my own hands\n"
        "tiers:\n"
        "  - {name: cxl, adam_bytes_per_s: 12e9, device_read_bytes_per_s: 2 GiB/s, capacity_bytes: 512MiB}\n"
        "device: {flops: 3.0e+12}\n"
        "cache: {nbytes: 1MiB}\n"
    )
    found = machine_of(topology, file=file)
    card = found.tier("cxl")
    assert (card.adam_bytes_per_s, card.device_read_bytes_per_s) == (12e9, 2 * 2**30)
    assert card.device_write_bytes_per_s == 5e9  # still the calibration's
    assert card.latency_ns == 250
    assert card.capacity_bytes == 512 << 20
    assert found.tier("dram").adam_bytes_per_s == 25e9
    assert found.device.flops == 3e12
    assert (found.cache.nbytes, found.cache.bytes_per_s) == (1 << 20, 1e11)
    assert (found.name, found.write_contention) == ("mine", 4)
    assert "cxl: file and calibration of 2026-01-31 with 2 threads" in found.source
    assert "but flops: file" in found.source
    assert found.source.endswith("(my own hands)")


@pytest.mark.parametrize("missing", [unrated(1), {f"{NODE}/node1/access1/initiators/write_bandwidth": None}])
def test_nothing_is_guessed(machine, tmp_path, missing):
    topology = Topology.detect(machine("2node", missing))
    assert machine_of(topology) is None
    assert tier_speeds(topology.tier("cxl"), None).origin == "unknown"
    file = tmp_path / "all.yaml"
    file.write_text(
        "tiers: [{name: cxl, adam_bytes_per_s: 1, device_read_bytes_per_s: 2, device_write_bytes_per_s: 3}]\n"
    )
    assert machine_of(topology, file=file).tier("cxl").adam_bytes_per_s == 1


def test_an_emulated_tier_is_as_fast_as_the_memory_behind_it(machine):
    topology = Topology.detect(machine("2node", {f"{NODE}/has_memory": "0\n"}))
    assert topology.tier("cxl").emulated
    found = machine_of(topology)
    dram, cxl = found.tiers
    assert (cxl.backed_by, cxl.kind) == ("dram", TierKind.CXL)
    assert cxl.adam_bytes_per_s == dram.adam_bytes_per_s


def test_a_tier_that_is_asked_for_later_is_added_as_it_would_have_been_found(machine):
    topology = Topology.detect(machine("2node", {f"{NODE}/has_memory": "0\n"}))
    before = machine_of(topology)
    assert before.names == ("dram",)
    assert with_new_tiers(before, topology) is before
    topology.tier("cxl")
    assert with_new_tiers(before, topology).tiers == machine_of(topology).tiers


def test_capacity_is_the_smallest_that_is_said(machine, tmp_path):
    topology = Topology.detect(machine("2node"))
    file = tmp_path / "mine.yaml"
    file.write_text("tiers: [{name: dram, capacity_bytes: 100MiB}, {name: cxl, capacity_bytes: 300MiB}]\n")
    given = {"dram": 200 << 20, "cxl": 200 << 20}
    assert [tier.capacity_bytes for tier in machine_of(topology, capacity_bytes=given).tiers] == [200 << 20, 200 << 20]
    both = machine_of(topology, file=file, capacity_bytes=given)
    assert [tier.capacity_bytes for tier in both.tiers] == [100 << 20, 200 << 20]


def test_devices_without_a_measurement_are_marked(machine):
    topology = Topology.detect(machine("2node"))
    host = machine_of(topology, "cpu")
    assert host.device.is_host
    assert host.device.flops > 0
    assert host.device.h2d_bytes_per_s == host.tiers[0].device_read_bytes_per_s
    assert "cpu: default" in host.source
    gpu = machine_of(topology, torch.device("cuda"))
    assert not gpu.device.is_host
    assert gpu.device.h2d_bytes_per_s == 51.8 * 2**30
    assert "default, as an H100 with PCIe 5.0 x16" in gpu.source


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("tiers: [{name: nvm, adam_bytes_per_s: 1}]", TierNotFoundError, "no tier 'nvm'"),
        ("tiers: [{adam_bytes_per_s: 1}]", ConfigError, "tier 1 of 1 needs a name"),
        ("tiers: [{name: cxl, adam_bytes_per_s: fast}]", ConfigError, "got 'fast'"),
        ("speed: 3", ConfigError, "unknown key 'speed'"),
    ],
)
def test_files_with_mistakes_are_refused(machine, tmp_path, text, error, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(error, match=message):
        machine_of(Topology.detect(machine("2node")), file=file)


def measured(folder, read, write):
    return SsdSpeeds(folder=str(folder), read_bytes_per_s=read, write_bytes_per_s=write, direct=True)


def on_drives(machine, monkeypatch, paths, *ssds, **options):
    """Return the machine with the tier ssd in some folders, each folder's parent a drive of its own."""
    monkeypatch.setattr("lightning_cxl.machine.speeds.drive_of", lambda folder: str(folder).split("/drive")[1][0])
    topology = Topology.detect(machine("2node")).with_ssd(SsdOptions(tuple(paths), 1 << 40, **options))
    save_calibration(replace(CALIBRATION, ssds=ssds), topology, [])
    return topology


@pytest.fixture
def folders(tmp_path):
    found = [tmp_path / "drive1" / "a", tmp_path / "drive1" / "b", tmp_path / "drive2" / "c"]
    for folder in found:
        folder.mkdir(parents=True)
    return found


def test_the_tier_ssd_has_what_was_measured_in_its_folder(machine, monkeypatch, folders):
    a, b, _ = folders
    topology = on_drives(machine, monkeypatch, [a], measured(b, 1e9, 1e9), measured(a, 7e9, 6e9))
    found = machine_of(topology)
    assert (found.ssd.capacity_bytes, found.ssd.read_bytes_per_s, found.ssd.write_bytes_per_s) == (1 << 40, 7e9, 6e9)
    assert (found.ssd.num_drives, found.ssd.versions) == (1, 1)
    assert "; ssd: calibration of 2026-01-31 with 2 threads; " in found.source
    assert found.names == ("dram", "cxl")
    assert machine_without_speeds(topology).ssd == found.ssd


def test_a_folder_that_was_not_measured_is_as_fast_as_its_drive(machine, monkeypatch, folders):
    a, b, _ = folders
    topology = on_drives(machine, monkeypatch, [a / "later"], measured(b, 7e9, 6e9), checkpoint="reference")
    assert machine_of(topology).ssd.read_bytes_per_s == 7e9
    assert machine_of(topology).ssd.versions == 2


def test_the_slowest_drive_decides(machine, monkeypatch, folders):
    a, _, c = folders
    topology = on_drives(machine, monkeypatch, [a, c], measured(a, 7e9, 6e9), measured(c, 3e9, 8e9))
    found = machine_of(topology).ssd
    assert (found.read_bytes_per_s, found.write_bytes_per_s, found.num_drives) == (2 * 3e9, 2 * 6e9, 2)


def test_folders_on_one_drive_are_no_faster_than_it(machine, monkeypatch, folders):
    a, b, _ = folders
    assert machine_of(on_drives(machine, monkeypatch, [a, b], measured(a, 7e9, 6e9))).ssd.read_bytes_per_s == 7e9


def test_speeds_are_not_known_as_long_as_one_drive_was_not_measured(machine, monkeypatch, folders):
    a, _, c = folders
    found = machine_of(on_drives(machine, monkeypatch, [a, c], measured(a, 7e9, 6e9)))
    assert not found.ssd.has_speeds
    assert "; ssd: unknown; " in found.source


def test_a_file_wins_for_the_tier_ssd_too(machine, monkeypatch, folders, tmp_path):
    topology = on_drives(machine, monkeypatch, folders[:1], measured(folders[0], 7e9, 6e9))
    file = tmp_path / "mine.yaml"
    file.write_text("ssd: {read_bytes_per_s: 9 GB/s, capacity_bytes: 1GiB, num_drives: 5, versions: 2}\n")
    found = machine_of(topology, file=file)
    assert (found.ssd.read_bytes_per_s, found.ssd.write_bytes_per_s, found.ssd.capacity_bytes) == (9e9, 6e9, 1 << 30)
    assert (found.ssd.num_drives, found.ssd.versions) == (1, 1)  # the machine knows that itself
    assert "; ssd: file and calibration" in found.source
    without = replace(topology, ssd=None)
    assert machine_of(without, file=file).ssd is None
