import signal
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import LightningCXLError, SpillWarning, TierFullError, UnsupportedError
from lightning_cxl.machine.topology import Node, Tier, TierKind, Topology
from lightning_cxl.memory import host_memory as ordinary
from lightning_cxl.memory.host_memory import HostMemory, anonymous_bytes, residency
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.memory.resource import Buffer, StripedResource
from lightning_cxl.native._numa import page_nodes
from tests.fakes import fake_topology
from tests.unit.memory.host import MIB, Host, Leaf, ends_in_child, used

CXL_FIRST = Placement(("cxl", "dram"))
DRAM = Placement(("dram",))
ROLE = TensorRole.MOMENTUM


@pytest.fixture
def topology():
    return Topology.detect()


@pytest.fixture
def memory(topology):
    memory = HostMemory(topology, budgets={"cxl": 32 * MIB, "dram": 64 * MIB})
    yield memory
    memory.close()


def test_accounts_go_up_and_down_and_remember_the_peak_until_a_run_begins(memory):
    a = memory.allocate(5 * MIB, CXL_FIRST, TensorRole.VARIANCE)
    b = memory.allocate(1000, DRAM, TensorRole.VARIANCE)
    before = memory.stats()
    assert before["roles"] == {"variance": {"cxl": 5 * MIB, "dram": 1000}}
    cxl = before["tiers"]["cxl"]
    assert (cxl["used_bytes"], cxl["budget_bytes"]) == (5 * MIB, 32 * MIB) and 5 * MIB <= cxl["held_bytes"] <= 32 * MIB
    del a
    memory.trim()
    after = memory.stats()
    assert (after["roles"], after["peak_roles"]) == ({"variance": {"cxl": 0, "dram": 1000}}, before["roles"])
    assert [after["tiers"]["cxl"][key] for key in ("used_bytes", "peak_bytes", "held_bytes")] == [0, 5 * MIB, 0]
    memory.begin()
    begun = memory.stats()
    assert begun["peak_roles"] == begun["roles"] == after["roles"]
    assert begun["tiers"]["cxl"]["peak_bytes"] == 5 * MIB
    del b


def test_one_budget_counts_all_pools_and_what_one_keeps_unused_serves_another(memory):
    cxl = Placement(("cxl",))
    memory.allocate(30 * MIB, cxl, TensorRole.MOMENTUM)
    kept = memory.allocate(30 * MIB, cxl, TensorRole.COMPUTE_WEIGHTS)
    with pytest.raises(TierFullError):
        memory.allocate(9 * MIB, cxl, TensorRole.MOMENTUM)
    assert used(memory, "held_bytes")["cxl"] <= 32 * MIB
    del kept
    assert memory.allocate(30 * MIB, cxl, TensorRole.MOMENTUM).nbytes == 30 * MIB


