"""Which state lies on the tier `ssd`, the same for every reader of the inventory; what is refused before a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
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
    Workload,
)
from lightning_cxl.machine.speeds import MachineSsd
from lightning_cxl.memory.placement import Placement, Placer, TensorRole, resolve
from lightning_cxl.planning.decide import NO_ROOM, check_fits, memory_bytes_of, settle_state
from tests.fakes import fake_topology

TOPOLOGY = fake_topology(("1GiB",), ("1GiB",)).with_ssd(SsdOptions((Path("/nvme/run"),), 1 << 40))
LARGE = MachineSsd(capacity_bytes=1 << 40)
NVME = {"tiers": {"ssd": {"path": "/nvme/run"}}}
HALF_FROZEN = {"frozen": "up", **NVME}
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
    widths=(64,) * 8, *, rules=None, streams=True, optimizer=AdamW, vocabulary=64, frozen="none", tokens=0,
    micro_batches=1, **options,
):  # fmt: skip
    with torch.device("meta"):
        model = Model(widths, vocabulary).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    config = OffloadConfig(tier_rules=rules or {}, stream_weights=streams, **options)
    asked = AskedTiers(model, resolve(model.named_modules(), config.tier_rules, TOPOLOGY))
    load = Workload(batch=1, sequence=tokens, num_micro_batches=micro_batches)
    optimizers = [optimizer(model.parameters(), lr=1e-3)] if optimizer else []
    return list_tensors(model, optimizers, config, load, asked=asked)


def settled(inventory, memory_bytes=0, ssd=LARGE, on_tier_full="spill"):
    return settle_state(inventory, memory_bytes, ssd, on_tier_full, left_free=0.0)


def on_ssd(inventory, kind="state"):
    """Return the names of the records of a kind."""
    return [record.name for record in inventory.ssd_records if getattr(record, f"is_{kind}")]


def slots_of(inventory):
    return [each.nbytes for each in inventory.tensors if each.owner == SLOTS_OWNER]


def placements(inventory):
    return replace(inventory, placer=Placer(TOPOLOGY, lambda: {"dram": 1, "cxl": 1}))


def units(numbers, what=""):
    return [f"layers.{index}{what}" for index in numbers]


def test_what_fits_in_memory_stays_there():
    inventory = listed()
    assert settled(inventory, memory_bytes_of(inventory)) is inventory
    assert on_ssd(inventory) == slots_of(inventory) == []


@given(
    widths=st.lists(st.sampled_from([16, 32, 64]), min_size=2, max_size=8),
    part=st.floats(0, 1),
    vocabulary=st.sampled_from([4, 64, 2000]),
    streams=st.booleans(),
)
def test_as_many_whole_units_go_as_needed(widths, part, vocabulary, streams):
    def made():
        return listed(tuple(widths), vocabulary=vocabulary, streams=streams)

    before = made()
    least = memory_bytes_of(settled(made()))
    memory = int(least + part * (memory_bytes_of(before) - least))
    after, again = (settled(made(), memory) for _ in range(2))
    assert memory_bytes_of(after) <= memory
    assert on_ssd(after) == on_ssd(again)
    # whole records
    moved = set(on_ssd(after))
    for each in after.tensors:
        if each.in_state:
            assert (each.tier == "ssd") == (after.record_of[id(each.parameter)] in moved)
    # parameters outside of units only when all units are there
    all_units = {*units(range(len(widths)))}
    assert moved <= all_units or moved >= all_units
    # nothing else has changed, and nothing is lost
    rest = [each._replace(tier=None, source="") for each in after.tensors if each.owner != SLOTS_OWNER]
    assert [each[1:] for each in rest] == [each[1:] for each in before.tensors]
    assert sum(slots_of(after)) == expected_slots(after)
    if on_ssd(after, "weights"):  # state goes first
        assert moved >= all_units


def expected_slots(inventory):
    """Three for what one unit updates, of weights and state; two for weights on their way to the device."""
    sizes = {record.name: record.nbytes for record in inventory.ssd_records}
    owners = {name.removesuffix(" weights") for name in sizes}
    updates = max((sizes.get(name, 0) + sizes.get(f"{name} weights", 0) for name in owners), default=0)
    weights = max((sizes[name] for name in on_ssd(inventory, "weights")), default=0)
    return NUM_UPDATE_SLOTS * updates + NUM_WEIGHT_SLOTS * weights


def test_only_state_and_weights_go_and_every_reader_is_told_so():
    inventory = settled(listed())
    assert {each.role for each in inventory.tensors if each.tier == "ssd"} == {*STATE_ROLES, TensorRole.COMPUTE_WEIGHTS}
    decision = placements(inventory)
    for each in inventory.tensors:
        placement = decision.of(each)
        if each.tier == "ssd":
            assert (placement.tiers, placement.reason) == (("ssd",), NO_ROOM)
        else:
            assert "ssd" not in placement.tiers


def test_state_of_another_optimizer_is_refused():
    def momentum(parameters, lr):
        return SGD(parameters, lr=lr, momentum=0.9)

    with pytest.raises(UnsupportedError, match=r"asks for momentum of `embed\.weight` on tier 'ssd'"):
        listed(optimizer=momentum, rules={"": {"optimizer_state": "ssd"}})
    assert on_ssd(settled(listed(optimizer=momentum))) == []  # nothing of it goes by itself


def test_what_is_asked_for_and_does_not_fit_stays_in_memory_or_is_refused():
    rules = {"layers.*": {"optimizer_state": "ssd"}}
    record = listed(rules=rules).ssd_records[0]
    room = MachineSsd(capacity_bytes=5 * record.nbytes + 1)
    with pytest.raises(TierFullError, match=r"tier `ssd` has .* and what goes there needs"):
        settled(listed(rules=rules), 1 << 40, room, "error")
    with pytest.warns(SpillWarning, match=r"state of 3 of 8 records stays in memory"):
        inventory = settled(listed(rules=rules), 1 << 40, room)
    assert on_ssd(inventory) == units(range(5))
    with pytest.warns(SpillWarning, match="6 of 8"):
        inventory = settled(listed(rules=rules), 1 << 40, MachineSsd(capacity_bytes=5 * record.nbytes + 1, versions=2))
    assert on_ssd(inventory) == ["layers.0", "layers.1"]
    last = next(e for e in inventory.tensors if e.in_state and e.unit == "layers.7")
    assert "tier ssd is full" in placements(inventory).of(last).reason


def test_no_more_goes_there_than_the_tier_holds():
    record = next(each for each in settled(listed()).ssd_records if each.name == "layers.0")
    inventory = settled(listed(), ssd=MachineSsd(capacity_bytes=4 * record.nbytes))
    assert sum(each.stored_bytes(MachineSsd(capacity_bytes=0)) for each in inventory.ssd_records) <= 4 * record.nbytes
    assert on_ssd(inventory)


@pytest.mark.parametrize(("options", "why"), [({"streams": False}, "stream"), ({"optimizer": SGD}, "CPUAdam")])
def test_weights_that_do_not_stream_or_that_another_optimizer_writes_stay_with_a_reason(options, why):
    rules = {"": {"weights": "ssd"}}
    inventory = listed(rules=rules, **options)
    assert inventory.ssd_records == ()
    assert on_ssd(settled(listed(**options)), "weights") == []
    for each in inventory.tensors:
        if each.role is TensorRole.COMPUTE_WEIGHTS:
            assert why in placements(inventory).of(each).reason


def test_frozen_weights_have_a_record_of_their_own_which_no_update_visits():
    inventory = listed(rules={"": {"weights": "ssd"}}, **HALF_FROZEN)
    records = {record.name: record for record in inventory.ssd_records}
    assert len(records) == 16
    frozen, trained = records["layers.3 frozen weights"], records["layers.3 weights"]
    assert trained.is_updated and not frozen.is_updated
    largest = max(frozen.nbytes, trained.nbytes)
    assert slots_of(inventory) == [NUM_UPDATE_SLOTS * trained.nbytes + NUM_WEIGHT_SLOTS * largest]


def test_slots_hold_records_that_are_cut_over_several_drives():
    tiers = {"ssd": {"path": [f"/nvme{i}" for i in range(3)]}}
    inventory = listed(rules={"layers.*": {"optimizer_state": "ssd", "weights": "ssd"}}, tiers=tiers)
    weights, *_, state = (each.nbytes_on(3) for each in inventory.ssd_records)
    assert (weights % (3 * 4096), state % (3 * 4096)) == (0, 0)
    (slots,) = slots_of(inventory)
    assert slots == NUM_UPDATE_SLOTS * (weights + state) + NUM_WEIGHT_SLOTS * weights
    assert slots > expected_slots(inventory)
    automatic = settled(listed(tiers=tiers), ssd=MachineSsd(capacity_bytes=1 << 40, num_drives=3))
    assert slots_of(automatic)[0] >= slots


@pytest.mark.parametrize("tokens", [0, 512])
def test_inputs_that_are_asked_for_there_are_listed_also_where_their_size_is_not_known(tokens):
    inventory = listed(rules={"layers.2": {"activations": "ssd"}}, tokens=tokens)
    (record,) = inventory.ssd_records
    assert record.is_inputs and not record.is_updated and record.owner == "layers.2"
    assert slots_of(inventory) == ([NUM_INPUT_SLOTS * record.nbytes] if tokens else [])
    assert (record.nbytes > 0) == (tokens > 0)
    assert record.stored_bytes(MachineSsd(capacity_bytes=0, versions=2)) == record.nbytes  # no generation has them


# -- planned bytes by tier, and what does not fit ---------------------------------------------------------------------

ROLE = TensorRole.MOMENTUM
SPLIT = Placement(("dram", "cxl"), shares=(0.8, 0.2))
SPILLING = Placement(("dram", "cxl", "far"), shares=(0.8, 0.2, 0.0))


@given(st.integers(0, 2**50), st.lists(st.integers(1, 1000), min_size=1, max_size=5))
def test_parts_add_up_to_the_whole_and_follow_the_shares(nbytes, weights) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    sizes = Placement(tuple(f"t{i}" for i in range(len(weights))), shares=shares).split_bytes(nbytes)

    assert sum(sizes.values()) == nbytes
    for size, share in zip(sizes.values(), shares, strict=True):
        assert size >= 0
        assert size == pytest.approx(nbytes * share, abs=2 + 1e-9 * nbytes)


def test_each_tier_needs_room_for_its_fraction_only() -> None:
    for mode in ("error", "spill"):
        check_fits([(ROLE, 100, SPLIT)], {"dram": 80, "cxl": 20}, mode)
    with pytest.raises(TierFullError, match=r"momentum \(100 B of 100 B to place now\) on tier `dram` and `cxl`: free"):
        check_fits([(ROLE, 100, SPLIT)], {"dram": 500, "cxl": 19}, "error")


def test_what_does_not_fit_goes_on_as_it_does_in_host_memory() -> None:
    full = Placement(("dram",))
    check_fits([(ROLE, 100, SPLIT), (ROLE, 10, full)], {"dram": 100, "cxl": 10}, "spill")  # 90 and 10, then 10
    with pytest.raises(TierFullError):
        check_fits([(ROLE, 100, SPLIT), (ROLE, 11, full)], {"dram": 100, "cxl": 10}, "spill")
    check_fits([(ROLE, 100, SPILLING), (ROLE, 99, full)], {"dram": 99, "cxl": 0, "far": 100}, "spill")
    with pytest.raises(TierFullError, match="`dram` and `cxl` or any other"):
        check_fits([(ROLE, 100, SPILLING)], {"dram": 50, "cxl": 40, "far": 99}, "spill")
    with pytest.raises(TierFullError, match="on tier `dram`: free"):
        check_fits([(ROLE, 100, full)], {"dram": 99, "cxl": 500}, "spill")
