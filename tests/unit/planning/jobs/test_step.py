"""Steps and exchanges of ranks computed by hand, what decides about them, and what holds for every machine."""

import math
from dataclasses import replace

import pytest
from footprint import PUBLISHED, split_masters, zero_offload
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.speeds import Device, Machine, MachineLinks, MachineSsd, MachineTier
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import (
    Exchange,
    Job,
    MemoryClass,
    Move,
    StepModel,
    predict_step,
)

R = TensorRole


def tier(name, kind, adam, read, write, capacity=0):
    speeds = {"adam_bytes_per_s": adam, "device_read_bytes_per_s": read, "device_write_bytes_per_s": write}
    return MachineTier(name=name, kind=kind, capacity_bytes=capacity, **speeds)


MACHINE = Machine(
    name="slow",
    tiers=(tier("dram0", TierKind.DRAM, 100, 100, 100), tier("cxl0", TierKind.CXL, 20, 16, 8)),
    device=Device(flops=1, h2d_bytes_per_s=10, d2h_bytes_per_s=10),
)
DRAM, CARD = {"dram0": 1.0}, {"cxl0": 1.0}


WEIGHTS = (R.COMPUTE_WEIGHTS, Move("forward", "h2d", 80), Move("backward", "h2d", 80))
GRADS = (R.COMPUTE_GRADS, Move("backward", "d2h", 40))
MOMENTUM = (R.MOMENTUM, Move("update", "cpu", 400))
FIXED = MemoryClass(role=R.MOMENTUM, nbytes=1, tier="cxl0", moves=MOMENTUM[1:])
EXCHANGED = (R.COMPUTE_WEIGHTS,)


def job_of(*classes, **values):
    """Return a job of classes given as role and moves."""
    made = tuple(MemoryClass(role=role, nbytes=10**15, moves=moves) for role, *moves in classes)
    values = {f"{name}_flops" if name in ("forward", "backward") else name: value for name, value in values.items()}
    return Job(**{"name": "job", "classes": made, "num_units": 4, **values})


def job_on_ssd(*classes, records=5, **values):
    """Return a job that has momentum on the tier ssd: 400 bytes for the CPUs, 200 from and to the drives."""
    moves = (Move("update", "cpu", 400), Move("update", "ssd_read", 200), Move("update", "ssd_write", 200))
    job = job_of(*classes, **values)
    momentum = MemoryClass(role=R.MOMENTUM, nbytes=200, tier="ssd", moves=moves)
    return replace(job, classes=(*job.classes, momentum), num_records=records, num_swaps=records)


def exchanging(*found, forward=1.0):
    """Return a job of several ranks that exchange: phase, kind, bytes between devices and machines, steps of rings."""
    made = tuple(Exchange("of a test", phase, kind, 0.0, *rest) for phase, kind, *rest in found)
    return job_of(EXCHANGED, forward=forward, backward=60.0, exchanges=made)


def on_ssd(read, write):
    return replace(MACHINE, ssd=MachineSsd(capacity_bytes=0, read_bytes_per_s=read, write_bytes_per_s=write))


def on(device, machine=MACHINE, **values):
    """Return a machine with a device that differs."""
    return replace(machine, device=replace(machine.device, **device), **values)


def busy(phase):
    """Return the seconds of the resources that a phase uses at all."""
    return {name: seconds for name, seconds in phase.resources.items() if seconds}


LINKS = MachineLinks(peer_bytes_per_s=20, network_bytes_per_s=4, peer_latency_s=0.01, network_latency_s=0.1)
TWO = replace(on({"count": 2}), name="two", links=LINKS)
THROUGH_HOST = exchanging(("forward", "gather", 80, 0, 5))
HIDDEN = (10 + 4 + 20) / 5 + 4 / 5 * 20

