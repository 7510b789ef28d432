"""Steps and exchanges of ranks computed by hand, what decides about them, and what holds for every machine."""

import itertools
import math
from dataclasses import replace

import pytest
from footprint import PUBLISHED, split_masters, zero_offload
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.errors import ConfigError, TierNotFoundError
from lightning_cxl.inventory.tensors import Mesh
from lightning_cxl.machine.speeds import Device, Machine, MachineLinks, MachineSsd, MachineTier
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import (
    Exchange,
    Job,
    MemoryClass,
    Move,
    StepModel,
    UnitShards,
    exchanges,
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
READS = (R.COMPUTE_WEIGHTS, Move("forward", "h2d", 160))
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
BACKED = replace(MACHINE, tiers=(MACHINE.tiers[0], replace(MACHINE.tiers[1], backed_by="dram0")))
HIDDEN = (10 + 4 + 20) / 5 + 4 / 5 * 20

# jobs, their split (of all roles, or by role), machines; seconds of phases, and "hidden"; resources of phases
STEPS = {
    # links take 8 s to the device and 4 s from it; the update has nothing to do
    "a phase that computes waits for the first fetch and the last write": (
        job_of(WEIGHTS, GRADS, forward=20, backward=60), DRAM, MACHINE,
        {"forward": 20 + 8 / 4, "backward": 60 + 8 / 4 + 4 / 4, "update": 0, "hidden": 0},
        {"backward": {"compute": 60, "link h2d": 8, "link d2h": 4, "tier dram0": 1.2}, "update": {}},
    ),
    "a phase that copies waits for the last unit's compute": (
        job_of(WEIGHTS, forward=4), DRAM, MACHINE, {"forward": 8 + 4 / 4}, {},
    ),
    "a copy takes as long as the slowest tier": (
        job_of(GRADS), CARD, MACHINE, {"backward": 40 / 8}, {"backward": {"link d2h": 4, "tier cxl0": 5}},
    ),
    "tiers work side by side": (job_of(GRADS), {"dram0": 0.5, "cxl0": 0.5}, MACHINE, {"backward": 40 / 10}, {}),
    "every unit's copy has its latency": (
        job_of(WEIGHTS), DRAM, on({"copy_latency_s": 0.5}), {"forward": 8 + 4 * 0.5}, {},
    ),
    "writes slow down where link and tier are about equally fast": (
        job_of(GRADS), CARD, replace(MACHINE, write_contention=5), {"backward": (4**5 + 5**5) ** (1 / 5)}, {},
    ),
    "reads do not": (job_of(READS), CARD, replace(MACHINE, write_contention=5), {"forward": 16}, {}),
    # 80 / 16 and 40 / 8 take 5 s each, but all of it 120 / 20; link h2d 8 s, link d2h 5 s with the tier
    "a tier that is read and written has one bandwidth for both": (
        job_of(WEIGHTS, GRADS, backward=8), CARD, MACHINE, {"backward": (8 + 8 + 5) / 4 + 8 * 3 / 4},
        {"backward": {"compute": 8, "link h2d": 8, "link d2h": 4, "tier cxl0": 6}},
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
    # all but one unit's time of each: while it computes, memory rests
    **{
        f"behind the last micro-batch's backward and the first one's forward: {overlap}": (
            job_of(
                (R.MOMENTUM, Move("update", "cpu", 4000)), forward=20, backward=40, overlap=overlap, num_micro_batches=4
            ),
            DRAM, MACHINE, {"hidden": hidden}, {},
        )
        for overlap, hidden in (("backward", 7.5), ("forward", 3.75), ("both", 11.25), ("none", 0))
    },
    "devices share the tiers but not the links": (
        job_of(WEIGHTS, MOMENTUM, forward=10), {R.COMPUTE_WEIGHTS: CARD, R.MOMENTUM: DRAM}, on({"count": 2}),
        {"forward": 10 * 3 / 4 + (10 + 10) / 4, "update": 4},
        {"forward": {"compute": 10, "link h2d": 8, "tier cxl0": 160 / 16}},
    ),
    "without a device the CPUs read and write what would be copied": (
        job_of(WEIGHTS, GRADS, MOMENTUM, forward=2, backward=10, overlap="backward"),
        {R.COMPUTE_WEIGHTS: CARD, R.COMPUTE_GRADS: CARD, R.MOMENTUM: DRAM}, on({"is_host": True}),
        {"forward": 80 / 20, "backward": 10, "update": 1}, {"forward": {"compute": 2, "tier cxl0": 4}},
    ),
    "a tier that another one backs uses its bandwidth": (
        job_of(MOMENTUM, WEIGHTS), {R.MOMENTUM: CARD, R.COMPUTE_WEIGHTS: DRAM}, BACKED,
        {"forward": 8, "update": 4}, {"update": {"tier dram0": 4}},
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
    "one record is no pipeline": (job_on_ssd(records=1), {}, on_ssd(20, 10), {"update": 10 + 4 + 20}, {}),
    "drives of unknown speed take no time": (job_on_ssd(), {}, MACHINE, {"update": 4}, {}),
    **{
        f"reads and writes of drives hide behind: {overlap}": (
            job_on_ssd(forward=40, backward=40, overlap=overlap), {}, on_ssd(20, 10),
            {"forward": 40, "backward": 40, "update": HIDDEN / 4, "hidden": HIDDEN * 3 / 4}, {},
        )
        for overlap in ("backward", "forward", "both")
    },
    # 200 s of writes, of which the last unit's 50 s are alone
    **{
        f"slow writes stick out: {overlap}": (
            job_on_ssd(forward=40, backward=40, overlap=overlap), {}, on_ssd(20, 1),
            {"update": 150 - window + (sum((10, 4, 200)) / 5 + 4 / 5 * 200) / 4}, {},
        )
        for overlap, window in (("backward", 40), ("forward", 40), ("both", 80))
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
    "and so do processes on the CPU": (
        THROUGH_HOST, DRAM, on({"is_host": True}, TWO), {},
        {"forward": {"compute": 1, "tier dram0": 3.2, "peer links": 0.05}},
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


@pytest.mark.parametrize(
    ("splits", "error", "message"),
    [
        ({}, ConfigError, "no split for momentum"),
        ({R.MOMENTUM: {"ssd": 1.0}}, TierNotFoundError, "no tier 'ssd'"),
        ({R.MOMENTUM: {"dram0": 0.5}}, ValueError, "add up to 1"),
    ],
)
def test_splits_that_place_nothing_are_refused(splits, error, message):
    with pytest.raises(error, match=message):
        predict_step(job_of(MOMENTUM), splits, MACHINE)


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


@given(machines(), jobs(), st.floats(0, 1), st.data())
def test_seconds_are_convex_in_the_splits(machine, job, part, data):
    model = StepModel(job, machine)
    one, other = (draw_splits(data, job, machine) for _ in range(2))
    between = {
        role: {name: part * one[role][name] + (1 - part) * other[role][name] for name in machine.names} for role in one
    }
    assert model.seconds(between) <= (part * model.seconds(one) + (1 - part) * model.seconds(other)) * (1 + 1e-9)


def test_the_order_of_classes_changes_not_even_the_last_bit():
    """A policy compares seconds: what differs in the last bit would choose another plan."""
    parts = [(role, Move("update", "cpu", nbytes)) for role, nbytes in ((R.MOMENTUM, 0.1), (R.VARIANCE, 0.2))]
    parts.append((R.MASTER_GRADS, Move("update", "cpu", 0.3)))
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1
    splits = dict.fromkeys((R.MOMENTUM, R.VARIANCE, R.MASTER_GRADS), DRAM)
    forms = [job_of(*order) for order in itertools.permutations(parts)]
    fixed = [replace(job, classes=tuple(replace(each, tier="dram0") for each in job.classes)) for job in forms]
    for jobs in (forms, fixed):
        assert len({StepModel(job, MACHINE).seconds(splits) for job in jobs}) == 1


@given(st.floats(1, 1e4), st.floats(1, 1e4), st.sampled_from(["none", "backward", "forward", "both"]))
def test_a_step_takes_no_less_than_reads_or_writes_and_no_more_than_all_in_turn(read, write, overlap):
    job = job_on_ssd(WEIGHTS, GRADS, forward=20, backward=60, overlap=overlap)
    splits = {R.COMPUTE_WEIGHTS: DRAM, R.COMPUTE_GRADS: DRAM}
    machine = on_ssd(read, write)
    seconds = predict_step(job, splits, machine).seconds
    assert seconds == StepModel(job, machine).seconds(splits)
    without = predict_step(job.without_ssd_moves(), splits, machine)
    limit = 1 + 1e-9
    assert max(200 / read, 200 / write, without.seconds) <= seconds * limit
    assert seconds <= (without.serial_seconds + 200 / read + 200 / write) * limit


UNITS = [UnitShards(f"unit {index}", 10, 20) for index in range(3)]


def test_exchanges_between_devices_and_between_machines():
    def found(*batches, **mesh):
        return [each[1:3] + each[4:] for each in exchanges(UNITS, Mesh(**mesh), *batches)]

    assert found(2, num_devices=4) == [
        ("forward", "gather", 180, 0, 3 * 2 * 3),
        ("backward", "gather", 180, 0, 3 * 2 * 3),
        ("backward", "reduce", 360, 0, 3 * 2 * 3),
        ("update", "reduce", 16, 0, 6),
    ]
    assert found(num_devices=4, num_machines=2)[0] == ("forward", "gather", 210, 210, 3 * 7)
    assert found(num_devices=1, num_machines=2)[0] == ("forward", "gather", 0, 30, 3)
    replicas = found(2, num_devices=4, num_machines=3, replicates=True)
    assert replicas[0][3] == 0
    assert replicas[3] == ("backward", "reduce", 0, 4 * 2 * 2 * 2 / 3 * 60, 3 * 2 * 2 * 2)
    assert found(num_devices=1) == []
