"""Policies on the machine of arXiv 2507.03305, on any machine and job, by name, and side by side."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.errors import ConfigError, TierFullError
from lightning_cxl.machine.speeds import Device, Machine
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job, MemoryClass, Move, predict_step
from lightning_cxl.planning.policies import (
    POLICIES,
    check_policy,
    fits,
    fits_device,
    get_policy,
    with_working_memory,
)
from tests.unit.planning.jobs.test_step import tier

GIB = 2**30
R = TensorRole


def machine(*, dram: int = 128, cards: tuple[int, ...] = (256,), unit: int = GIB, **options) -> Machine:
    """Return a machine with the speeds of arXiv 2507.03305's (quoted in tests/unit/planning/jobs/test_perf.py)."""
    near = tier("dram0", TierKind.DRAM, 278e9, 278e9, 278e9, dram * unit)
    far = [tier(f"cxl{i}", TierKind.CXL, 69e9, 53e9, 38e9, size * unit) for i, size in enumerate(cards)]
    device = Device(flops=150e12, h2d_bytes_per_s=55.6e9, d2h_bytes_per_s=55.6e9)
    return Machine(**{"name": "test", "tiers": (near, *far), "device": device, "write_contention": 6.2, **options})


def job_of(sizes: dict[TensorRole, int], *, fixed: dict[tuple[TensorRole, str], int] | None = None, **options) -> Job:
    """Return a job whose classes move what such classes do: optimizer state twice a step by the CPUs, and so on."""
    classes = [MemoryClass(role=role, nbytes=size, moves=moves_of(role, size)) for role, size in sizes.items()]
    classes += [
        MemoryClass(role=role, nbytes=size, tier=tier, moves=moves_of(role, size))
        for (role, tier), size in (fixed or {}).items()
    ]
    return Job(**{"name": "test", "classes": tuple(classes), "num_units": 8, **options})


def moves_of(role: TensorRole, size: int) -> tuple[Move, ...]:
    if role is R.ACTIVATIONS:
        return Move("forward", "d2h", size), Move("backward", "h2d", size)
    if role is R.COMPUTE_WEIGHTS:
        return Move("forward", "h2d", size), Move("backward", "h2d", size), Move("update", "cpu", size)
    if role is R.COMPUTE_GRADS:
        return Move("backward", "d2h", size), Move("update", "cpu", size)
    return (Move("update", "cpu", 2 * size),)


def bytes_by_tier(job: Job, splits) -> dict[str, float]:
    """Return what every tier holds, decorators and rules included."""
    held: dict[str, float] = {}
    for each in job.classes:
        for name, share in (splits[each.role] if each.tier is None else {each.tier: 1.0}).items():
            held[name] = held.get(name, 0.0) + share * each.nbytes
    return held


ROLES = [role for role in R if role is not R.STAGING]


@st.composite
def cases(draw):
    unit = draw(st.sampled_from([1, 2**20]))  # where units are bytes, the last byte is often the one that decides
    cards = tuple(draw(st.lists(st.integers(0, 400), max_size=3)))
    host = machine(dram=draw(st.integers(0, 400)), cards=cards, unit=unit)
    tiers = tuple(
        replace(
            tier,
            num_nodes=draw(st.integers(1, 8)),
            **{f"{use}_bytes_per_s": draw(st.floats(1e9, 5e11)) for use in ("adam", "device_read", "device_write")},
        )
        for tier in host.tiers
    )
    sizes = draw(st.dictionaries(st.sampled_from(ROLES), st.integers(0, 200 * unit), min_size=1))
    asked = st.tuples(st.sampled_from(ROLES), st.sampled_from(host.names))
    fixed = draw(st.dictionaries(asked, st.integers(0, 50 * unit), max_size=3))
    options = {
        "overlap": draw(st.sampled_from(["none", "backward", "forward", "both"])),
        "forward_flops": draw(st.floats(0, 1e12)),
        "backward_flops": draw(st.floats(0, 1e12)),
    }
    return job_of(sizes, fixed=fixed, **options), replace(host, tiers=tiers)


