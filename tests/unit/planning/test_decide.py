import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW

from lightning_cxl.config import OffloadConfig, SsdOptions
from lightning_cxl.errors import ConfigError, SpillWarning, TierFullError, UnsupportedError
from lightning_cxl.inventory.plan import AskedTiers, list_tensors
from lightning_cxl.inventory.tensors import NUM_INPUT_SLOTS, NUM_UPDATE_SLOTS, NUM_WEIGHT_SLOTS, SLOTS_OWNER, Workload
from lightning_cxl.machine.speeds import Device, Machine, MachineLinks, MachineSsd, MachineTier
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import Placement, Placer, TensorRole, resolve
from lightning_cxl.planning.decide import NO_ROOM, check_fits, memory_bytes_of, settle_state
from lightning_cxl.planning.job import Exchange, Job, MemoryClass, Move, StepModel, predict_step
from lightning_cxl.planning.policies import POLICIES, check_policy, fits, fits_device, get_policy, with_working_memory
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
    return [record.name for record in inventory.ssd_records if getattr(record, f"is_{kind}")]


def slots_of(inventory):
    return [each.nbytes for each in inventory.tensors if each.owner == SLOTS_OWNER]


def placements(inventory):
    return replace(inventory, placer=Placer(TOPOLOGY, lambda: {"dram": 1, "cxl": 1}))


def units(numbers, what=""):
    return [f"layers.{index}{what}" for index in numbers]


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
    assert settled(before, memory_bytes_of(before)) is before and on_ssd(before) == slots_of(before) == []
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


def test_only_state_and_weights_go_every_reader_is_told_so_and_state_of_others_is_refused():
    inventory = settled(listed())
    assert {each.role for each in inventory.tensors if each.tier == "ssd"} == {*STATE_ROLES, TensorRole.COMPUTE_WEIGHTS}
    decision = placements(inventory)
    for each in inventory.tensors:
        placement = decision.of(each)
        if each.tier == "ssd":
            assert (placement.tiers, placement.reason) == (("ssd",), NO_ROOM)
        else:
            assert "ssd" not in placement.tiers

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
    # what goes by itself is no more than the tier holds
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


def test_each_tier_needs_room_for_its_fraction_only_and_what_does_not_fit_goes_on_as_it_does_in_host_memory() -> None:
    for mode in ("error", "spill"):
        check_fits([(ROLE, 100, SPLIT)], {"dram": 80, "cxl": 20}, mode)
    with pytest.raises(TierFullError, match=r"momentum \(100 B of 100 B to place now\) on tier `dram` and `cxl`: free"):
        check_fits([(ROLE, 100, SPLIT)], {"dram": 500, "cxl": 19}, "error")
    full = Placement(("dram",))
    check_fits([(ROLE, 100, SPLIT), (ROLE, 10, full)], {"dram": 100, "cxl": 10}, "spill")  # 90 and 10, then 10
    with pytest.raises(TierFullError):
        check_fits([(ROLE, 100, SPLIT), (ROLE, 11, full)], {"dram": 100, "cxl": 10}, "spill")
    check_fits([(ROLE, 100, SPILLING), (ROLE, 99, full)], {"dram": 99, "cxl": 0, "far": 100}, "spill")
    with pytest.raises(TierFullError, match="`dram` and `cxl` or any other"):
        check_fits([(ROLE, 100, SPILLING)], {"dram": 50, "cxl": 40, "far": 99}, "spill")
    with pytest.raises(TierFullError, match="on tier `dram`: free"):
        check_fits([(ROLE, 100, full)], {"dram": 99, "cxl": 500}, "spill")


GIB = 2**30
R = TensorRole


def tier(name, kind, adam, read, write, capacity=0):
    speeds = {"adam_bytes_per_s": adam, "device_read_bytes_per_s": read, "device_write_bytes_per_s": write}
    return MachineTier(name=name, kind=kind, capacity_bytes=capacity, **speeds)


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


