"""Steps and exchanges of ranks computed by hand, what decides about them, and what holds for every machine."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from footprint import PUBLISHED, split_masters, zero_offload
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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
    groups_of,
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


def job_of(*classes, units=4, forward=0.0, backward=0.0, overlap="none"):
    """Return a job of classes given as role and moves."""
    return Job(
        name="job",
        classes=tuple(MemoryClass(role=role, nbytes=10**15, moves=moves) for role, *moves in classes),
        num_units=units,
        forward_flops=forward,
        backward_flops=backward,
        overlap=overlap,
    )


def busy(phase):
    """Return the seconds of the resources that a phase uses at all."""
    return {name: seconds for name, seconds in phase.resources.items() if seconds}


WEIGHTS = (R.COMPUTE_WEIGHTS, Move("forward", "h2d", 80), Move("backward", "h2d", 80))
GRADS = (R.COMPUTE_GRADS, Move("backward", "d2h", 40))
MOMENTUM = (R.MOMENTUM, Move("update", "cpu", 400))


def test_a_phase_that_computes_waits_for_the_first_fetch_and_the_last_write():
    job = job_of(WEIGHTS, GRADS, forward=20, backward=60)
    time = predict_step(job, {R.COMPUTE_WEIGHTS: DRAM, R.COMPUTE_GRADS: DRAM}, MACHINE)
    # links take 8 s to the device and 4 s from it; the update has nothing to do
    assert time.forward.seconds == pytest.approx(20 + 8 / 4)
    assert time.backward.seconds == pytest.approx(60 + 8 / 4 + 4 / 4)
    assert time.update.seconds == 0
    assert [each.bound_by for each in time.phases().values()] == ["compute", "compute", "nothing"]
    assert busy(time.backward) == pytest.approx({"compute": 60, "link h2d": 8, "link d2h": 4, "tier dram0": 1.2})
    assert time.seconds == time.serial_seconds == pytest.approx(22 + 63)
    assert time.hidden_seconds == 0


SPREAD = {"dram0": 0.5, "cxl0": 0.5}
READS = (R.COMPUTE_WEIGHTS, Move("forward", "h2d", 160))
LATE = {"device": replace(MACHINE.device, copy_latency_s=0.5)}
CONTENDED = {"write_contention": 5}


@pytest.mark.parametrize(
    ("class_", "split", "machine", "phase", "seconds", "bound_by"),
    [
        pytest.param(GRADS, CARD, {}, "backward", 40 / 8, "tier cxl0", id="as long as the slowest tier takes"),
        pytest.param(GRADS, SPREAD, {}, "backward", 40 / 10, "link d2h", id="tiers side by side"),
        pytest.param(WEIGHTS, DRAM, LATE, "forward", 8 + 4 * 0.5, "link h2d", id="every unit's copy has its latency"),
        pytest.param(
            GRADS, CARD, CONTENDED, "backward", (4**5 + 5**5) ** (1 / 5), "tier cxl0",
            id="writes slow down where link and tier are about equally fast",
        ),
        pytest.param(READS, CARD, CONTENDED, "forward", 16, "link h2d", id="reads do not"),
    ],
)  # fmt: skip
def test_seconds_of_copies(class_, split, machine, phase, seconds, bound_by):
    found = predict_step(job_of(class_), {class_[0]: split}, replace(MACHINE, **machine)).phases()[phase]
    assert found.seconds == pytest.approx(seconds)
    assert found.bound_by == bound_by


def test_a_phase_that_copies_waits_for_the_last_unit_s_compute():
    time = predict_step(job_of(WEIGHTS, forward=4), {R.COMPUTE_WEIGHTS: DRAM}, MACHINE)
    assert time.forward.seconds == pytest.approx(8 + 4 / 4)
    assert time.forward.bound_by == "link h2d"


def test_a_tier_that_is_read_and_written_has_one_bandwidth_for_both():
    job = job_of(WEIGHTS, GRADS, backward=8)
    time = predict_step(job, {R.COMPUTE_WEIGHTS: CARD, R.COMPUTE_GRADS: CARD}, MACHINE).backward
    # 80 / 16 and 40 / 8 take 5 s each, but all of it 120 / 20; link h2d 8 s, link d2h 5 s with the tier
    assert time.resources["tier cxl0"] == pytest.approx(6)
    assert time.seconds == pytest.approx((8 + 8 + 5) / 4 + 8 * 3 / 4)


def test_the_update_is_done_on_all_tiers_at_once():
    job = job_of(MOMENTUM, (R.VARIANCE, Move("update", "cpu", 100)))
    splits = {R.MOMENTUM: {"dram0": 0.9, "cxl0": 0.1}, R.VARIANCE: DRAM}
    time = predict_step(job, splits, MACHINE)
    assert time.update.seconds == pytest.approx(max(460 / 100, 40 / 20)) == time.seconds
    assert time.update.resources["tier cxl0"] == pytest.approx(2)
    assert time.update.bound_by == "tier dram0"


@pytest.mark.parametrize("overlap", ["backward", "forward", "both"])
def test_an_update_hides_behind_the_phase_it_overlaps_but_for_one_unit(overlap):
    job = job_of(WEIGHTS, GRADS, MOMENTUM, forward=20, backward=20, overlap=overlap)
    splits = {R.COMPUTE_WEIGHTS: DRAM, R.COMPUTE_GRADS: DRAM, R.MOMENTUM: DRAM}
    time = predict_step(job, splits, MACHINE)
    # 400 / 100 = 4 s of update, of which 3 s fit beside 20 s of compute
    assert (time.forward.seconds, time.backward.seconds) == pytest.approx((22, 23))
    assert time.update.resources["tier dram0"] == 4
    assert time.update.seconds == pytest.approx(1)
    assert time.serial_seconds == pytest.approx(22 + 23 + 4)
    assert time.hidden_seconds == pytest.approx(3)
    assert "update 1.00 s (tier dram0)" in time.describe() and time.describe().endswith("hides 3.00 s")


def test_devices_share_the_tiers_but_not_the_links():
    two = replace(MACHINE, device=replace(MACHINE.device, count=2))
    job = job_of(WEIGHTS, MOMENTUM, forward=10)
    time = predict_step(job, {R.COMPUTE_WEIGHTS: CARD, R.MOMENTUM: DRAM}, two)
    assert time.forward.resources["link h2d"] == pytest.approx(8)
    assert time.forward.resources["tier cxl0"] == pytest.approx(160 / 16)
    assert time.forward.resources["compute"] == 10
    assert time.forward.seconds == pytest.approx(10 * 3 / 4 + (10 + 10) / 4)
    assert time.update.seconds == pytest.approx(4)


def test_without_a_device_the_cpus_read_and_write_what_would_be_copied():
    host = replace(MACHINE, device=Device(name="cpu", flops=1, h2d_bytes_per_s=1, d2h_bytes_per_s=1, is_host=True))
    job = job_of(WEIGHTS, GRADS, MOMENTUM, forward=2, backward=10, overlap="backward")
    splits = {R.COMPUTE_WEIGHTS: CARD, R.COMPUTE_GRADS: CARD, R.MOMENTUM: DRAM}
    time = predict_step(job, splits, host)
    assert time.forward.seconds == pytest.approx(80 / 20)
    assert busy(time.forward) == pytest.approx({"compute": 2, "tier cxl0": 4})
    assert time.backward.seconds == 10
    assert time.update.seconds == pytest.approx(1)


def test_a_tier_that_another_one_backs_uses_its_bandwidth():
    emulated = replace(MACHINE, tiers=(MACHINE.tiers[0], replace(MACHINE.tiers[1], backed_by="dram0")))
    job = job_of(MOMENTUM, WEIGHTS)
    on_both = predict_step(job, {R.MOMENTUM: CARD, R.COMPUTE_WEIGHTS: DRAM}, emulated)
    assert on_both == predict_step(job, {R.MOMENTUM: DRAM, R.COMPUTE_WEIGHTS: DRAM}, emulated)
    assert "tier cxl0" not in on_both.update.resources


def test_what_a_rule_places_lies_there():
    fixed = MemoryClass(role=R.MOMENTUM, nbytes=1, tier="cxl0", moves=MOMENTUM[1:])
    job = Job(name="job", classes=(fixed,))
    for splits in ({}, {R.MOMENTUM: DRAM}):
        assert predict_step(job, splits, MACHINE).seconds == pytest.approx(20)
    both = Job(name="job", classes=(fixed, replace(fixed, tier=None)))
    assert busy(predict_step(both, splits, MACHINE).update) == pytest.approx({"tier dram0": 4, "tier cxl0": 20})


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


def on_ssd(read, write, **machine):
    return replace(MACHINE, ssd=MachineSsd(capacity_bytes=0, read_bytes_per_s=read, write_bytes_per_s=write), **machine)


def job_on_ssd(*classes, records=5, **values):
    """Return a job that has momentum on the tier ssd: 400 bytes for the CPUs, 200 from and to the drives."""
    moves = (Move("update", "cpu", 400), Move("update", "ssd_read", 200), Move("update", "ssd_write", 200))
    job = job_of(*classes, **values)
    momentum = MemoryClass(role=R.MOMENTUM, nbytes=200, tier="ssd", moves=moves)
    return replace(job, classes=(*job.classes, momentum), num_records=records, num_swaps=records)


def test_records_are_read_updated_and_written_in_a_pipeline():
    update = predict_step(job_on_ssd(), {}, on_ssd(20, 10)).update
    # 10 s of reads, 4 s of updates in the nearest memory, 20 s of writes, over 5 records
    assert update.seconds == pytest.approx((10 + 4 + 20) / 5 + 4 / 5 * 20)
    assert busy(update) == pytest.approx({"tier dram0": 4, "ssd read": 10, "ssd write": 20})
    one = predict_step(job_on_ssd(records=1), {}, on_ssd(20, 10))
    assert one.update.seconds == pytest.approx(10 + 4 + 20)


@pytest.mark.parametrize(("overlap", "window"), [("backward", 40), ("forward", 40), ("both", 80)])
def test_reads_and_writes_hide_behind_what_the_device_does(overlap, window):
    job = job_on_ssd(forward=40, backward=40, overlap=overlap, units=4)
    time = predict_step(job, {}, on_ssd(20, 10))
    assert time.forward.seconds == time.backward.seconds == pytest.approx(40)  # 3/4 of 20 s are less
    assert time.update.seconds == pytest.approx(((10 + 4 + 20) / 5 + 4 / 5 * 20) / 4)
    assert time.serial_seconds == pytest.approx(40 + 40 + (10 + 4 + 20) / 5 + 4 / 5 * 20)
    slow = predict_step(job, {}, on_ssd(20, 1))  # 200 s of writes, of which the last unit's 50 s are alone
    alone = (sum((10, 4, 200)) / 5 + 4 / 5 * 200) / 4
    assert slow.update.seconds == pytest.approx(150 - window + alone)
    assert slow.update.bound_by == "ssd write"


def test_an_update_hides_behind_the_last_micro_batch_s_backward_and_the_first_one_s_forward():
    splits = {R.MOMENTUM: DRAM}
    # all but one unit's time of each: while it computes, memory rests
    for overlap, hidden in (("backward", 7.5), ("forward", 3.75), ("both", 11.25), ("none", 0)):
        job = job_of((R.MOMENTUM, Move("update", "cpu", 4000)), forward=20, backward=40, overlap=overlap)
        time = predict_step(replace(job, num_micro_batches=4), splits, MACHINE)
        assert time.hidden_seconds == pytest.approx(hidden)


def test_drives_of_unknown_speed_take_no_time():
    known = predict_step(job_on_ssd().without_ssd_moves(), {}, MACHINE)
    assert predict_step(job_on_ssd(), {}, MACHINE).seconds == known.seconds == pytest.approx(4)
    assert StepModel(job_on_ssd(), MACHINE).seconds({}) == known.seconds


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


LINKS = MachineLinks(peer_bytes_per_s=20, network_bytes_per_s=4, peer_latency_s=0.01, network_latency_s=0.1)
TWO = Machine(name="two", tiers=MACHINE.tiers[:1], device=replace(MACHINE.device, count=2), links=LINKS)
UNITS = [UnitShards(f"unit {index}", 10, 20) for index in range(3)]


def exchange(phase, kind, peer_bytes, network_bytes, steps):
    return Exchange("of a test", phase, kind, 0.0, peer_bytes, network_bytes, steps)


def test_groups_of_a_model():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 6)).to(torch.bfloat16)
    model[1].weight.requires_grad_(False)
    model[2].weight = model[0].weight  # tied: it belongs to the first
    units = [("0", model[0]), ("1", model[1])]
    half = Mesh(num_devices=2)
    assert groups_of(model, units, half) == [
        UnitShards("0", 2 * (12 + 2), 2 * (12 + 2)),
        UnitShards("1", 2 * 8, 0),
        UnitShards("", 2 * 3, 2 * 3),
    ]
    assert groups_of(model, units, half, reduce_itemsize=4)[0].reduced_bytes == 4 * 14
    assert [group.name for group in groups_of(model, [("all", model)], half)] == ["all"]


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


def exchanging(*found, forward=20.0):
    return replace(job_of((R.COMPUTE_WEIGHTS,), forward=forward, backward=60.0), exchanges=found)


def time_of(job, machine=TWO):
    return predict_step(job, {R.COMPUTE_WEIGHTS: DRAM}, machine)


def test_the_first_gather_and_the_last_reduction_are_waited_for():
    time = time_of(exchanging(exchange("forward", "gather", 80, 0, 0), exchange("backward", "reduce", 160, 0, 100)))
    assert time.forward.seconds == pytest.approx(20 + 4 / 4)
    assert time.backward.seconds == pytest.approx(60 + (8 + 1) / 4)
    assert busy(time.backward) == pytest.approx({"compute": 60, "peer links": 9})


def test_machines_exchange_over_the_network_while_devices_do_over_their_links():
    time = time_of(exchanging(exchange("forward", "gather", 200, 200, 10), forward=1.0))
    assert time.forward.resources["peer links"] == pytest.approx(10)
    assert time.forward.resources["network"] == pytest.approx(50 + 1)
    assert time.forward.seconds == pytest.approx(51 + 1 / 4)
    unknown = replace(TWO, links=replace(LINKS, network_bytes_per_s=None))
    with pytest.raises(ConfigError, match="`two` does not say how fast: give network_bytes_per_s under `links`"):
        time_of(exchanging(exchange("forward", "gather", 200, 200, 10)), unknown)


def test_devices_without_links_exchange_through_host_memory():
    job, machine = exchanging(exchange("forward", "gather", 80, 0, 5), forward=1.0), replace(TWO, links=MachineLinks())
    forward = time_of(job, machine).forward
    # each of two devices sends and receives 80 bytes over its link, and memory is written and read twice
    assert busy(forward) == pytest.approx({"compute": 1, "link h2d": 8, "link d2h": 8, "tier dram0": 3.2})
    assert forward.seconds >= 8
    cpu = replace(machine, device=replace(machine.device, is_host=True))
    assert busy(time_of(job, cpu).forward)["tier dram0"] == pytest.approx(3.2)
