"""Policies side by side, and what counts as fitting."""

import pytest

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.speeds import Device, Machine, MachineTier
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job, MemoryClass, Move
from lightning_cxl.planning.policies import POLICIES, compare, dram_only_time, fits, fits_device, with_working_memory

GIB = 1 << 30


def machine(dram=10 * GIB, cxl=20 * GIB, **device):
    speeds = {"device_read_bytes_per_s": 50e9, "device_write_bytes_per_s": 40e9}
    link = {"flops": 1e12, "h2d_bytes_per_s": 50e9, "d2h_bytes_per_s": 50e9}
    return Machine(
        name="test",
        tiers=(
            MachineTier(name="dram0", kind=TierKind.DRAM, capacity_bytes=dram, adam_bytes_per_s=200e9, **speeds),
            MachineTier(name="cxl0", kind=TierKind.CXL, capacity_bytes=cxl, adam_bytes_per_s=50e9, **speeds),
        ),
        device=Device(**{**link, **device}),
    )


def job(nbytes=8 * GIB, device_bytes=GIB, fixed=None):
    moves = (Move("update", "cpu", 2.0 * nbytes),)
    classes = [MemoryClass(role=TensorRole.MOMENTUM, nbytes=nbytes, moves=moves)]
    if fixed is not None:
        classes.append(MemoryClass(role=TensorRole.MOMENTUM, nbytes=fixed, tier="cxl0"))
    return Job(name="test", classes=tuple(classes), num_tokens=100, forward_flops=1e12, device_bytes=device_bytes)


def test_bytes_lie_where_the_policy_says_and_none_is_lost():
    plans = compare(job(), machine(), POLICIES)
    assert set(plans) == set(POLICIES)
    assert plans["dram_only"].bytes_on == {TensorRole.MOMENTUM: {"dram0": 8 * GIB}}
    assert plans["interleave"].bytes_on == {TensorRole.MOMENTUM: {"dram0": 4 * GIB, "cxl0": 4 * GIB}}
    for plan in plans.values():
        assert plan.used_bytes("dram0") + plan.used_bytes("cxl0") == 8 * GIB
        assert plan.time.seconds > 1


def test_a_policy_that_has_no_room_says_so_and_the_others_go_on():
    plans = compare(job(12 * GIB), machine(), ["dram_only", "bandwidth"])
    assert "cannot place momentum" in plans["dram_only"].error and plans["dram_only"].time is None
    assert not plans["bandwidth"].error
    assert not fits(job(12 * GIB), machine(), "dram_only")
    assert fits(job(12 * GIB), machine(), "bandwidth")


def test_the_baseline_is_dram_that_is_large_enough():
    enough, small = machine(dram=100 * GIB), machine(dram=GIB)
    big = job(50 * GIB, fixed=GIB)
    assert dram_only_time(big, small).seconds == pytest.approx(dram_only_time(big, enough).seconds)
    # the fixed class moves nothing in this job
    assert dram_only_time(job(50 * GIB), enough).update.seconds == pytest.approx(2 * 50 * GIB / 200e9)


def test_the_device_must_hold_its_peak_where_its_memory_is_known():
    assert fits_device(job(device_bytes=5 * GIB), machine(memory_bytes=5 * GIB))
    assert not fits_device(job(device_bytes=5 * GIB + 1), machine(memory_bytes=5 * GIB))
    assert fits_device(job(device_bytes=5 * GIB), machine(memory_bytes=0))
    assert fits_device(job(device_bytes=None), machine(memory_bytes=1))
    assert not fits(job(device_bytes=5 * GIB), machine(memory_bytes=GIB), "bandwidth")


def test_where_the_cpu_computes_its_working_memory_is_dram_that_is_gone():
    host = machine(is_host=True)
    assert with_working_memory(job(device_bytes=3 * GIB), host).tier("dram0").capacity_bytes == 7 * GIB
    assert with_working_memory(job(device_bytes=30 * GIB), host).tier("dram0").capacity_bytes == 0
    assert with_working_memory(job(), machine()) == machine()
    shared = with_working_memory(job(device_bytes=3 * GIB), host.with_capacity({}, 9 * GIB))
    assert shared.host_bytes == 6 * GIB
    assert fits(job(device_bytes=2 * GIB), host, "dram_only")
    assert not fits(job(device_bytes=2 * GIB + 1024), host, "dram_only")


def test_an_unknown_policy_cannot_be_planned():
    with pytest.raises(ConfigError, match="no policy 'fastest'"):
        compare(job(), machine(), ["fastest"])