def decide(name, job, host):
    try:
        return get_policy(name).decide(job, host)
    except TierFullError:
        return None


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(cases(), st.randoms(use_true_random=False))
def test_nothing_is_lost_no_tier_is_overcommitted_and_the_order_of_classes_does_not_matter(name, case, rng):
    job, host = case
    decision, shuffled = decide(name, job, host), list(job.classes)
    rng.shuffle(shuffled)
    assert decide(name, replace(job, classes=tuple(shuffled)), host) == decision
    if decision is None:
        return
    assert set(decision.splits) == set(job.free_classes()) == set(decision.reasons)
    for split in decision.splits.values():
        assert sum(split.values()) == pytest.approx(1)
        assert min(split.values()) >= 0
    for where, held in bytes_by_tier(job, decision.splits).items():
        assert held < host.tier(where).capacity_bytes + len(job.classes)  # a split's part is rounded to whole bytes


@settings(max_examples=60)
@given(cases())
def test_what_fits_is_placed(case):
    """A job is refused by the policies that use all memory only if its bytes exceed it, or what is fixed overflows."""
    job, host = case
    fixed = bytes_by_tier(replace(job, classes=tuple(c for c in job.classes if c.tier)), {})
    overflows = any(held > host.tier(tier).capacity_bytes for tier, held in fixed.items())
    total = sum(each.nbytes for each in job.classes)
    too_much = total > sum(tier.capacity_bytes for tier in host.tiers)
    for name in ("interleave", "bandwidth"):
        assert (decide(name, job, host) is None) == (overflows or too_much)


@settings(max_examples=60)
@given(cases())
def test_bandwidth_is_never_slower_than_another_policy(case):
    job, host = case
    ours = decide("bandwidth", job, host)
    for name in ("dram_only", "interleave", "latency_first"):
        other = decide(name, job, host)
        if other is None:
            continue
        limit = 1 + 1e-6 if name == "latency_first" else 1.002  # of plans that are about equal it takes the simplest
        assert predict_step(job, ours.splits, host).seconds <= limit * predict_step(job, other.splits, host).seconds


@pytest.mark.parametrize("name", ["latency_first", "interleave", "bandwidth"])
def test_memory_that_tiers_share_is_handed_out_once(name):
    host = machine(dram=100, cards=(100,), unit=1, host_bytes=120)
    assert decide(name, job_of({R.MOMENTUM: 100, R.VARIANCE: 20}), host) is not None
    assert decide(name, job_of({R.MOMENTUM: 100, R.VARIANCE: 21}), host) is None
    fixed = {(R.MOMENTUM, "dram0"): 100, (R.VARIANCE, "cxl0"): 21}
    assert decide(name, job_of({}, fixed=fixed), host) is None


class NeedsArguments:
    def __init__(self, size):
        self.size = size

    def decide(self, job, machine): ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("bandwith", "there is no policy 'bandwith'; choose one of 'dram_only'"),
        ("nowhere.Policy", "cannot be imported"),
        (f"{__name__}.Missing", "cannot be imported"),
        (f"{__name__}.momentum", "is no class, or has no method `decide`"),
        (f"{__name__}.NeedsArguments", "cannot be constructed without arguments"),
    ],
)
def test_what_is_no_policy(given, message):
    with pytest.raises(ConfigError, match=message):
        check_policy(given)


def small(**device):
    link = {"flops": 1e12, "h2d_bytes_per_s": 50e9, "d2h_bytes_per_s": 50e9}
    return machine(dram=10, cards=(20,), device=Device(**link, **device))


def momentum(device_bytes=GIB):
    return job_of({R.MOMENTUM: 8 * GIB}, device_bytes=device_bytes)


@pytest.mark.parametrize(("peak", "memory", "is_enough"), [(5, 5, True), (6, 5, False), (5, 0, True), (None, 1, True)])
def test_the_device_must_hold_its_peak_where_both_are_known(peak, memory, is_enough):
    job, host = momentum(device_bytes=peak), small(memory_bytes=memory)
    assert fits_device(job, host) == fits(job, host, "bandwidth") == is_enough


def test_where_the_cpu_computes_its_working_memory_is_dram_that_is_gone():
    host = small(is_host=True)
    assert with_working_memory(momentum(device_bytes=3 * GIB), host).tier("dram0").capacity_bytes == 7 * GIB
    assert with_working_memory(momentum(device_bytes=30 * GIB), host).tier("dram0").capacity_bytes == 0
    assert with_working_memory(momentum(), small()) == small()
    shared = with_working_memory(momentum(device_bytes=3 * GIB), host.with_capacity({}, 9 * GIB))
    assert shared.host_bytes == 6 * GIB
    assert fits(momentum(device_bytes=2 * GIB), host, "dram_only")
    assert not fits(momentum(device_bytes=2 * GIB + 1024), host, "dram_only")
