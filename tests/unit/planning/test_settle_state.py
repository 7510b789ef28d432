"""Which state lies on the tier `ssd`: the same for every reader of the inventory."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from lightning_cxl.config import OffloadConfig, SsdOptions
from lightning_cxl.errors import SpillWarning, TierFullError, UnsupportedError
from lightning_cxl.inventory.plan import AskedTiers, list_tensors
from lightning_cxl.inventory.tensors import (
    NUM_INPUT_SLOTS,
    NUM_UPDATE_SLOTS,
    NUM_WEIGHT_SLOTS,
    SLOTS_OWNER,
    Mesh,
    Workload,
)
from lightning_cxl.machine.speeds import MachineSsd
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.placement import Placer, TensorRole, resolve
from lightning_cxl.planning.decide import NO_ROOM, memory_bytes_of, settle_state
from lightning_cxl.planning.job import model_job

TOPOLOGY = Topology.fake(("1GiB",), ("1GiB",)).with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
LARGE = MachineSsd(capacity_bytes=1 << 40)
OUTSIDE = {"embed.weight", "head.weight", "head.bias"}
STATE_ROLES = {TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_WEIGHTS}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Model(nn.Module):
    def __init__(self, widths, vocabulary=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, widths[0])
        self.layers = nn.ModuleList([Block(width) for width in widths])
        self.head = nn.Linear(widths[-1], vocabulary)


def listed(
    widths=(64,) * 8,
    *,
    rules=None,
    streams=True,
    optimizer=AdamW,
    dtype=torch.bfloat16,
    vocabulary=64,
    frozen=(),
    tokens=0,
    micro_batches=1,
    devices=1,
    **options,
):
    with torch.device("meta"):
        model = Model(widths, vocabulary).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    config = OffloadConfig(tier_rules=rules or {}, stream_weights=streams, **options)
    asked = AskedTiers(model, resolve(model.named_modules(), config.tier_rules, TOPOLOGY))
    mesh = Mesh(num_devices=devices)
    load = Workload(batch=1, sequence=tokens, num_micro_batches=micro_batches, mesh=mesh)
    optimizers = [optimizer(model.parameters(), lr=1e-3)] if optimizer else []
    return list_tensors(model, optimizers, config, load, asked=asked)


def settled(inventory, memory_bytes, ssd=LARGE, on_tier_full="spill", left_free=0.0):
    return settle_state(inventory, memory_bytes, ssd, on_tier_full, left_free)


def settled_state_alone():
    """Return the inventory with all state on the tier, and all weights asked for in memory."""
    return settled(listed(rules={"": {"weights": "dram"}}), 0)


def on_ssd(inventory):
    """Return the names of the records of state."""
    return [record.name for record in inventory.ssd_records if record.is_state]


def inputs_on_ssd(inventory):
    return [record.name for record in inventory.ssd_records if record.is_inputs]


def weights_on_ssd(inventory):
    return [record.name for record in inventory.ssd_records if record.is_weights]


def placements(inventory):
    return replace(inventory, placer=Placer(TOPOLOGY, lambda: {"dram": 1, "cxl": 1}))


def test_what_fits_in_memory_stays_there():
    inventory = listed()
    assert settled(inventory, memory_bytes_of(inventory)) is inventory
    assert on_ssd(inventory) == []
    assert all(each.owner != SLOTS_OWNER for each in inventory.tensors)


@settings(deadline=None)
@given(
    widths=st.lists(st.sampled_from([16, 32, 64]), min_size=2, max_size=8),
    part=st.floats(0, 1),
    vocabulary=st.sampled_from([4, 64, 2000]),
    streams=st.booleans(),
)
def test_as_many_whole_units_go_as_needed(widths, part, vocabulary, streams):
    before = listed(tuple(widths), vocabulary=vocabulary, streams=streams)
    everything = memory_bytes_of(before)
    least = memory_bytes_of(settled(listed(tuple(widths), vocabulary=vocabulary, streams=streams), 0))
    memory = int(least + part * (everything - least))
    after, again = (settled(listed(tuple(widths), vocabulary=vocabulary, streams=streams), memory) for _ in range(2))
    assert memory_bytes_of(after) <= memory
    assert on_ssd(after) == on_ssd(again)
    # whole records
    moved = set(on_ssd(after))
    for each in after.tensors:
        if each.in_state:
            assert (each.tier == "ssd") == (after.record_of[id(each.parameter)] in moved)
    # parameters outside of units only when all units are there
    assert moved <= {f"layers.{i}" for i in range(len(widths))} or len(moved - OUTSIDE) == len(widths)
    # nothing else has changed, and nothing is lost
    rest = [each._replace(tier=None, source="") for each in after.tensors if each.owner != SLOTS_OWNER]
    assert [each[1:] for each in rest] == [each[1:] for each in before.tensors]
    slots = sum(each.nbytes for each in after.tensors if each.owner == SLOTS_OWNER)
    assert slots == slots_of(after)
    if weights_on_ssd(after):  # state goes first
        assert moved >= {f"layers.{i}" for i in range(len(widths))}


def slots_of(inventory):
    """Three for what one unit updates, of weights and state; two for weights on their way to the device."""
    sizes = {record.name: record.nbytes for record in inventory.ssd_records}
    owners = {name.removesuffix(" weights") for name in sizes}
    updates = max((sizes.get(name, 0) + sizes.get(f"{name} weights", 0) for name in owners), default=0)
    weights = max((sizes[name] for name in weights_on_ssd(inventory)), default=0)
    return NUM_UPDATE_SLOTS * updates + NUM_WEIGHT_SLOTS * weights


def memory_for_five():
    """Return the bytes of memory that hold a model when the state of five of its eight units is on drives."""
    unit = sum(each.nbytes for each in listed().tensors if each.in_state and each.unit == "layers.0")
    with_slots = listed(rules={"layers.0": {"optimizer_state": "ssd"}}).bytes_of(TensorRole.STAGING)
    return memory_bytes_of(listed()) - 5 * unit + with_slots - listed().bytes_of(TensorRole.STAGING)


def test_units_go_evenly_spread_and_parameters_outside_of_units_last():
    assert on_ssd(settled(listed(), memory_for_five())) == [f"layers.{i}" for i in (0, 2, 4, 5, 7)]
    assert len(on_ssd(settled(listed(), memory_for_five() - 1))) == 6
    assert on_ssd(settled(listed(), 0)) == [
        "embed.weight", *(f"layers.{i}" for i in range(8)), "head.weight", "head.bias",
    ]  # fmt: skip


def test_only_state_and_weights_go_and_every_reader_is_told_so():
    inventory = settled(listed(), 0)
    assert {each.role for each in inventory.tensors if each.tier == "ssd"} == {*STATE_ROLES, TensorRole.COMPUTE_WEIGHTS}
    decision = placements(inventory)
    for each in inventory.tensors:
        tiers = decision.of(each).tiers
        assert (tiers == ("ssd",)) == (each.tier == "ssd")
        assert ("ssd" in tiers) == (each.tier == "ssd")
    moved = next(each for each in inventory.tensors if each.tier == "ssd")
    assert decision.of(moved).reason == NO_ROOM


def test_the_marks_survive_parameters_that_are_made_anew():
    inventory = settled(listed(), 0)
    decision, model = placements(inventory), inventory.model
    model.head.weight = nn.Parameter(torch.empty_like(model.head.weight))
    inventory.asked.read(model)
    assert decision.place(model.head.weight, TensorRole.MOMENTUM, 8, in_state=True).tiers == ("ssd",)


def test_copies_of_weights_stay_in_memory_with_a_reason():
    # weights on the device have a copy on the host, and what masters have beyond bfloat16 is state
    inventory = listed(streams=False, rules={"": {"optimizer_state": "ssd"}})
    masters = [each for each in inventory.tensors if each.role is TensorRole.MASTER_WEIGHTS]
    assert {each.tier for each in masters if each.in_state} == {"ssd"}
    assert {each.tier for each in masters if not each.in_state} == {None}
    copy = next(each for each in masters if not each.in_state)
    placement = placements(inventory).of(copy)
    assert placement.tiers[0] == "dram"
    assert "rule '' asks for ssd, and copies of weights stay in memory" in placement.reason


def test_state_of_another_optimizer_is_refused():
    def momentum(parameters, lr):
        return SGD(parameters, lr=lr, momentum=0.9)

    with pytest.raises(
        UnsupportedError, match=r"asks for momentum of `embed\.weight` on tier 'ssd', and its optimizer"
    ):
        listed(optimizer=momentum, rules={"": {"optimizer_state": "ssd"}})
    assert on_ssd(settled(listed(optimizer=momentum), 0)) == []  # nothing of it goes by itself


def test_what_is_asked_for_and_does_not_fit_stays_in_memory_or_is_refused():
    rules = {"layers.*": {"optimizer_state": "ssd"}}
    record = listed(rules=rules).ssd_records[0]
    room = MachineSsd(capacity_bytes=5 * record.nbytes + 1)
    with pytest.raises(TierFullError, match=r"tier `ssd` has .* and what goes there needs"):
        settled(listed(rules=rules), 1 << 40, room, "error")
    with pytest.warns(SpillWarning, match=r"state of 3 of 8 records stays in memory"):
        inventory = settled(listed(rules=rules), 1 << 40, room)
    assert on_ssd(inventory) == [f"layers.{i}" for i in range(5)]
    with pytest.warns(SpillWarning, match="6 of 8"):
        inventory = settled(listed(rules=rules), 1 << 40, MachineSsd(capacity_bytes=5 * record.nbytes + 1, versions=2))
    assert on_ssd(inventory) == ["layers.0", "layers.1"]
    last = next(e for e in inventory.tensors if e.in_state and e.unit == "layers.7")
    assert "tier ssd is full" in placements(inventory).of(last).reason


def test_no_more_goes_there_than_the_tier_holds():
    record = next(each for each in settled(listed(), 0).ssd_records if each.name == "layers.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inventory = settled(listed(), 0, MachineSsd(capacity_bytes=4 * record.nbytes))
    assert sum(each.stored_bytes(MachineSsd(capacity_bytes=0)) for each in inventory.ssd_records) <= 4 * record.nbytes
    assert on_ssd(inventory)


def test_weights_go_when_all_state_is_there_and_memory_is_still_too_small():
    least_with_state = memory_bytes_of(settled_state_alone())
    assert weights_on_ssd(settled(listed(), least_with_state)) == []
    found = weights_on_ssd(settled(listed(), least_with_state - 1))
    assert 0 < len(found) < 8
    assert len(on_ssd(settled(listed(), least_with_state - 1))) == 11
    assert weights_on_ssd(settled(listed(), 0)) == [f"layers.{i} weights" for i in range(8)]


@pytest.mark.parametrize(("options", "why"), [({"streams": False}, "stream"), ({"optimizer": SGD}, "CPUAdam")])
def test_weights_that_do_not_stream_or_that_another_optimizer_writes_stay_with_a_reason(options, why):
    rules = {"": {"weights": "ssd"}}
    inventory = listed(rules=rules, **options)
    assert inventory.ssd_records == ()
    assert weights_on_ssd(settled(listed(**options), 0)) == []
    for each in inventory.tensors:
        if each.role is TensorRole.COMPUTE_WEIGHTS:
            placement = placements(inventory).of(each)
            assert placement.tiers[0] != "ssd"
            assert "asks for ssd, and only weights of units that stream" in placement.reason
            assert why in placement.reason


def test_frozen_weights_have_a_record_of_their_own_which_no_update_visits():
    ssd = {"ssd": {"path": "/nvme/run"}}
    inventory = listed(rules={"": {"weights": "ssd"}}, tiers=ssd, frozen=("up",))
    sizes = {record.name: (record.nbytes, record.is_updated) for record in inventory.ssd_records}
    assert len(sizes) == 16
    frozen, trained = sizes["layers.3 frozen weights"], sizes["layers.3 weights"]
    assert (frozen[1], trained[1]) == (False, True)
    slots = inventory.bytes_of(TensorRole.STAGING) - listed().bytes_of(TensorRole.STAGING)
    assert slots == NUM_UPDATE_SLOTS * trained[0] + NUM_WEIGHT_SLOTS * max(frozen[0], trained[0])


def test_weights_that_nobody_trains_are_only_read():
    inventory = listed(rules={"": {"weights": "ssd"}}, optimizer=None)  # as they are for an evaluation
    assert len(inventory.ssd_records) == 8
    assert inventory.bytes_of(TensorRole.STAGING) == NUM_WEIGHT_SLOTS * inventory.ssd_records[0].nbytes
    job = model_job("it", inventory)
    assert (job.moved_bytes("ssd_write"), job.num_swaps) == (0, 0)
    assert job.moved_bytes("ssd_read") == 2 * job.ssd_bytes()


def test_frozen_weights_go_first():
    ssd = {"ssd": {"path": "/nvme/run"}}
    everything = settled(listed(tiers=ssd, frozen=("up",)), 0)
    assert len(weights_on_ssd(everything)) == 16
    memory = memory_bytes_of(settled(listed(tiers=ssd, frozen=("up",), rules={"": {"weights": "dram"}}), 0))
    for part in (0.0, 0.3, 0.6, 0.9):
        needed = memory - 1 - part * (memory - memory_bytes_of(everything))
        found = weights_on_ssd(settled(listed(tiers=ssd, frozen=("up",)), int(needed)))
        frozen = [name for name in found if "frozen" in name]
        assert found
        assert len(frozen) == min(len(found), 8), "trained weights go when all frozen ones are there"


def test_what_a_step_moves_of_weights_and_of_state():
    rules = {"layers.[0-4]": {"weights": "ssd"}, "layers.[3-7]": {"optimizer_state": "ssd"}}
    inventory = listed(rules=rules, tiers={"ssd": {"path": "/nvme/run"}}, frozen=("layers.0",), micro_batches=3)
    job = model_job("it", inventory)
    on_ssd = [each for each in inventory.tensors if each.tier == "ssd"]
    weights = sum(each.nbytes for each in on_ssd if each.role is TensorRole.COMPUTE_WEIGHTS)
    frozen = next(each.nbytes for each in on_ssd if each.role is TensorRole.COMPUTE_WEIGHTS and not each.is_updated)
    state = sum(each.nbytes for each in on_ssd) - weights
    assert weights == 5 * frozen
    assert job.moved_bytes("ssd_write") == weights - frozen + state
    assert job.moved_bytes("ssd_read") == 2 * 3 * weights + job.moved_bytes("ssd_write")
    assert (job.ssd_bytes(), job.ssd_bytes(2)) == (weights + state, weights + 2 * state)
    assert (job.num_records, job.num_swaps) == (10, 7)  # units 3 and 4 bring weights and state at once


def test_slots_hold_records_that_are_cut_over_several_drives():
    tiers = {"ssd": {"path": [f"/nvme{i}" for i in range(3)]}}
    inventory = listed(rules={"layers.*": {"optimizer_state": "ssd", "weights": "ssd"}}, tiers=tiers)
    weights, *_, state = (each.nbytes_on(3) for each in inventory.ssd_records)
    assert (weights % (3 * 4096), state % (3 * 4096)) == (0, 0)
    slots = next(each.nbytes for each in inventory.tensors if each.owner == SLOTS_OWNER)
    assert slots == NUM_UPDATE_SLOTS * (weights + state) + NUM_WEIGHT_SLOTS * weights
    assert slots > slots_of(inventory)
    free = MachineSsd(capacity_bytes=1 << 40, num_drives=3)
    automatic = settled(listed(tiers=tiers), 0, free)
    assert next(each.nbytes for each in automatic.tensors if each.owner == SLOTS_OWNER) >= slots


def settled_all_but_inputs():
    return settled(listed(rules={"layers.*": {"activations": "dram"}}, tokens=512), 0)


def test_inputs_go_last_those_of_the_first_units_first_and_no_more_than_needed():
    least = memory_bytes_of(settled_all_but_inputs())
    assert len(weights_on_ssd(settled_all_but_inputs())) == 8
    assert inputs_on_ssd(settled(listed(tokens=512), least)) == []
    inputs = listed(tokens=512).bytes_of(TensorRole.ACTIVATIONS) // 8
    (slots,) = {
        record.nbytes * NUM_INPUT_SLOTS for record in settled(listed(tokens=512), 0).ssd_records if record.is_inputs
    }
    for count in range(4, 9):
        memory = least - count * inputs + slots
        after = settled(listed(tokens=512), memory)
        assert memory_bytes_of(after) == memory
        assert inputs_on_ssd(after) == [f"layers.{i} inputs" for i in range(count)]
        assert len(weights_on_ssd(after)) == 8
    for each in after.tensors:
        if each.role is TensorRole.ACTIVATIONS:
            assert placements(after).of(each).tiers == ("ssd",) and placements(after).of(each).reason == NO_ROOM


def test_inputs_that_are_asked_for_elsewhere_or_whose_size_is_not_known_stay():
    rules = {"layers.[0-3]": {"activations": "dram"}}
    assert inputs_on_ssd(settled(listed(rules=rules, tokens=512), 0)) == [f"layers.{i} inputs" for i in range(4, 8)]
    assert inputs_on_ssd(settled(listed(), 0)) == []


@pytest.mark.parametrize("tokens", [0, 512])
def test_inputs_that_are_asked_for_there_are_listed_also_where_their_size_is_not_known(tokens):
    inventory = listed(rules={"layers.2": {"activations": "ssd"}}, tokens=tokens)
    (record,) = inventory.ssd_records
    assert record.is_inputs and not record.is_updated and record.owner == "layers.2"
    slots = [each.nbytes for each in inventory.tensors if each.owner == SLOTS_OWNER]
    assert slots == ([NUM_INPUT_SLOTS * record.nbytes] if tokens else [])
    assert (record.nbytes > 0) == (tokens > 0)
    assert record.stored_bytes(MachineSsd(capacity_bytes=0, versions=2)) == record.nbytes  # no generation has them
