"""calibrate: memory, sweeps, disks, devices, and the whole command on this machine."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_cxl.__main__ import main as command
from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import ADAM, D2H, H2D, READ, WRITE, Options, Sweep, cache_bytes, read, update
from lightning_cxl.config import SsdOptions
from lightning_cxl.devices import HostEngine, devices_apart
from lightning_cxl.errors import ConfigError, PinnedMemoryError
from lightning_cxl.machine.speeds import load_calibration, load_machine, machine_of, save_calibration
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.host_memory import make_pinner
from lightning_cxl.memory.resource import NumaResource
from lightning_cxl.native import _cpu, _membench
from tests import apart
from tests.fakes import LoggingDeviceEngine

TINY = Options(rounds=2, node_bytes=1 << 20, copy_bytes=1 << 20, block_widths=(64,), ssd_bytes=4 << 20)
CPU = "sys/devices/system/cpu"


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


def write_cache(root, cpu, index, level, size, shared, kind="Unified"):
    folder = root / CPU / f"cpu{cpu}/cache/index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared), ("type", kind)):
        (folder / name).write_text(f"{text}\n")


def test_last_level_caches_are_counted_once_and_only_those_of_this_process(tmp_path):
    for cpu in range(6):
        write_cache(tmp_path, cpu, 0, 1, "32K", str(cpu), "Data")
        write_cache(tmp_path, cpu, 1, 1, "32K", str(cpu), "Instruction")
        group = cpu // 2 * 2
        write_cache(tmp_path, cpu, 3, 3, "16384K" if group else "96M", f"{group}-{group + 1}")
    assert cache_bytes([0, 1, 2], tmp_path) == (96 + 16) << 20
    assert cache_bytes([4], tmp_path) == 16 << 20
    assert cache_bytes([77], tmp_path) == 0


def test_nodes_are_measured_and_memory_has_the_size_it_should(monkeypatch):
    sizes = []
    allocate = calibrate.NumaResource.allocate

    def spy(self, nbytes, **kwargs):
        sizes.append((self.node_id, nbytes))
        return allocate(self, nbytes, **kwargs)

    monkeypatch.setattr(calibrate.NumaResource, "allocate", spy)
    topology = Topology.detect()
    found = calibrate.measure_nodes(topology, TINY, 0)
    real = [n for tier in topology.tiers if not tier.emulated for n in tier.node_ids]
    assert set(found) == {(n, access) for n in real for access in (READ, WRITE, ADAM)}
    assert sizes == [(n, 1 << 20) for n in real]
    assert all(figure.value > 1e6 and figure.spread >= 0 for figure in found.values())
    sizes.clear()
    calibrate.measure_nodes(topology, TINY, 1 << 20)
    assert sizes == [(n, 4 << 20) for n in real]  # four times the caches


def test_bytes_that_are_counted(monkeypatch):
    """A second per sweep: reading and writing count every byte once, Adam's three updated arrays twice."""

    def measured(runs, rounds):
        for run in runs.values():
            run()
        return dict.fromkeys(runs, calibrate.Figure(1.0, 0.0))

    monkeypatch.setattr(calibrate, "measure", measured)
    found = calibrate.measure_nodes(Topology.detect(), TINY, 0)
    node = min(found)[0]
    assert [found[node, access].value for access in (READ, WRITE, ADAM)] == [1 << 20, 1 << 20, 7 << 18]


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_sweep_moves_the_bytes_and_changes_nothing(num_threads):
    group, other = tensors(100_003, 100_003, 50_000), tensors(17)
    before = [tensor.clone() for tensor in (*group, *other)]
    sweep = Sweep([[read(group[0]), update(group[1]), update(group[2])], [update(other[0])]], num_threads)
    sweep()
    assert sweep.isa in _cpu.supported_isas()
    assert all(torch.equal(now, then) for now, then in zip((*group, *other), before, strict=True))


