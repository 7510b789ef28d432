"""Copies through engines that stand in for devices, and products of matrices."""

import pytest
import torch

from lightning_cxl.calibrate import compute
from lightning_cxl.calibrate.compute import measure_flops
from lightning_cxl.calibrate.copies import D2H, H2D, measure_copies, pinned
from lightning_cxl.calibrate.measure import NamedEngine, measure_machine
from lightning_cxl.calibrate.options import Options
from lightning_cxl.errors import PinnedMemoryError
from lightning_cxl.memory.numa import NumaResource
from lightning_cxl.planner.calibration import save_calibration
from lightning_cxl.planner.speeds import machine_of
from lightning_cxl.tiers.topology import Topology
from lightning_cxl.transfer.engine import HostEngine
from tests.fakes import DelayingEngine

TINY = Options(
    rounds=2, node_bytes=1 << 20, chase_bytes=1 << 16, chase_steps=1000, copy_bytes=1 << 20, matmul_sizes=(16,)
)
DELAY_S = 0.02


@pytest.fixture
def engines():
    made = [DelayingEngine(DELAY_S, computes_on_host=False), DelayingEngine(2 * DELAY_S, computes_on_host=False)]
    yield made
    for engine in made:
        engine.close()


def test_copies_of_each_device_and_of_all_together(engines):
    topology = Topology.detect()
    node = topology.tiers[0].node_ids[0]
    found = measure_copies(topology, engines, TINY, [node], pin=lambda upstream: upstream)
    assert set(found.alone) == {(device, node, way) for device in (0, 1) for way in (H2D, D2H)}
    assert set(found.together) == {(node, H2D), (node, D2H)}
    assert set(found.latency_s) == {0, 1}
    assert found.latency_s[1].value >= 2 * DELAY_S
    for way in (H2D, D2H):
        # waited for: the fake sleeps before it copies
        assert found.alone[0, node, way].value <= TINY.copy_bytes / DELAY_S
        assert found.alone[1, node, way].value <= TINY.copy_bytes / (2 * DELAY_S)
        # both at the same time take as long as the slower one
        assert found.together[node, way].value <= 2 * TINY.copy_bytes / (2 * DELAY_S)
        assert found.together[node, way].value > found.alone[1, node, way].value
    for engine in engines:
        assert set(engine.log) == {("h2d", 1 << 20), ("d2h", 1 << 20), ("h2d", 4096)}


def test_memory_of_copies_is_page_locked():
    """There is no driver here, so that it fails; a measurement of pageable memory must not come out instead."""
    topology = Topology.detect()
    upstream = NumaResource("dram", topology.tiers[0].node_ids[0], topology)
    resource = pinned(topology)(upstream)
    if torch.cuda.is_available():
        assert resource.allocate(4096).nbytes == 4096
        assert not resource.failure
    else:
        with pytest.raises(PinnedMemoryError, match="cannot page-lock"):
            resource.allocate(4096)


def test_a_machine_with_devices(engines):
    topology = Topology.detect()
    node = topology.tiers[0].node_ids[0]
    named = [NamedEngine(f"toy {index}", engine) for index, engine in enumerate(engines)]
    calibration, rows = measure_machine(topology, named, TINY, pin=lambda upstream: upstream)
    host, first, second = calibration.devices
    assert (host.kind, host.h2d_bytes_per_s) == ("cpu", None)
    assert (first.name, second.name) == ("toy 0", "toy 1")
    assert first.copy_latency_s < second.copy_latency_s
    assert calibration.node(node).h2d_bytes_per_s > 0
    assert len({row.name for row in rows}) == len(rows)
    assert {f"node {node}, all devices, h2d", "toy 1, copy of 4 KiB", f"toy 0, node {node}, d2h"} <= {
        r.name for r in rows
    }
    save_calibration(calibration, topology, [])
    tier = machine_of(topology).tiers[0]
    slowest = min(calibration.node(node_id).h2d_bytes_per_s for node_id in topology.tiers[0].node_ids)
    assert tier.device_read_bytes_per_s >= slowest
    if tier.num_nodes == 1:
        assert tier.device_read_bytes_per_s == pytest.approx(slowest)


def test_products_of_matrices(monkeypatch):
    found = measure_flops(HostEngine(), Options(rounds=2, matmul_sizes=(16, 64)))
    assert list(found) == [16, 64]
    assert all(figure.value > 0 for figure in found.values())


def test_products_that_take_too_long_are_left_out(monkeypatch):
    clock = [0.0]

    def slow(*args, out):
        clock[0] += out.shape[0] ** 3 / 64**3 * 0.1  # seconds: 0.1 of size 64, 0.8 of 128, 6.4 of 256
        return out

    monkeypatch.setattr(torch, "mm", slow)
    monkeypatch.setattr(compute.time, "perf_counter", lambda: clock[0])
    found = measure_flops(HostEngine(), Options(rounds=2, matmul_sizes=(64, 128, 256, 512), matmul_seconds=1.0))
    assert list(found) == [64, 128]
    assert found[128].value == pytest.approx(2 * 128**3 / 0.8)
