"""The machine is noisy: durations are compared with what they cannot be below, and what must not end is held up."""

import contextlib
import time
from types import SimpleNamespace

import pytest
import torch
from simulation.engine import SimulatedEngine
from simulation.links import Link, Links

MB = 1_000_000
LINKS = Links(
    device=Link(10 * MB, 20 * MB, 1e-3, duplex=2),
    tiers={"dram": Link(40 * MB, 40 * MB), "cxl": Link(5 * MB, 4 * MB)},
)


class Tiers:
    """Memory is DRAM, except what a test says; counts what it is asked."""

    def __init__(self):
        self.by_address = {}
        self.asked = []

    def __call__(self, address, nbytes):
        self.asked.append((address, nbytes))
        return self.by_address.get(address, "dram")


@pytest.fixture
def tiers():
    return Tiers()


@pytest.fixture
def engine(tiers):
    engine = SimulatedEngine(LINKS, tiers)
    yield engine
    engine.close()


@pytest.fixture
def hold(engine, monkeypatch):
    """A context in which time stands still for the engine and its workers do nothing, however long it takes."""

    @contextlib.contextmanager
    def held():
        now_s = time.perf_counter()
        with engine._changed, monkeypatch.context() as patch:
            patch.setattr("simulation.engine.time", SimpleNamespace(perf_counter=lambda: now_s))
            yield

    return held


def empty(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("direction", "tier", "seconds"),
    [
        ("h2d", "dram", 0.05),
        ("d2h", "dram", 0.025),
        ("h2d", "cxl", 0.1),
        ("d2h", "cxl", 0.125),
        ("d2h", {"dram": 0.75, "cxl": 0.25}, 0.03125),
    ],
)
def test_a_copy_takes_at_least_what_its_links_allow(engine, tiers, direction, tier, seconds):
    on_host, on_device = empty(MB // 2), empty(MB // 2)
    tiers.by_address[on_host.data_ptr()] = tier
    copy = engine.d2h(on_device, on_host) if direction == "d2h" else engine.h2d(on_host, on_device)
    copy.wait()
    (interval,) = engine.trace.lane(direction)
    assert interval.end_s - interval.start_s >= 1e-3 + seconds
    assert interval.nbytes == MB // 2
    assert interval.name == (tier if isinstance(tier, str) else "dram + cxl")
    assert tiers.asked == [(on_host.data_ptr(), MB // 2)]
    assert engine.max_lag_s > 0


def test_directions_run_at_once_and_each_is_in_order(engine, hold):
    with hold():
        copies = [engine.h2d(empty(MB // 2), empty(MB // 2)) for _ in range(2)]
        out = engine.d2h(empty(MB // 2), empty(MB // 2))
        copies += [out, engine.h2d(empty(MB // 2), empty(MB // 2), after=[out])]
        assert not any(copy.done() for copy in copies)
    engine.synchronize()
    assert all(copy.done() for copy in copies)
    first, second, third = engine.trace.lane("h2d")
    (other,) = engine.trace.lane("d2h")
    assert first.start_s == other.start_s
    assert first.end_s <= second.start_s < second.end_s <= third.start_s
    assert third.end_s >= other.end_s
    assert third.end_s - first.start_s >= 3 * (1e-3 + 0.05)


def test_a_reader_that_does_not_wait_finds_the_last_bytes_missing(engine, hold):
    on_device, on_host = torch.ones(MB, dtype=torch.uint8), empty(MB)
    with hold():
        copy = engine.d2h(on_device, on_host)
        assert on_host[-1] == 0
        assert not copy.done()
    copy.wait_host()
    assert copy.done()
    assert torch.equal(on_host, on_device)