@settings(max_examples=40)
@given(cases())
def test_what_fits_is_placed_and_bandwidth_is_never_slower_than_another_policy(case):
    """A job is refused by the policies that use all memory only if its bytes exceed it, or what is fixed overflows."""
    job, host = case
    decided = {name: decide(name, job, host) for name in ("dram_only", "interleave", "latency_first", "bandwidth")}
    fixed = bytes_by_tier(replace(job, classes=tuple(c for c in job.classes if c.tier)), {})
    overflows = any(held > host.tier(tier).capacity_bytes for tier, held in fixed.items())
    total = sum(each.nbytes for each in job.classes)
    too_much = total > sum(tier.capacity_bytes for tier in host.tiers)
    for name in ("interleave", "bandwidth"):
        assert (decided[name] is None) == (overflows or too_much)
    ours = decided.pop("bandwidth")
    for name, other in decided.items():
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


def test_what_is_no_policy():
    for name, message in (
        ("bandwith", "there is no policy 'bandwith'; choose one of 'dram_only'"),
        (f"{__name__}.Missing", "cannot be imported"),
        (f"{__name__}.momentum", "is no class, or has no method `decide`"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_policy(name)


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


def job_with(*classes, **values):
    made = tuple(MemoryClass(role=role, nbytes=10**15, moves=moves) for role, *moves in classes)
    values = {f"{name}_flops" if name in ("forward", "backward") else name: value for name, value in values.items()}
    return Job(**{"name": "job", "classes": made, "num_units": 4, **values})


def job_on_ssd(*classes, records=5, **values):
    """Return a job that has momentum on the tier ssd: 400 bytes for the CPUs, 200 from and to the drives."""
    moves = (Move("update", "cpu", 400), Move("update", "ssd_read", 200), Move("update", "ssd_write", 200))
    job = job_with(*classes, **values)
    momentum = MemoryClass(role=R.MOMENTUM, nbytes=200, tier="ssd", moves=moves)
    return replace(job, classes=(*job.classes, momentum), num_records=records, num_swaps=records)


def exchanging(*found, forward=1.0):
    """Return a job of several ranks that exchange: phase, kind, bytes between devices and machines, steps of rings."""
    made = tuple(Exchange("of a test", phase, kind, 0.0, *rest) for phase, kind, *rest in found)
    return job_with(EXCHANGED, forward=forward, backward=60.0, exchanges=made)


def with_drives(read, write):
    return replace(MACHINE, ssd=MachineSsd(capacity_bytes=0, read_bytes_per_s=read, write_bytes_per_s=write))


def on(device, machine=MACHINE, **values):
    return replace(machine, device=replace(machine.device, **device), **values)


def busy(phase):
    return {name: seconds for name, seconds in phase.resources.items() if seconds}


LINKS = MachineLinks(peer_bytes_per_s=20, network_bytes_per_s=4, peer_latency_s=0.01, network_latency_s=0.1)
TWO = replace(on({"count": 2}), name="two", links=LINKS)
THROUGH_HOST = exchanging(("forward", "gather", 80, 0, 5))
HIDDEN = (10 + 4 + 20) / 5 + 4 / 5 * 20

# jobs, their split (of all roles, or by role), machines; seconds of phases, and "hidden"; resources of phases
STEPS = {
    # links take 8 s to the device and 4 s from it; the update has nothing to do
    "a phase that computes waits for the first fetch and the last write": (
        job_with(WEIGHTS, GRADS, forward=20, backward=60), DRAM, MACHINE,
        {"forward": 20 + 8 / 4, "backward": 60 + 8 / 4 + 4 / 4, "update": 0, "hidden": 0},
        {"backward": {"compute": 60, "link h2d": 8, "link d2h": 4, "tier dram0": 1.2}, "update": {}},
    ),
    "a copy takes as long as the slowest tier": (
        job_with(GRADS), CARD, MACHINE, {"backward": 40 / 8}, {"backward": {"link d2h": 4, "tier cxl0": 5}},
    ),
    "the update is done on all tiers at once": (
        job_with(MOMENTUM, (R.VARIANCE, Move("update", "cpu", 100))),
        {R.MOMENTUM: {"dram0": 0.9, "cxl0": 0.1}, R.VARIANCE: DRAM}, MACHINE,
        {"forward": 0, "backward": 0, "update": 4.6}, {"update": {"tier dram0": 4.6, "tier cxl0": 2}},
    ),
    # 400 / 100 = 4 s of update, of which 3 s fit beside 20 s of compute
    **{
        f"an update hides behind what it overlaps but for one unit: {overlap}": (
            job_with(WEIGHTS, GRADS, MOMENTUM, forward=20, backward=20, overlap=overlap), DRAM, MACHINE,
            {"forward": 22, "backward": 23, "update": 1, "hidden": 3}, {"update": {"tier dram0": 4}},
        )
        for overlap in ("backward", "forward", "both")
    },
    "without a device the CPUs read and write what would be copied": (
        job_with(WEIGHTS, GRADS, MOMENTUM, forward=2, backward=10, overlap="backward"),
        {R.COMPUTE_WEIGHTS: CARD, R.COMPUTE_GRADS: CARD, R.MOMENTUM: DRAM}, on({"is_host": True}),
        {"forward": 80 / 20, "backward": 10, "update": 1}, {"forward": {"compute": 2, "tier cxl0": 4}},
    ),
    "what a rule places lies there, and the rest where the policy says": (
        Job(name="job", classes=(FIXED, replace(FIXED, tier=None))), DRAM, MACHINE, {},
        {"update": {"tier dram0": 4, "tier cxl0": 20}},
    ),
    # 10 s of reads, 4 s of updates in the nearest memory, 20 s of writes, over 5 records
    "records are read, updated and written in a pipeline": (
        job_on_ssd(), {}, with_drives(20, 10), {"update": HIDDEN},
        {"update": {"tier dram0": 4, "ssd read": 10, "ssd write": 20}},
    ),
    **{
        f"reads and writes of drives hide behind: {overlap}": (
            job_on_ssd(forward=40, backward=40, overlap=overlap), {}, with_drives(20, 10),
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
    if "network" in resources.get("forward", {}):
        unknown = replace(machine, links=replace(machine.links, network_bytes_per_s=None))
        with pytest.raises(ConfigError, match="`two` does not say how fast: give network_bytes_per_s under `links`"):
            StepModel(job, unknown)


@given(cases(), st.sampled_from([0.0, 1e-5]), st.integers(1, 4), st.booleans(), st.sampled_from([1, 6.2, math.inf]))
def test_no_phase_is_faster_than_any_of_its_resources_and_overlap_never_takes_longer(
    case, latency, count, is_host, contention
):
    job, host = case
    device = replace(host.device, copy_latency_s=latency, count=count, is_host=is_host)
    machine = replace(host, device=device, write_contention=contention)
    parts = list(range(1, 1 + len(machine.names)))
    splits = {role: dict(zip(machine.names, parts, strict=True)) for role in job.free_classes()}
    splits = {role: {name: part / sum(parts) for name, part in split.items()} for role, split in splits.items()}
    model = StepModel(job, machine)
    time = model.explain(splits)
    for phase in (time.forward, time.backward):
        assert phase.seconds >= max(phase.resources.values()) * (1 - 1e-9)
    assert time.seconds >= max(time.update.resources.values()) * (1 - 1e-9)
    assert model.seconds(splits) == pytest.approx(time.seconds)
    alone = predict_step(replace(job, overlap="none"), splits, machine)
    assert time.serial_seconds == pytest.approx(alone.seconds)
    assert time.seconds <= alone.seconds * (1 + 1e-9)
