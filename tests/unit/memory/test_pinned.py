import pytest
import torch

from lightning_cxl.devices.transfer import CudaDevices
from lightning_cxl.errors import LightningCXLWarning, PinnedMemoryError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.resource import Budget, BudgetResource, NumaResource, PinnedResource

MIB = 2**20


class Driver:
    """Registers ranges as the CUDA driver does: whole, disjoint, up to a limit of locked bytes."""

    def __init__(self, limit: int = 2**40) -> None:
        self.limit = limit
        self.ranges: dict[int, int] = {}
        self.calls: list[tuple[int, int]] = []

    def register(self, address: int, nbytes: int) -> None:
        if sum(self.ranges.values()) + nbytes > self.limit:
            raise PinnedMemoryError("locked-memory limit")
        assert address not in self.ranges
        self.ranges[address] = nbytes
        self.calls.append((address, nbytes))

    def unregister(self, address: int) -> None:
        del self.ranges[address]


@pytest.fixture
def budget() -> Budget:
    return Budget("dram", 64 * MIB)


@pytest.fixture
def upstream(budget: Budget) -> BudgetResource:
    return BudgetResource(NumaResource("dram", 0, Topology.fake(dram=("1GiB",), cxl=())), budget)


def test_memory_is_registered_as_a_whole_and_unregistered_before_it_goes_back(upstream, budget) -> None:
    driver = Driver()
    order = []
    resource = PinnedResource(
        upstream,
        register=driver.register,
        unregister=lambda address: (driver.unregister(address), order.append(budget.held_bytes)),
    )
    buffer = resource.allocate(10 * MIB)
    assert driver.calls == [(buffer.address, 10 * MIB)]
    del buffer
    assert driver.ranges == {}
    assert order == [10 * MIB]  # still held while it was unregistered
    assert budget.held_bytes == 0


def test_a_forked_child_leaves_registrations_to_its_parent(upstream, monkeypatch) -> None:
    driver = Driver()
    buffer = PinnedResource(upstream, driver.register, driver.unregister).allocate(MIB)
    address = buffer.address
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: 1)
        del buffer
    assert driver.ranges == {address: MIB}


def test_failure_falls_back_to_pageable_with_one_warning(upstream, budget) -> None:
    driver = Driver(limit=6 * MIB)
    resource = PinnedResource(upstream, register=driver.register, unregister=driver.unregister)

    with pytest.warns(LightningCXLWarning, match=r"page-lock 10\.0 MiB.*ulimit -l.*memlock=-1.*pageable") as caught:
        first = resource.allocate(10 * MIB)
        second = resource.allocate(1 * MIB)
    assert len(caught) == 1
    assert driver.ranges == {}
    assert budget.held_bytes == 11 * MIB
    assert "page-lock 10.0 MiB" in resource.failure
    assert first.tensor((MIB,), torch.uint8).fill_(1).sum().item() == MIB
    del first, second
    assert budget.held_bytes == 0


def test_failure_is_raised_when_pinning_is_required(upstream, budget) -> None:
    driver = Driver(limit=6 * MIB)
    resource = PinnedResource(upstream, required=True, register=driver.register, unregister=driver.unregister)

    with pytest.raises(PinnedMemoryError, match="locked-memory limit"):
        resource.allocate(10 * MIB)
    assert driver.ranges == {}
    assert budget.held_bytes == 0
    assert resource.allocate(5 * MIB).nbytes == 5 * MIB


def test_pages_that_the_pin_moved_off_the_card_are_noticed(upstream, budget) -> None:
    driver = Driver()
    resource = PinnedResource(
        upstream,
        required=True,
        register=driver.register,
        unregister=driver.unregister,
        where=lambda address, nbytes: {0: nbytes - MIB, 3: MIB},
    )

    with pytest.raises(
        PinnedMemoryError, match=r"moved 1\.0 MiB of 8\.0 MiB on nodes \[0\] to nodes \[3\].*--no-movable"
    ):
        resource.allocate(8 * MIB)
    assert driver.ranges == {}
    assert budget.held_bytes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_driver_functions_say_so() -> None:
    with pytest.raises(PinnedMemoryError, match="CUDA cannot be used"):
        CudaDevices().register(4096, 4096)
    CudaDevices().unregister(4096)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_sees_the_memory_as_pinned() -> None:
    driver, upstream = CudaDevices(), NumaResource("dram", 0, Topology.detect())
    buffer = PinnedResource(upstream, driver.register, driver.unregister, required=True).allocate(8 * MIB)
    tensor = buffer.tensor((MIB,), torch.float32)

    assert tensor.is_pinned()
    assert tensor.fill_(2.0).to("cuda", non_blocking=True).sum().item() == 2.0 * MIB
