import os
import sys
import warnings

import pytest

from lightning_cxl.__main__ import main as command
from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import Options
from lightning_cxl.config import SsdOptions
from lightning_cxl.devices import devices_apart
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.speeds import load_calibration, load_machine, machine_of
from lightning_cxl.machine.topology import Topology

TINY = Options(rounds=2, node_bytes=1 << 20, copy_bytes=1 << 20, block_widths=(64,), ssd_bytes=4 << 20)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Turns are one run, and buffers small: those of a server's caches would be gigabytes."""
    monkeypatch.setattr(calibrate, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(calibrate, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "cache_bytes", lambda cpus, root: 1 << 20)


@pytest.fixture(autouse=True)
def _no_devices():
    """Here devices are looked up, those of the test."""


def test_a_disk_that_fails_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: 17)
    with pytest.raises(ConfigError, match=r"could not be written and read: .*17 of 1048576 bytes at"):
        calibrate.measure_ssd(tmp_path, 4 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(calibrate, "QUICK", TINY)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-cxl", "calibrate", *map(str, arguments)])
        command()

    return run


def test_everything_is_measured_shown_kept_and_written(run, tmp_path, cache, capsys):
    output = tmp_path / "machine.yaml"
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "mine").write_text("kept")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("--quick", "--ssd", drive, "--output", output)
    shown = capsys.readouterr().out
    topology = Topology.detect()
    kept = load_calibration(topology, [device.name for device in devices_apart()])
    for node in kept.nodes:
        for value in (node.read_bytes_per_s, node.write_bytes_per_s, node.adam_bytes_per_s):
            assert 1e7 < value < 1e13
    assert 1e6 < kept.devices[0].flops < 1e16
    assert kept.ssds[0].folder == str(drive) and [path.name for path in drive.iterdir()] == ["mine"]
    assert 1e5 < kept.ssds[0].write_bytes_per_s < 1e12
    written = load_machine(output)
    with_ssd = topology.with_ssd(SsdOptions((drive,), written.ssd.capacity_bytes))  # what was free then
    found = machine_of(with_ssd, devices_apart()[0].device.type if devices_apart() else "cpu")
    assert written == found
    assert written.ssd.write_bytes_per_s == kept.ssds[0].write_bytes_per_s
    assert written.tiers[0].adam_bytes_per_s > 0
    assert f"calibration of {kept.date}" in written.source
    assert [path.name for path in (cache / "calibration").iterdir()] == [shown.split("calibration/")[1].split()[0]]
