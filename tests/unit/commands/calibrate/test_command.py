"""The whole command on this machine: numbers that a machine can have, and the files that keep them."""

import json
import os
import subprocess
import sys
import time
import warnings

import pytest

from lightning_cxl.__main__ import main as command
from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import Options
from lightning_cxl.config import SsdOptions
from lightning_cxl.devices.transfer import devices_apart
from lightning_cxl.machine.speeds import load_calibration, load_machine, machine_of
from lightning_cxl.machine.topology import Topology

TINY = Options(
    rounds=2,
    node_bytes=16 << 20,
    copy_bytes=1 << 20,
    matmul_sizes=(64,),
    ssd_bytes=4 << 20,
)


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs the command in short turns."""
    monkeypatch.setattr(calibrate, "_BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "QUICK", TINY)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-cxl", "calibrate", *map(str, arguments)])
        command()

    return run


def test_everything_is_measured_shown_kept_and_written(run, tmp_path, cache, capsys):
    output, rows = tmp_path / "machine.yaml", tmp_path / "rows.json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("--quick", "--ssd", tmp_path, "--output", output, "--json", rows)
    shown = capsys.readouterr().out
    topology = Topology.detect()
    kept = load_calibration(topology, [device.name for device in devices_apart()])
    for node in kept.nodes:
        for value in (node.read_bytes_per_s, node.write_bytes_per_s, node.adam_bytes_per_s):
            assert 1e7 < value < 1e13
        assert f"node {node.node_id}, Adam's mix" in shown
    assert 1e6 < kept.device("cpu").flops < 1e16
    assert kept.ssds[0].folder == str(tmp_path)
    assert 1e5 < kept.ssds[0].write_bytes_per_s < 1e12
    written = load_machine(output)
    with_ssd = topology.with_ssd(SsdOptions((tmp_path,), written.ssd.capacity_bytes))  # what was free then
    found = machine_of(with_ssd, devices_apart()[0].device.type if devices_apart() else "cpu")
    assert written == found
    assert written.ssd.write_bytes_per_s == kept.ssds[0].write_bytes_per_s
    assert written.tiers[0].adam_bytes_per_s > 0
    assert f"calibration of {kept.date}" in written.source
    table = json.loads(rows.read_text())
    assert table["machine"]["cpu"]
    by_name = {row["name"]: row for row in table["rows"]}
    node = kept.nodes[0]
    assert f"node {node.node_id}, read, spread" in by_name
    assert [path.name for path in (cache / "calibration").iterdir()] == [shown.split("calibration/")[1].split()[0]]


def test_cpu_time_of_other_processes_is_counted(tmp_path):
    tick = 1 / os.sysconf("SC_CLK_TCK")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text("cpu  100 20 30 1000 200 4 5 6 50 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    busy, total, own = calibrate.cpu_seconds(str(tmp_path))
    assert (busy, total) == pytest.approx((165 * tick, 1365 * tick))
    used = os.times()
    children = used.children_user + used.children_system
    assert own == pytest.approx(time.process_time() + children, abs=1)
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert calibrate.cpu_seconds()[2] >= own + 0.25  # a child that has ended is no other process
    assert calibrate.cpu_seconds(str(tmp_path / "none")) == (0, 0, 0)
    assert calibrate.others_fraction((0, 0, 0), (5, 10, 4)) == pytest.approx(0.1)
    assert calibrate.others_fraction((0, 0, 0), (5, 10, 6)) == 0  # the clocks are not the same
    assert calibrate.others_fraction((0, 0, 0), (0, 0, 0)) == 0
