import os
import resource
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import (
    LightningCXLError,
    SpillWarning,
    TierFullError,
    UnsupportedError,
)
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.host_memory import HostMemory, residency
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.memory.resource import PinnedResource

MIB = 2**20
CXL_FIRST = Placement(("cxl", "dram"))
DRAM = Placement(("dram",))
ROLE = TensorRole.MOMENTUM


@pytest.fixture(scope="module")
def topology() -> Topology:
    return Topology.detect()


@pytest.fixture
def memory(topology: Topology) -> Iterator[HostMemory]:
    memory = HostMemory(topology, budgets={"cxl": 32 * MIB, "dram": 64 * MIB})
    yield memory
    memory.close()


@pytest.mark.parametrize("role", list(TensorRole))
def test_tensors_have_the_shape_asked_for_and_live_on_the_first_tier(memory, topology, role) -> None:
    for shape in ((), (0,), (3, 0, 2), (5,), (1000, 1001)):
        tensor = memory.tensor(shape, torch.bfloat16, CXL_FIRST, role)
        assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), torch.bfloat16, True)
        nbytes = tensor.numel() * 2
        assert residency(tensor, topology, memory) == ({"cxl": nbytes} if nbytes else {})
        assert memory.stats()["roles"].get(role.value, {}).get("cxl", 0) == nbytes


def test_accounts_go_up_and_down_and_remember_the_peak(memory) -> None:
    a = memory.allocate(5 * MIB, CXL_FIRST, TensorRole.VARIANCE)
    b = memory.allocate(1000, DRAM, TensorRole.VARIANCE)
    c = memory.allocate(3 * MIB, CXL_FIRST, TensorRole.ACTIVATIONS)
    before = memory.stats()
    assert before["roles"] == {"variance": {"cxl": 5 * MIB, "dram": 1000}, "activations": {"cxl": 3 * MIB}}
    assert before["tiers"]["cxl"]["used_bytes"] == 8 * MIB
    assert before["tiers"]["cxl"]["budget_bytes"] == 32 * MIB
    assert 8 * MIB <= before["tiers"]["cxl"]["held_bytes"] <= 32 * MIB

    del a, b, c
    memory.trim()
    after = memory.stats()
    assert after["roles"] == {"variance": {"cxl": 0, "dram": 0}, "activations": {"cxl": 0}}
    assert after["peak_roles"] == before["roles"]
    assert [after["tiers"]["cxl"][key] for key in ("used_bytes", "peak_bytes", "held_bytes")] == [0, 8 * MIB, 0]
    kept = memory.allocate(1000, DRAM, TensorRole.VARIANCE)
    memory.begin()
    begun = memory.stats()
    assert begun["peak_roles"] == begun["roles"] and begun["roles"]["variance"] == {"cxl": 0, "dram": 1000}
    assert begun["tiers"]["cxl"]["peak_bytes"] == 8 * MIB
    del kept


def test_one_budget_counts_all_pools_and_what_one_keeps_unused_serves_another(memory) -> None:
    cxl = Placement(("cxl",))
    memory.allocate(30 * MIB, cxl, TensorRole.MOMENTUM)
    kept = memory.allocate(30 * MIB, cxl, TensorRole.COMPUTE_WEIGHTS)
    with pytest.raises(TierFullError):
        memory.allocate(9 * MIB, cxl, TensorRole.MOMENTUM)
    assert memory.stats()["tiers"]["cxl"]["held_bytes"] <= 32 * MIB
    del kept
    assert memory.allocate(30 * MIB, cxl, TensorRole.MOMENTUM).nbytes == 30 * MIB