def test_spilling_warns_once_per_role_and_tier(memory):
    text = r"momentum \(20\.0 MiB\) went to tier `dram`: `cxl` has 2\.0 MiB of 32\.0 MiB"
    full = memory.allocate(30 * MIB, CXL_FIRST, ROLE)
    with pytest.warns(SpillWarning, match=text):
        spilled = memory.allocate(20 * MIB, CXL_FIRST, ROLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = memory.allocate(10 * MIB, CXL_FIRST, ROLE)
    with pytest.warns(SpillWarning, match="activations"):
        memory.allocate(10 * MIB, CXL_FIRST, TensorRole.ACTIVATIONS)
    assert {span.tier for span in (*spilled.spans, *more.spans)} == {"dram"}
    assert memory.stats()["roles"]["momentum"] == {"cxl": full.nbytes, "dram": 30 * MIB}
    del full, spilled, more
    assert memory.stats()["roles"]["momentum"] == {"cxl": 0, "dram": 0}, "no warning keeps a buffer"


def test_close_refuses_more_and_living_tensors_stay_valid_until_they_die(topology):
    memory = HostMemory(topology)
    tensors = [memory.tensor((MIB,), torch.float32, DRAM, role).fill_(2.0) for role in (ROLE, TensorRole.ACTIVATIONS)]
    memory.close()
    memory.close()
    with pytest.raises(LightningCXLError, match="closed"):
        memory.allocate(1, DRAM, ROLE)
    assert used(memory, "held_bytes") == {"dram": 8 * MIB}
    assert all((tensor == 2.0).all() for tensor in tensors)
    del tensors
    assert used(memory, "held_bytes") == used(memory) == {}


def test_what_is_not_reused_leaves_the_budget_when_it_dies(topology):
    memory = HostMemory(topology, reuse_below=MIB)
    buffer = memory.allocate(MIB, DRAM, ROLE)
    assert used(memory, "held_bytes") == {"dram": MIB}
    del buffer
    assert used(memory, "held_bytes") == {}
    memory.allocate(MIB - 1, DRAM, ROLE)
    assert used(memory, "held_bytes") == {"dram": 16 * MIB}, "small ones are cut from a slab that is kept"


def test_pinned_memory_stays_with_the_driver_when_its_buffer_dies():
    """A copy that does not block may still read it."""
    host, off = Host(reuse_below=MIB, budgets={}), Host(pin=False)
    placement = Placement(("dram",), pinned=True)
    host.memory.allocate(20 * MIB, DRAM, TensorRole.COMPUTE_GRADS)
    off.memory.allocate(20 * MIB, placement, TensorRole.COMPUTE_GRADS)
    assert host.pinned == off.pinned == {}, "only pinned placements are pinned, and only where pinning is on"
    address = host.memory.allocate(20 * MIB, placement, TensorRole.COMPUTE_GRADS).address
    assert host.pinned == {address: 20 * MIB}
    again = host.memory.allocate(20 * MIB, placement, TensorRole.STAGING)
    assert again.address == address and host.pinned == {address: 20 * MIB}
    del again
    host.memory.trim()
    assert host.pinned == {}


def test_a_forked_child_sees_weights_and_nothing_else_and_has_memory_of_its_own(memory):
    """What user code may hand to a DataLoader worker is inherited; what only the parent writes would cost twice."""

    def made(role):
        return memory.tensor((1024,), torch.float32, DRAM, role).fill_(3.0)

    def allocates_in_child():
        return all(made(role).sum().item() == 3 * 1024 for role in (ROLE, TensorRole.ACTIVATIONS))

    weights, momentum = made(TensorRole.COMPUTE_WEIGHTS), made(ROLE)
    assert ends_in_child(lambda: weights[5].item() == 3.0) == 0
    assert ends_in_child(lambda: momentum[5].item() == 3.0) == -signal.SIGSEGV
    assert ends_in_child(allocates_in_child) == 0
    assert weights.sum().item() == momentum.sum().item() == 3 * 1024


def test_no_memory_is_had_from_the_tier_ssd(topology):
    memory = HostMemory(topology.with_ssd(SsdOptions((Path("/nvme/run"),), MIB)), budgets={"dram": MIB})
    assert set(memory.free_bytes()) == set(memory.stats()["tiers"]) == set(topology.names)
    for tiers in (("ssd",), ("dram", "ssd")):
        with pytest.raises(UnsupportedError, match="momentum on tier 'ssd': it is made of files"):
            memory.tensor((8,), torch.float32, Placement(tiers), ROLE)


def test_a_budget_wins_over_the_part_of_a_shared_machine_and_that_over_the_capacity():
    def budgets(topology, **options):
        return {name: tier["budget_bytes"] for name, tier in HostMemory(topology, **options).stats()["tiers"].items()}

    topology = fake_topology(dram=("8GiB",), cxl=("4GiB",))
    given = budgets(topology, budgets={"dram": MIB}, room={"dram": 2 * MIB, "cxl": 3 * MIB})
    assert given == {"dram": MIB, "cxl": 3 * MIB} and budgets(topology)["cxl"] == 4 * 2**30
    without_card = fake_topology(dram=("8GiB",), cxl=())
    with pytest.warns(match="backed by DRAM"):
        without_card.tier("cxl")
    assert budgets(without_card, room={"dram": 2 * MIB})["cxl"] == 2 * MIB, "limited as DRAM, which it is"
    assert budgets(without_card, budgets={"dram": MIB})["cxl"] == 8 * 2**30, "is for bytes under its name"


def test_residency_tells_tiers_apart_by_the_nodes_the_kernel_names():
    fake, tensor = fake_topology(dram=("1GiB",), cxl=("1GiB", "1GiB")), torch.ones(10_000)
    nodes = {(tensor.data_ptr(), 40_000): {0: 10_000, 1: 15_000, 2: 5_000, 7: 4_000, -1: 6_000}}
    found = residency(tensor, fake, where=lambda *part: nodes[part])
    assert found == {"dram": 10_000, "cxl": 20_000, "node 7": 4_000, "unbacked": 6_000}


def test_touched_memory_counts_once_and_untouched_and_mapped_files_do_not(tmp_path, monkeypatch):
    touched, untouched, path = torch.ones(4 * MIB), torch.empty(64 * MIB), tmp_path / "weights"
    found = anonymous_bytes([touched, touched[1:], touched.view(2, -1), untouched, torch.ones(3, device="meta")], 0)
    assert abs(sum(found.values()) - 16 * MIB) <= 2 * MIB
    touched.numpy().tofile(path)
    mapped = torch.from_file(str(path), size=4 * MIB, dtype=torch.float32)
    assert mapped.sum() == 4 * MIB
    assert anonymous_bytes([mapped], 0) == {}
    monkeypatch.setattr(ordinary, "page_nodes", Mock(side_effect=PermissionError))
    assert anonymous_bytes([torch.empty(1024)], 3) == {3: 4096}


SPLIT = Placement(("dram", "cxl"), shares=(0.75, 0.25))
SPILLING = Placement(("dram", "cxl", "far"), shares=(0.75, 0.25, 0.0))
THREE = Placement(("dram", "cxl", "far"), shares=(0.5, 0.3, 0.2))


class Machine:
    """DRAM on node 0, two cards on nodes 1 and 2, far memory on node 3; one real node plays them all."""

    def __init__(self):
        self.leaves: list[Leaf] = []
        dram, *cards, far = (Node(index, index == 0, 2**30, 10) for index in range(4))
        card = Tier("cxl", TierKind.CXL, tuple(cards))
        self.topology = Topology((Tier("dram", TierKind.DRAM, (dram,)), card, Tier("far", TierKind.CXL, (far,))))

    def leaf(self, tier, inherit):
        leaves = [Leaf(tier.name, node, free=10**10, inherit=inherit) for node in tier.node_ids]
        self.leaves += leaves
        return leaves[0] if len(leaves) == 1 else StripedResource([(leaf, 1.0) for leaf in leaves])

    def memory(self, **options):
        options = {"budgets": {"dram": 192 * MIB, "cxl": 64 * MIB, "far": 64 * MIB}, **options}
        return HostMemory(self.topology, leaf=self.leaf, **options)


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def tiers(machine):
    memory = machine.memory()
    yield memory
    memory.close()


def by_tier(buffers):
    counts: Counter[str] = Counter()
    for buffer in buffers:
        assert sum(span.nbytes for span in buffer.spans) == buffer.nbytes
        for span in buffer.spans:
            counts[span.tier] += span.nbytes
    return dict(counts)


@pytest.mark.parametrize("role", [ROLE, TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS])
def test_a_buffer_is_divided_by_its_shares_in_stripes(tiers, role):
    buffer = tiers.allocate(64 * MIB, SPLIT, role)
    nodes = Counter[int]()
    for span in buffer.spans:
        nodes[span.node_id] += span.nbytes
    assert nodes == {0: 48 * MIB, 1: 8 * MIB, 2: 8 * MIB}
    assert max(span.nbytes for span in buffer.spans if span.tier == "cxl") == 2 * MIB
    assert page_nodes(buffer.address, buffer.nbytes) == {0: 64 * MIB}
    expected = {"dram": 48 * MIB, "cxl": 16 * MIB}
    assert by_tier([buffer]) == tiers.stats()["roles"][role.value] == used(tiers, "peak_bytes") == expected


def test_a_buffer_on_three_tiers_is_pinned_as_a_whole(machine):
    host = Host()
    memory = machine.memory(pin=True, pinner=host.pinner)
    buffer = memory.allocate(40 * MIB, replace(THREE, pinned=True), ROLE)
    assert by_tier([buffer]) == used(memory, "held_bytes") == {"dram": 20 * MIB, "cxl": 12 * MIB, "far": 8 * MIB}
    assert host.pinned == {buffer.address: 40 * MIB}


@pytest.mark.parametrize("nbytes", [5000, 300_000, 5 * MIB])
def test_small_requests_add_up_to_the_shares(tiers, nbytes):
    buffers = [tiers.allocate(nbytes, SPLIT, ROLE) for _ in range(120 * MIB // nbytes)]
    assert used(tiers) == by_tier(buffers)
    assert by_tier(buffers)["cxl"] == pytest.approx(30 * MIB, abs=4 * MIB + nbytes)


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 4097, 100_000, 2 * MIB, 5 * MIB + 1, 17 * MIB]),
            st.sampled_from([SPLIT, THREE, SPILLING, Placement(("cxl", "far")), Placement(("dram",))]),
            st.sampled_from([ROLE, TensorRole.ACTIVATIONS, TensorRole.STAGING]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_accounts_are_exact_after_any_allocations_and_frees(requests):
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


def test_the_others_take_the_share_of_a_tier_without_room(tiers):
    blocked = tiers.allocate(60 * MIB, Placement(("cxl",)), TensorRole.STAGING)
    text = r"momentum \(64\.0 MiB\) went to dram 100 % instead of dram 75 %, cxl 25 %: `cxl` has 4\.0 MiB of 64\.0 MiB"
    with pytest.warns(SpillWarning, match=text) as caught:
        buffer, more = (tiers.allocate(64 * MIB, SPLIT, ROLE) for _ in range(2))
    assert len(caught) == 1 and by_tier([buffer, more]) == {"dram": 128 * MIB}
    del buffer, more, blocked
    tiers.trim()
    assert used(tiers, "held_bytes") == {}


def test_a_node_that_turns_out_to_be_full_is_like_a_budget(machine, tiers):
    tiers.allocate(8 * MIB, SPLIT, ROLE)
    tiers.trim()
    for leaf in machine.leaves:
        leaf.full = leaf.label == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        buffer = tiers.allocate(64 * MIB, SPLIT, ROLE)
    assert {span.node_id for span in buffer.spans} == {0, 2}, "one full card leaves its part to the other card"
    assert by_tier([buffer]) == {"dram": 48 * MIB, "cxl": 16 * MIB}
    del buffer
    tiers.trim()
    for leaf in machine.leaves:
        leaf.full = leaf.tier_name == "cxl"
    with pytest.warns(SpillWarning, match="went to dram 100 % instead of dram 75 %, cxl 25 %: `cxl` has"):
        buffer = tiers.allocate(16 * MIB, SPLIT, ROLE)
    assert by_tier([buffer]) == used(tiers, "held_bytes") == {"dram": 16 * MIB}


def test_a_split_without_room_goes_on_to_the_spill_tiers_and_is_an_error_where_all_are_full(tiers):
    full = {"dram": 190 * MIB, "cxl": 62 * MIB}
    blocked = [tiers.allocate(nbytes, Placement((name,)), TensorRole.STAGING) for name, nbytes in full.items()]
    with pytest.warns(SpillWarning, match="went to far 100 % instead of dram 75 %, cxl 25 %: `dram` has .*, `cxl` has"):
        buffer = tiers.allocate(20 * MIB, SPILLING, ROLE)
    assert by_tier([buffer]) == {"far": 20 * MIB}
    with pytest.raises(TierFullError, match=r"`dram`: 2\.0 MiB .* `cxl`: 2\.0 MiB .* `far`: 44\.0 MiB .*\. Raise the"):
        tiers.allocate(60 * MIB, SPILLING, ROLE)
    assert used(tiers, "held_bytes") == used(tiers) == by_tier([*blocked, buffer])


def test_error_instead_of_spilling_leaves_everything_as_it_was_and_no_free_memory_counts_twice(machine):
    memory = machine.memory(on_tier_full="error")
    blocked = memory.allocate(56 * MIB, Placement(("cxl",)), TensorRole.STAGING)
    assert by_tier([memory.allocate(32 * MIB, SPLIT, ROLE)]) == {"dram": 24 * MIB, "cxl": 8 * MIB}
    with pytest.raises(TierFullError, match=r"on tier `dram`: .* nor on tier `cxl`: 8\.0 MiB of 64\.0 MiB free"):
        memory.allocate(64 * MIB, SPILLING, ROLE)
    assert used(memory) == used(memory, "held_bytes") == by_tier([blocked])
    assert memory.free_bytes() == {"dram": 192 * MIB, "cxl": 8 * MIB, "far": 64 * MIB}
    leaf = lambda tier, inherit: Leaf(tier.name, free=40 * MIB, inherit=inherit)  # noqa: E731
    memory = HostMemory(fake_topology(dram=("1GiB",), cxl=()), leaf=leaf)
    with pytest.raises(TierFullError):
        memory.allocate(48 * MIB, SPLIT, ROLE)
    assert by_tier([memory.allocate(32 * MIB, SPLIT, ROLE)]) == {"dram": 24 * MIB, "cxl": 8 * MIB}


def test_every_byte_answers_with_its_own_tier_and_with_what_was_wanted(tiers):
    buffer = tiers.allocate(16 * MIB, SPLIT, ROLE)
    for span in buffer.spans:
        for offset in (span.offset, span.offset + span.nbytes - 1):
            assert tiers.tier_at(buffer.address + offset).name == span.tier
    assert tiers.tier_at(buffer.address - 1) is None
    ranges = [(tier and tier.name, size) for tier, size in tiers.tiers_of(buffer.address + 10, 20 * MIB)]
    spans = [(span.tier, span.nbytes) for span in buffer.spans]
    assert ranges == [(spans[0][0], spans[0][1] - 10), *spans[1:], (None, 4 * MIB + 10)]
    alone, split = (tiers.tensor((4 * MIB,), torch.float32, p, ROLE) for p in (Placement(("cxl",)), SPLIT))
    assert tiers.is_placed(split.data_ptr(), SPLIT)
    assert tiers.is_placed(split[1000:].data_ptr(), Placement(("cxl", "dram", "far"), shares=(0.25, 0.75, 0)))
    for other in (Placement(("dram",)), Placement(("cxl",)), Placement(SPLIT.tiers, shares=(0.5, 0.5)), THREE):
        assert not tiers.is_placed(split.data_ptr(), other)
    assert tiers.is_placed(alone.data_ptr(), Placement(("cxl", "dram")))
    assert not tiers.is_placed(alone.data_ptr(), SPLIT) and not tiers.is_placed(torch.ones(3).data_ptr(), SPLIT)
