"""Copies to and from devices, and products of matrices."""

import pytest
import torch

from lightning_cxl.commands import calibrate
from lightning_cxl.commands.calibrate import (
    D2H,
    H2D,
    NamedEngine,
    Options,
    measure_copies,
    measure_flops,
    measure_machine,
)
from lightning_cxl.devices.transfer import HostEngine, devices_apart
from lightning_cxl.errors import PinnedMemoryError
from lightning_cxl.machine.speeds import machine_of, save_calibration
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.host_memory import make_pinner
from lightning_cxl.memory.resource import NumaResource
from tests import apart
from tests.fakes import LoggingDeviceEngine

TINY = Options(rounds=2, node_bytes=1 << 20, copy_bytes=1 << 20, matmul_sizes=(16,))
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
    found = measure_copies(topology, engines, TINY, [node], pin=make_pinner(topology, required=True))
    assert set(found) == {(device, node, way) for device in (0, 1, None) for way in (H2D, D2H)} | {
        (0, None, H2D),
        (1, None, H2D),
    }
    assert found[1, None, H2D].value >= DELAY_S
    for way, delay_s in ((H2D, DELAY_S), (D2H, 2 * DELAY_S)):
        for device in (0, 1):  # waited for
            assert found[device, node, way].value <= TINY.copy_bytes / delay_s
        # both at the same time
        assert found[None, node, way].value <= 2 * TINY.copy_bytes / delay_s
        assert found[None, node, way].value > found[1, node, way].value
    for engine in engines:
        assert set(engine.log) == {("h2d", 1 << 20), ("d2h", 1 << 20), ("h2d", 4096)}


def page_locked():
    topology = Topology.detect()
    return make_pinner(topology, required=True)(NumaResource("dram", topology.tiers[0].node_ids[0], topology))


def test_without_a_driver_memory_cannot_be_page_locked():
    """A measurement of pageable memory must not come out instead."""
    with pytest.raises(PinnedMemoryError, match="cannot page-lock"):
        page_locked().allocate(4096)


def test_a_machine_with_devices(engines):
    topology = Topology.detect()
    node = topology.tiers[0].node_ids[0]
    named = [NamedEngine(each.name, engine) for each, engine in zip(devices_apart(), engines, strict=True)]
    calibration, rows = measure_machine(topology, named, TINY, pin=make_pinner(topology, required=True))
    host, first, second = calibration.devices
    assert (host.kind, host.h2d_bytes_per_s) == ("cpu", None)
    assert (first.name, second.name) == tuple(each.name for each in named)
    assert first.copy_latency_s > DELAY_S and second.copy_latency_s > DELAY_S
    assert calibration.node(node).h2d_bytes_per_s > 0
    assert len({row.name for row in rows}) == len(rows)
    assert {f"node {node}, all devices, h2d", f"{second.name}, copy of 4 KiB", f"{first.name}, node {node}, d2h"} <= {
        r.name for r in rows
    }
    save_calibration(calibration, topology, [each.name for each in named])
    tier = machine_of(topology).tiers[0]
    slowest = min(calibration.node(node_id).h2d_bytes_per_s for node_id in topology.tiers[0].node_ids)
    assert tier.device_read_bytes_per_s >= slowest
    if tier.num_nodes == 1:
        assert tier.device_read_bytes_per_s == pytest.approx(slowest)


def test_products_that_take_too_long_are_left_out(monkeypatch):
    clock = [0.0]

    def slow(*args, out):
        clock[0] += out.shape[0] ** 3 / 64**3 * 0.1  # seconds: 0.1 of size 64, 0.8 of 128, 6.4 of 256
        return out

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    found = measure_flops(HostEngine(), Options(rounds=2, matmul_sizes=(64, 128, 256, 512), matmul_seconds=1.0))
    assert list(found) == [64, 128]
    assert found[128].value == pytest.approx(2 * 128**3 / 0.8)