def test_spilling_warns_once_per_role_and_tier(memory) -> None:
    full = memory.allocate(30 * MIB, CXL_FIRST, ROLE)
    with pytest.warns(
        SpillWarning, match=r"momentum \(20\.0 MiB\) went to tier `dram`: `cxl` has 2\.0 MiB of 32\.0 MiB"
    ):
        spilled = memory.allocate(20 * MIB, CXL_FIRST, ROLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        more = memory.allocate(10 * MIB, CXL_FIRST, ROLE)
    with pytest.warns(SpillWarning, match="activations"):
        memory.allocate(10 * MIB, CXL_FIRST, TensorRole.ACTIVATIONS)

    assert {span.tier for span in (*spilled.spans, *more.spans)} == {"dram"}
    assert memory.stats()["roles"]["momentum"] == {"cxl": full.nbytes, "dram": 30 * MIB}


def test_when_every_tier_is_full_the_error_names_all_of_them_and_nothing_is_held(memory) -> None:
    with pytest.raises(TierFullError) as caught:
        memory.allocate(2**50, CXL_FIRST, ROLE)

    assert "cannot place momentum (1024.0 TiB) on tier `cxl`: 32.0 MiB of 32.0 MiB free, " in str(caught.value)
    assert "nor on tier `dram`: 64.0 MiB of 64.0 MiB free. Raise the budget of `cxl`" in str(caught.value)
    stats = memory.stats()
    assert [stats["tiers"][name]["held_bytes"] for name in ("dram", "cxl")] == [0, 0]
    assert stats["roles"] == {}


def test_a_failure_does_not_keep_the_spilled_buffer_alive(memory) -> None:
    with pytest.warns(SpillWarning):
        memory.allocate(40 * MIB, CXL_FIRST, ROLE)

    assert memory.stats()["roles"] == {"momentum": {"dram": 0}}


def test_close_refuses_more_and_living_tensors_stay_valid_until_they_die(topology) -> None:
    memory = HostMemory(topology)
    tensors = [memory.tensor((MIB,), torch.float32, DRAM, role).fill_(2.0) for role in (ROLE, TensorRole.ACTIVATIONS)]
    memory.close()
    memory.close()

    with pytest.raises(LightningCXLError, match="closed"):
        memory.allocate(1, DRAM, ROLE)
    assert memory.stats()["tiers"]["dram"]["held_bytes"] == 8 * MIB
    assert [bool((tensor == 2.0).all()) for tensor in tensors] == [True, True]
    del tensors
    stats = memory.stats()
    assert (stats["tiers"]["dram"]["held_bytes"], stats["tiers"]["dram"]["used_bytes"]) == (0, 0)


def test_what_is_not_reused_leaves_the_budget_when_it_dies(topology) -> None:
    memory = HostMemory(topology, reuse_below=MIB)
    held = lambda: memory.stats()["tiers"]["dram"]["held_bytes"]  # noqa: E731
    for role in TensorRole:
        buffer = memory.allocate(MIB, DRAM, role)
        assert held() == MIB
        del buffer
        assert held() == 0, role
    small = memory.allocate(MIB - 1, DRAM, ROLE)
    del small
    assert held() == 16 * MIB, "small ones are cut from a slab that is kept"


def test_pinned_memory_stays_with_the_driver_when_its_buffer_dies(topology) -> None:
    """A copy that does not block may still read it."""
    registered: list[int] = []

    def pinner(upstream) -> PinnedResource:
        register = lambda address, nbytes: registered.append(address)  # noqa: E731
        return PinnedResource(upstream, register=register, unregister=registered.remove, where=None)

    memory = HostMemory(topology, pin=True, pinner=pinner, reuse_below=MIB)
    placement = Placement(("dram",), pinned=True)
    buffer = memory.allocate(20 * MIB, placement, TensorRole.COMPUTE_GRADS)
    address = buffer.address
    assert registered == [address]
    del buffer
    again = memory.allocate(20 * MIB, placement, TensorRole.STAGING)
    assert again.address == address and registered == [address]
    del again
    memory.trim()
    assert registered == []


def test_only_pinned_placements_are_pinned_and_only_when_pinning_is_on(topology) -> None:
    registered: list[int] = []

    def pinner(upstream) -> PinnedResource:
        return PinnedResource(
            upstream, register=lambda address, nbytes: registered.append(nbytes), unregister=lambda address: None
        )

    off = HostMemory(topology, pinner=pinner)
    off.allocate(20 * MIB, Placement(("dram",), pinned=True), TensorRole.COMPUTE_GRADS)
    memory = HostMemory(topology, pin=True, pinner=pinner)
    memory.allocate(20 * MIB, DRAM, TensorRole.COMPUTE_GRADS)
    assert registered == []

    memory.allocate(20 * MIB, Placement(("dram",), pinned=True), TensorRole.COMPUTE_GRADS)
    memory.allocate(20 * MIB, Placement(("dram",), pinned=True), TensorRole.ACTIVATIONS)
    assert registered == [20 * MIB]  # the second one reuses the first one's slab


@pytest.mark.parametrize("role", [ROLE, TensorRole.ACTIVATIONS])
def test_a_forked_child_has_memory_of_its_own(memory, role) -> None:
    tensor = memory.tensor((100,), torch.float32, DRAM, role).fill_(1.0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            mine = memory.tensor((100,), torch.float32, DRAM, role).fill_(5.0)
            os.write(write_end, b"%d" % int(mine.sum()))
            del mine
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)

    assert (status, os.read(read_end, 20)) == (0, b"500")
    assert tensor.sum().item() == 100.0
    os.close(read_end)
    os.close(write_end)


def test_residency_of_views_counts_only_what_they_show(memory, topology) -> None:
    base = memory.tensor((64, 1024), torch.float32, CXL_FIRST, ROLE)

    for view in (base.t(), base[:, ::2], base[3:5, 7:], base[0, :1].expand(9), base[10], base[:0], base.flatten()[1:]):
        expected = view.numel() * 4
        assert residency(view, topology, memory) == ({"cxl": expected} if expected else {})


def test_residency_tells_tiers_apart_by_the_nodes_the_kernel_names() -> None:
    fake = Topology.fake(dram=("1GiB",), cxl=("1GiB", "1GiB"))
    tensor = torch.ones(10_000)

    def where(address: int, nbytes: int) -> dict[int, int]:
        assert (address, nbytes) == (tensor.data_ptr(), 40_000)
        return {0: 10_000, 1: 15_000, 2: 5_000, 7: 4_000, -1: 6_000}

    assert residency(tensor, fake, where=where) == {"dram": 10_000, "cxl": 20_000, "node 7": 4_000, "unbacked": 6_000}


def test_forked_children_see_weights_and_nothing_else() -> None:
    """What user code may hand to a DataLoader worker is inherited; what only the parent writes would cost twice."""
    memory = HostMemory(Topology.detect())
    weights, momentum = (
        memory.tensor((1024,), torch.float32, Placement(("dram",)), role).fill_(3.0)
        for role in (TensorRole.COMPUTE_WEIGHTS, TensorRole.MOMENTUM)
    )
    assert reads_in_child(weights) == 0
    assert reads_in_child(momentum) == -signal.SIGSEGV


def reads_in_child(tensor: torch.Tensor) -> int:
    """Return how a forked child ends that reads a tensor: 0, or the negative number of a signal."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os._exit(0 if tensor[5].item() == 3.0 else 1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def test_no_memory_is_had_from_the_tier_ssd(topology):
    with_ssd = topology.with_ssd(SsdOptions((Path("/nvme/run"),), MIB))
    memory = HostMemory(with_ssd, budgets={"dram": MIB})
    assert set(memory.free_bytes()) == set(memory.stats()["tiers"]) == set(topology.names)
    for tiers in (("ssd",), ("ssd", "dram"), ("dram", "ssd")):
        with pytest.raises(UnsupportedError, match="momentum on tier 'ssd': it is made of files"):
            memory.tensor((8,), torch.float32, Placement(tiers), ROLE)
    memory.close()


def budgets(memory):
    return {name: tier["budget_bytes"] for name, tier in memory.stats()["tiers"].items()}


def test_a_budget_wins_over_the_part_of_a_shared_machine_and_that_over_the_capacity():
    topology = Topology.fake(dram=("8GiB",), cxl=("4GiB",))
    memory = HostMemory(topology, budgets={"dram": MIB}, room={"dram": 2 * MIB, "cxl": 3 * MIB})
    assert budgets(memory) == {"dram": MIB, "cxl": 3 * MIB}
    assert budgets(HostMemory(topology))["cxl"] == 4 * 2**30


def test_dram_that_stands_in_for_a_card_is_limited_as_dram():
    topology = Topology.fake(dram=("8GiB",), cxl=())
    with pytest.warns(match="backed by DRAM"):
        topology.tier("cxl")
    assert budgets(HostMemory(topology, room={"dram": 2 * MIB}))["cxl"] == 2 * MIB
    assert budgets(HostMemory(topology, budgets={"dram": MIB}))["cxl"] == 8 * 2**30, "is for bytes under its name"