def test_the_fastest_variant_is_taken(monkeypatch):
    """A kernel that advances the clock: the last ISA at one place is the fastest."""
    clock = [0.0]

    def sweep(table, num_threads, isa):
        clock[0] += 1.0 if isa == _cpu.supported_isas()[-1] and len(table) == 4 else 2.0

    monkeypatch.setattr(_membench, "sweep", sweep)
    monkeypatch.setattr("lightning_cxl.commands.calibrate.time.perf_counter", lambda: clock[0])
    sweep = Sweep([[read(tensors(10_000)[0])]], 1)
    assert sweep.isa == _cpu.supported_isas()[-1]
    before = clock[0]
    sweep()
    assert clock[0] == before + 1.0


def recorded(monkeypatch, name):
    """Return the (buffer, offset) of every call."""
    calls, real, lock = [], getattr(os, name), threading.Lock()

    def access(file, buffers, offset):
        with lock:
            calls.append((id(buffers[0]), offset))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, name, access)
    return calls


@pytest.mark.parametrize("count", [1, 6, 8])
def test_every_block_is_written_and_read_once_a_round_and_the_folder_left_as_it_was(tmp_path, monkeypatch, count):
    (tmp_path / "mine").write_text("kept")
    written, read = recorded(monkeypatch, "pwritev"), recorded(monkeypatch, "preadv")
    reading, writing, _ = calibrate.measure_ssd(tmp_path, count << 20)
    assert reading.value > 0 and writing.value > 0
    blocks = [index << 20 for index in range(count)]
    assert sorted(offset for _, offset in read) == sorted(blocks * 3)
    assert sorted(offset for _, offset in written) == sorted(blocks * 4)  # once more, to find room
    assert len({buffer for buffer, _ in read}) == min(count, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_direct_access_the_answer_says_so(tmp_path, monkeypatch):
    real = fcntl.fcntl

    def refuse(file, command, *flags):
        if command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(file, command, *flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not calibrate.measure_ssd(tmp_path, 1 << 20)[2]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fails_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda file, buffers, offset: 17)
    with pytest.raises(ConfigError, match=r"could not be written and read: .*17 of 1048576 bytes at"):
        calibrate.measure_ssd(tmp_path, 4 << 20)
    assert list(tmp_path.iterdir()) == []


DELAY_S = 0.05


@pytest.fixture
def engines(on_device):
    """Of two devices whose copies take long."""
    if on_device.type != "apart":
        pytest.skip("only copies of the device apart can be made late")
    apart.set_delay(h2d=DELAY_S, d2h=2 * DELAY_S)
    made = [LoggingDeviceEngine(torch.device("apart", index)) for index in (0, 1)]
    yield made
    for engine in made:
        engine.close()


def test_copies_of_each_device_and_of_all_together(engines):
    topology = Topology.detect()
    node = topology.tiers[0].node_ids[0]
    found = calibrate.measure_copies(topology, engines, TINY, [node], pin=make_pinner(topology, required=True))
    everywhere = {(device, node, way) for device in (0, 1, None) for way in (H2D, D2H)}
    assert set(found) == everywhere | {(0, None, H2D), (1, None, H2D)}
    assert found[1, None, H2D].value >= DELAY_S
    for way, delay_s in ((H2D, DELAY_S), (D2H, 2 * DELAY_S)):
        for device in (0, 1):  # waited for
            assert found[device, node, way].value <= TINY.copy_bytes / delay_s
        # both at the same time
        assert found[None, node, way].value <= 2 * TINY.copy_bytes / delay_s
        assert found[None, node, way].value > found[1, node, way].value
    for engine in engines:
        assert set(engine.log) == {("h2d", 1 << 20), ("d2h", 1 << 20), ("h2d", 4096)}


def test_without_a_driver_memory_cannot_be_page_locked():
    """A measurement of pageable memory must not come out instead."""
    topology = Topology.detect()
    resource = NumaResource("dram", topology.tiers[0].node_ids[0], topology)
    with pytest.raises(PinnedMemoryError, match="cannot page-lock"):
        make_pinner(topology, required=True)(resource).allocate(4096)


def test_a_machine_with_devices(engines):
    topology = Topology.detect()
    node = topology.tiers[0].node_ids[0]
    named = [calibrate.NamedEngine(each.name, engine) for each, engine in zip(devices_apart(), engines, strict=True)]
    calibration, rows = calibrate.measure_machine(topology, named, TINY, pin=make_pinner(topology, required=True))
    host, first, second = calibration.devices
    assert (host.kind, host.h2d_bytes_per_s) == ("cpu", None)
    assert (first.name, second.name) == tuple(each.name for each in named)
    assert first.copy_latency_s > DELAY_S and second.copy_latency_s > DELAY_S
    assert calibration.node(node).h2d_bytes_per_s > 0
    shown = {name for name, *_ in rows}
    assert shown >= {
        f"node {node}, all devices, h2d",
        f"{second.name}, copy of 4 KiB",
        f"{first.name}, node {node}, d2h",
    }
    save_calibration(calibration, topology, [each.name for each in named])
    tier = machine_of(topology).tiers[0]
    slowest = min(calibration.node(node_id).h2d_bytes_per_s for node_id in topology.tiers[0].node_ids)
    assert tier.device_read_bytes_per_s >= slowest
    if tier.num_nodes == 1:
        assert tier.device_read_bytes_per_s == pytest.approx(slowest)


def test_blocks_that_take_too_long_are_left_out(monkeypatch):
    clock = [0.0]

    def slow(engine, width):
        def train():
            clock[0] += width**3 / 64**3 * 0.1  # seconds: 0.1 of width 64, 0.8 of 128, 6.4 of 256

        return train, 2 * width**3

    monkeypatch.setattr(calibrate, "_block", slow)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    found = calibrate.measure_flops(
        HostEngine(), Options(rounds=2, block_widths=(64, 128, 256, 512), block_seconds=1.0)
    )
    assert list(found) == [64, 128]
    assert found[128].value == pytest.approx(2 * 128**3 / 0.8)


def test_the_flops_of_a_block_are_those_that_torch_counts():
    train, flops = calibrate._block(HostEngine(), 256)
    with FlopCounterMode(display=False) as counter:
        train()
    attention = 6 * 256**3  # torch does not count it on a CPU
    assert flops == pytest.approx(counter.get_total_flops() + attention, rel=0.02)


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs the command in short turns."""
    monkeypatch.setattr(calibrate, "QUICK", TINY)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-cxl", "calibrate", *map(str, arguments)])
        command()

    return run


def test_everything_is_measured_shown_kept_and_written(run, tmp_path, cache, capsys):
    output = tmp_path / "machine.yaml"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("--quick", "--ssd", tmp_path, "--output", output)
    shown = capsys.readouterr().out
    topology = Topology.detect()
    kept = load_calibration(topology, [device.name for device in devices_apart()])
    for node in kept.nodes:
        for value in (node.read_bytes_per_s, node.write_bytes_per_s, node.adam_bytes_per_s):
            assert 1e7 < value < 1e13
        assert f"node {node.node_id}, Adam's mix" in shown
    assert 1e6 < kept.devices[0].flops < 1e16
    assert kept.ssds[0].folder == str(tmp_path)
    assert 1e5 < kept.ssds[0].write_bytes_per_s < 1e12
    written = load_machine(output)
    with_ssd = topology.with_ssd(SsdOptions((tmp_path,), written.ssd.capacity_bytes))  # what was free then
    found = machine_of(with_ssd, devices_apart()[0].device.type if devices_apart() else "cpu")
    assert written == found
    assert written.ssd.write_bytes_per_s == kept.ssds[0].write_bytes_per_s
    assert written.tiers[0].adam_bytes_per_s > 0
    assert f"calibration of {kept.date}" in written.source
    assert [path.name for path in (cache / "calibration").iterdir()] == [shown.split("calibration/")[1].split()[0]]


def test_cpu_time_of_other_processes_is_counted():
    busy, total, own = calibrate.cpu_seconds()
    assert 0 < busy < total and own > 0
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    later = calibrate.cpu_seconds()
    assert later[2] >= own + 0.25  # a child that has ended is no other process
    assert 0.25 <= later[0] - busy <= later[1] - total
    assert calibrate.others_fraction((0, 0, 0), (5, 10, 4)) == pytest.approx(0.1)
    assert calibrate.others_fraction((0, 0, 0), (5, 10, 6)) == 0  # the clocks are not the same
    assert calibrate.others_fraction((0, 0, 0), (0, 0, 0)) == 0