# jobs, their split (of all roles, or by role), machines; seconds of phases, and "hidden"; resources of phases
STEPS = {
    # links take 8 s to the device and 4 s from it; the update has nothing to do
    "a phase that computes waits for the first fetch and the last write": (
        job_of(WEIGHTS, GRADS, forward=20, backward=60), DRAM, MACHINE,
        {"forward": 20 + 8 / 4, "backward": 60 + 8 / 4 + 4 / 4, "update": 0, "hidden": 0},
        {"backward": {"compute": 60, "link h2d": 8, "link d2h": 4, "tier dram0": 1.2}, "update": {}},
    ),
    "a copy takes as long as the slowest tier": (
        job_of(GRADS), CARD, MACHINE, {"backward": 40 / 8}, {"backward": {"link d2h": 4, "tier cxl0": 5}},
    ),
    "the update is done on all tiers at once": (
        job_of(MOMENTUM, (R.VARIANCE, Move("update", "cpu", 100))),
        {R.MOMENTUM: {"dram0": 0.9, "cxl0": 0.1}, R.VARIANCE: DRAM}, MACHINE,
        {"forward": 0, "backward": 0, "update": 4.6}, {"update": {"tier dram0": 4.6, "tier cxl0": 2}},
    ),
    # 400 / 100 = 4 s of update, of which 3 s fit beside 20 s of compute
    **{
        f"an update hides behind what it overlaps but for one unit: {overlap}": (
            job_of(WEIGHTS, GRADS, MOMENTUM, forward=20, backward=20, overlap=overlap), DRAM, MACHINE,
            {"forward": 22, "backward": 23, "update": 1, "hidden": 3}, {"update": {"tier dram0": 4}},
        )
        for overlap in ("backward", "forward", "both")
    },
    "without a device the CPUs read and write what would be copied": (
        job_of(WEIGHTS, GRADS, MOMENTUM, forward=2, backward=10, overlap="backward"),
        {R.COMPUTE_WEIGHTS: CARD, R.COMPUTE_GRADS: CARD, R.MOMENTUM: DRAM}, on({"is_host": True}),
        {"forward": 80 / 20, "backward": 10, "update": 1}, {"forward": {"compute": 2, "tier cxl0": 4}},
    ),
    "what a rule places lies there, and the rest where the policy says": (
        Job(name="job", classes=(FIXED, replace(FIXED, tier=None))), DRAM, MACHINE, {},
        {"update": {"tier dram0": 4, "tier cxl0": 20}},
    ),
    # 10 s of reads, 4 s of updates in the nearest memory, 20 s of writes, over 5 records
    "records are read, updated and written in a pipeline": (
        job_on_ssd(), {}, on_ssd(20, 10), {"update": HIDDEN},
        {"update": {"tier dram0": 4, "ssd read": 10, "ssd write": 20}},
    ),
    **{
        f"reads and writes of drives hide behind: {overlap}": (
            job_on_ssd(forward=40, backward=40, overlap=overlap), {}, on_ssd(20, 10),
            {"forward": 40, "backward": 40, "update": HIDDEN / 4, "hidden": HIDDEN * 3 / 4}, {},
        )
        for overlap in ("backward", "forward", "both")
    },
    "the first gather and the last reduction are waited for": (
        exchanging(("forward", "gather", 80, 0, 0), ("backward", "reduce", 160, 0, 100), forward=20), DRAM, TWO,
        {"forward": 20 + 4 / 4, "backward": 60 + (8 + 1) / 4}, {"backward": {"compute": 60, "peer links": 9}},
    ),
    "machines exchange over the network while devices do over their links": (
        exchanging(("forward", "gather", 200, 200, 10)), DRAM, TWO, {"forward": 51 + 1 / 4},
        {"forward": {"compute": 1, "peer links": 10, "network": 50 + 1}},
    ),
    # each of two devices sends and receives 80 bytes over its link, and memory is written and read twice
    "devices without links exchange through host memory": (
        THROUGH_HOST, DRAM, replace(TWO, links=MachineLinks()), {},
        {"forward": {"compute": 1, "link h2d": 8, "link d2h": 8, "tier dram0": 3.2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STEPS)
def test_steps_by_hand(case):
    job, split, machine, seconds, resources = STEPS[case]
    splits = split if set(split) <= set(R) else dict.fromkeys(job.free_classes(), split)
    time = predict_step(job, splits, machine)
    found = {name: phase.seconds for name, phase in time.phases().items()} | {"hidden": time.hidden_seconds}
    assert {name: found[name] for name in seconds} == pytest.approx(seconds)
    for name, expected in resources.items():
        phase = time.phases()[name]
        assert busy(phase) == pytest.approx(expected)
        assert phase.bound_by == max(expected, key=expected.get, default="nothing")
        assert f"{name} {phase.seconds:.2f} s ({phase.bound_by})" in time.describe()
    assert StepModel(job, machine).seconds(splits) == pytest.approx(time.seconds)


def test_a_network_of_unknown_speed_is_refused():
    unknown = replace(TWO, links=replace(LINKS, network_bytes_per_s=None))
    with pytest.raises(ConfigError, match="`two` does not say how fast: give network_bytes_per_s under `links`"):
        StepModel(exchanging(("forward", "gather", 200, 200, 10)), unknown)


# -- what holds for every job and machine ------------------------------------------------------------------------------

speeds = st.floats(1e9, 1e12)
contentions = st.one_of(st.just(math.inf), st.floats(1, 20))


@st.composite
def machines(draw):
    names = ["dram0", "cxl0", "cxl1"][: draw(st.integers(2, 3))]
    kinds = {"d": TierKind.DRAM, "c": TierKind.CXL}
    tiers = tuple(tier(name, kinds[name[0]], draw(speeds), draw(speeds), draw(speeds)) for name in names)
    device = Device(
        flops=draw(st.floats(1e11, 1e15)),
        h2d_bytes_per_s=draw(speeds),
        d2h_bytes_per_s=draw(speeds),
        copy_latency_s=draw(st.sampled_from([0.0, 1e-5])),
        count=draw(st.integers(1, 4)),
        is_host=draw(st.booleans()),
    )
    return Machine(name="drawn", tiers=tiers, device=device, write_contention=draw(contentions))


@st.composite
def jobs(draw):
    shape = draw(st.sampled_from(list(PUBLISHED.values())))
    batch, sequence = draw(st.integers(1, 4)), draw(st.integers(1, 32768))
    if draw(st.booleans()):
        return zero_offload(shape, batch, sequence)
    overlap = draw(st.sampled_from(["none", "backward", "forward", "both"]))
    return split_masters(shape, batch, sequence, overlap=overlap)


def draw_splits(data, job, machine):
    splits = {}
    for role in job.free_classes():
        parts = [data.draw(st.integers(0, 10)) for _ in machine.names]
        parts[0] += sum(parts) == 0
        splits[role] = {name: part / sum(parts) for name, part in zip(machine.names, parts, strict=True)}
    return splits


@given(machines(), jobs(), st.data())
def test_no_phase_is_faster_than_any_of_its_resources_and_overlap_never_takes_longer(machine, job, data):
    model, splits = StepModel(job, machine), draw_splits(data, job, machine)
    time = model.explain(splits)
    for phase in (time.forward, time.backward):
        assert phase.seconds >= max(phase.resources.values()) * (1 - 1e-9)
    assert time.seconds >= max(time.update.resources.values()) * (1 - 1e-9)
    assert model.seconds(splits) == pytest.approx(time.seconds)
    alone = predict_step(replace(job, overlap="none"), splits, machine)
    assert time.serial_seconds == pytest.approx(alone.seconds)
    assert time.seconds <= alone.seconds * (1 + 1e-9)
