"""Buffers divided over several tiers: shares, budgets, accounts, and what happens when one of the tiers is full."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.errors import SpillWarning, TierFullError
from lightning_cxl.machine.topology import Node, Tier, TierKind, Topology
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.memory.resource import Buffer, NumaResource, PinnedResource, Span, StripedResource
from lightning_cxl.native._numa import Mapping, page_nodes

MIB = 2**20
STRIPE = 2 * MIB
ROLE = TensorRole.MOMENTUM
SPLIT = Placement(("dram", "cxl"), shares=(0.75, 0.25))
SPILLING = Placement(("dram", "cxl", "far"), shares=(0.75, 0.25, 0.0))
THREE = Placement(("dram", "cxl", "far"), shares=(0.5, 0.3, 0.2))


class Fake(NumaResource):
    """A leaf that pretends to be node `label` and really uses node 0; `broken` makes it fail when it backs memory."""

    def __init__(self, tier: str, label: int, free: int, inherit: bool) -> None:
        super().__init__(
            tier, 0, Topology.fake(dram=("1GiB",), cxl=()), inherit=inherit, free_bytes=lambda: free, where=None
        )
        self.label = label
        self.broken = False

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        spans = super().back(mapping, parts)
        if self.broken:
            raise TierFullError(f"node {self.label} is full")
        return tuple(Span(span.tier, self.label, span.offset, span.nbytes) for span in spans)


class Machine:
    """DRAM on node 0, two cards on nodes 1 and 2, far memory on node 3; one real node plays them all."""

    def __init__(self, free: int = 10**10) -> None:
        self.free = free
        self.leaves: list[Fake] = []
        nodes = [Node(index, index == 0, 2**30, 10) for index in range(4)]
        self.topology = Topology(
            (
                Tier("dram", TierKind.DRAM, (nodes[0],)),
                Tier("cxl", TierKind.CXL, tuple(nodes[1:3])),
                Tier("far", TierKind.CXL, (nodes[3],)),
            )
        )

    def leaf(self, tier: Tier, inherit: bool) -> Fake | StripedResource:
        leaves = [Fake(tier.name, node, self.free, inherit) for node in tier.node_ids]
        self.leaves += leaves
        return leaves[0] if len(leaves) == 1 else StripedResource([(leaf, 1.0) for leaf in leaves])

    def memory(self, **options) -> HostMemory:
        options = {"budgets": {"dram": 192 * MIB, "cxl": 64 * MIB, "far": 64 * MIB}, **options}
        return HostMemory(self.topology, leaf=self.leaf, **options)


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def memory(machine: Machine) -> Iterator[HostMemory]:
    memory = machine.memory()
    yield memory
    memory.close()


def by_tier(buffers: Iterable[Buffer]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for buffer in buffers:
        assert sum(span.nbytes for span in buffer.spans) == buffer.nbytes
        for span in buffer.spans:
            counts[span.tier] += span.nbytes
    return dict(counts)


def used(memory: HostMemory, key: str = "used_bytes") -> dict[str, int]:
    return {name: tier[key] for name, tier in memory.stats()["tiers"].items() if tier[key]}


# ---- shares and accounts ----


@pytest.mark.parametrize("role", [ROLE, TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS])
def test_a_buffer_is_divided_by_its_shares_in_stripes(memory, role) -> None:
    buffer = memory.allocate(64 * MIB, SPLIT, role)

    assert by_tier([buffer]) == {"dram": 48 * MIB, "cxl": 16 * MIB}
    nodes = Counter[int]()
    for span in buffer.spans:
        nodes[span.node_id] += span.nbytes
    assert nodes == {0: 48 * MIB, 1: 8 * MIB, 2: 8 * MIB}
    assert max(span.nbytes for span in buffer.spans if span.tier == "cxl") == STRIPE
    assert page_nodes(buffer.address, buffer.nbytes) == {0: 64 * MIB}
    assert memory.stats()["roles"][role.value] == {"dram": 48 * MIB, "cxl": 16 * MIB}
    assert used(memory) == used(memory, "peak_bytes") == by_tier([buffer])


def test_three_tiers_and_pinned_memory(machine) -> None:
    pinner = lambda upstream: PinnedResource(  # noqa: E731
        upstream, register=lambda address, nbytes: None, unregister=lambda address: None, where=None
    )
    memory = machine.memory(pin=True, pinner=pinner)
    placement = Placement(THREE.tiers, shares=THREE.shares, pinned=True)
    buffer = memory.allocate(40 * MIB, placement, ROLE)

    assert by_tier([buffer]) == {"dram": 20 * MIB, "cxl": 12 * MIB, "far": 8 * MIB}
    assert used(memory, "held_bytes") == by_tier([buffer])
    del buffer
    memory.trim()
    assert used(memory, "held_bytes") == {}
    assert used(memory, "peak_bytes") == {"dram": 20 * MIB, "cxl": 12 * MIB, "far": 8 * MIB}


@pytest.mark.parametrize("nbytes", [5000, 300_000, 5 * MIB])
def test_small_requests_add_up_to_the_shares(memory, nbytes) -> None:
    buffers = [memory.allocate(nbytes, SPLIT, ROLE) for _ in range(120 * MIB // nbytes)]

    counts = by_tier(buffers)
    assert counts["cxl"] == pytest.approx(30 * MIB, abs=2 * STRIPE + nbytes)
    assert used(memory) == counts


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 4097, 100_000, STRIPE, 5 * MIB + 1, 17 * MIB]),
            st.sampled_from([SPLIT, THREE, SPILLING, Placement(("cxl", "far")), Placement(("dram",))]),
            st.sampled_from([ROLE, TensorRole.ACTIVATIONS, TensorRole.STAGING]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_accounts_are_exact_after_any_allocations_and_frees(requests) -> None:
    memory = Machine().memory(budgets={"dram": 48 * MIB, "cxl": 20 * MIB, "far": 12 * MIB})
    living: list[Buffer] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpillWarning)
        for nbytes, placement, role, free_one in requests:
            if free_one and living:
                living.pop(nbytes % len(living))
            try:
                living.append(memory.allocate(nbytes, placement, role))
            except TierFullError:
                living.clear()
            assert used(memory) == by_tier(living)
            for tier in memory.stats()["tiers"].values():
                assert tier["used_bytes"] <= tier["held_bytes"] <= tier["budget_bytes"]
    memory.trim()
    living.clear()
    memory.trim()
    assert used(memory, "held_bytes") == used(memory) == {}
    assert memory.free_bytes() == {"dram": 48 * MIB, "cxl": 20 * MIB, "far": 12 * MIB}


# ---- a tier that is full ----


def test_the_others_take_the_share_of_a_tier_without_room(memory) -> None:
    blocked = memory.allocate(60 * MIB, Placement(("cxl",)), TensorRole.STAGING)
    with pytest.warns(SpillWarning) as caught:
        buffer = memory.allocate(64 * MIB, SPLIT, ROLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = memory.allocate(64 * MIB, SPLIT, ROLE)

    assert by_tier([buffer, more]) == {"dram": 128 * MIB}
    (warning,) = caught
    assert "momentum (64.0 MiB) went to dram 100 % instead of dram 75 %, cxl 25 %" in str(warning.message)
    assert "`cxl` has 4.0 MiB of 64.0 MiB free" in str(warning.message)
    del buffer, more, blocked
    memory.trim()
    assert used(memory, "held_bytes") == {}


def test_a_node_that_turns_out_to_be_full_is_like_a_budget(machine, memory) -> None:
    memory.allocate(8 * MIB, SPLIT, ROLE)
    memory.trim()
    for leaf in machine.leaves:
        leaf.broken = leaf.tier_name == "cxl"
    with pytest.warns(SpillWarning, match="went to dram 100 % instead of dram 75 %, cxl 25 %: `cxl` has"):
        buffer = memory.allocate(16 * MIB, SPLIT, ROLE)

    assert by_tier([buffer]) == used(memory, "held_bytes") == {"dram": 16 * MIB}


def test_one_full_card_leaves_its_part_to_the_other_card(machine, memory) -> None:
    for leaf in machine.leaves:
        leaf.broken = leaf.label == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = memory.allocate(64 * MIB, SPLIT, ROLE)

    assert {span.node_id for span in buffer.spans} == {0, 2}
    assert by_tier([buffer]) == {"dram": 48 * MIB, "cxl": 16 * MIB}


def test_a_split_without_room_goes_on_to_the_spill_tiers(memory) -> None:
    blocked = [memory.allocate(nbytes * MIB, Placement((name,)), TensorRole.STAGING) for name, nbytes in FULL.items()]
    with pytest.warns(SpillWarning, match="went to far 100 % instead of dram 75 %, cxl 25 %: `dram` has .*, `cxl` has"):
        buffer = memory.allocate(20 * MIB, SPILLING, ROLE)

    assert by_tier([buffer]) == {"far": 20 * MIB}
    with pytest.raises(TierFullError, match=r"on tier `dram`: 2\.0 MiB .* `cxl`: 2\.0 MiB .* `far`: 44\.0 MiB"):
        memory.allocate(60 * MIB, SPILLING, ROLE)
    assert used(memory, "held_bytes") == used(memory) == by_tier([*blocked, buffer])


FULL = {"dram": 190, "cxl": 62}


def test_error_instead_of_spilling_leaves_everything_as_it_was(machine) -> None:
    memory = machine.memory(on_tier_full="error")
    blocked = memory.allocate(56 * MIB, Placement(("cxl",)), TensorRole.STAGING)
    assert by_tier([memory.allocate(32 * MIB, SPLIT, ROLE)]) == {"dram": 24 * MIB, "cxl": 8 * MIB}
    with pytest.raises(TierFullError, match=r"on tier `dram`: .* nor on tier `cxl`: 8\.0 MiB of 64\.0 MiB free"):
        memory.allocate(64 * MIB, SPILLING, ROLE)

    assert used(memory) == used(memory, "held_bytes") == by_tier([blocked])
    assert memory.free_bytes() == {"dram": 192 * MIB, "cxl": 8 * MIB, "far": 64 * MIB}


# ---- questions about addresses ----


def test_every_byte_answers_with_its_own_tier(memory, machine) -> None:
    buffer = memory.allocate(16 * MIB, SPLIT, ROLE)
    for span in buffer.spans:
        for offset in (span.offset, span.offset + span.nbytes - 1):
            assert memory.tier_at(buffer.address + offset).name == span.tier
    assert memory.tier_at(buffer.address - 1) is None
    begin = buffer.spans[0].nbytes - 10
    ranges = [(tier and tier.name, size) for tier, size in memory.tiers_of(buffer.address + begin, 20 * MIB)]
    assert ranges[:2] == [("dram", 10), ("cxl", STRIPE)]
    assert ranges[-1] == (None, 20 * MIB - (buffer.nbytes - begin))
    assert sum(size for _, size in ranges) == 20 * MIB


def test_tiers_on_the_same_node_do_not_count_its_free_memory_twice() -> None:
    topology = Topology.fake(dram=("1GiB",), cxl=())
    leaf = lambda tier, inherit: NumaResource(  # noqa: E731
        tier.name, 0, topology, inherit=inherit, free_bytes=lambda: 40 * MIB
    )
    memory = HostMemory(topology, leaf=leaf)
    with pytest.raises(TierFullError):
        memory.allocate(48 * MIB, SPLIT, ROLE)

    assert by_tier([memory.allocate(32 * MIB, SPLIT, ROLE)]) == {"dram": 24 * MIB, "cxl": 8 * MIB}


def test_is_placed_compares_what_was_wanted(memory) -> None:
    alone, split = (memory.tensor((4 * MIB,), torch.float32, p, ROLE) for p in (Placement(("cxl",)), SPLIT))

    assert memory.is_placed(split.data_ptr(), SPLIT)
    assert memory.is_placed(split[1000:].data_ptr(), Placement(("cxl", "dram", "far"), shares=(0.25, 0.75, 0)))
    for other in (Placement(("dram",)), Placement(("cxl",)), Placement(SPLIT.tiers, shares=(0.5, 0.5)), THREE):
        assert not memory.is_placed(split.data_ptr(), other)
    assert memory.is_placed(alone.data_ptr(), Placement(("cxl", "dram")))
    assert not memory.is_placed(alone.data_ptr(), SPLIT)
    assert not memory.is_placed(torch.ones(3).data_ptr(), SPLIT)
