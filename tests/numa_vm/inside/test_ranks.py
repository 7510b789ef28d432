"""Processes of a machine with two sockets, a card at each: where they run, and where the kernel says their pages are.

Forked, so that everything is imported once.
"""

import contextlib
import multiprocessing
import os
import threading
import traceback

import pytest
import torch

import lightning_cxl
from lightning_cxl import CPUAdam, OffloadConfig, Topology, devices
from lightning_cxl.machine.binding import bind_rank
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.native._numa import page_nodes
from lightning_cxl.run.run import Host

MIB = 1 << 20
PORTS = ("0000:40:00.0", "0000:80:00.0")
"""PCI devices of the guest, one at each socket."""


@pytest.fixture
def started():
    """Start processes that run a function with (local rank, gather), and return what each returned."""
    processes = []

    def start(count, work):
        ends = [multiprocessing.Pipe() for _ in range(count)]
        context = multiprocessing.get_context("fork")
        for rank, (_, end) in enumerate(ends):
            processes.append(context.Process(target=run, args=(rank, end, work)))
            processes[-1].start()
            end.close()  # so that a process that dies is noticed
        facts = answers(ends)
        for ours, _ in ends:
            ours.send(facts)
        return answers(ends)

    yield start
    for process in processes:
        process.join(60)
        process.kill()
        process.join()


def answers(ends):
    found = [ours.recv() for ours, _ in ends]
    for each in found:
        assert not isinstance(each, str), each  # the traceback of a process that failed
    return found


def run(rank, end, work):
    def gather(own):
        end.send(own)
        return end.recv()

    try:
        end.send(work(rank, gather))
    except BaseException:
        end.send(traceback.format_exc())


def seen_by(rank, count, gather, device="cpu", **options):
    """Bind this process, take and train something, and return where that is and where its threads may run."""
    config = OffloadConfig(**options)
    binding = bind_rank(rank, rank, count, torch.device(device, rank), config, Topology.detect(), gather)
    memory = HostMemory(binding.topology, room=binding.room, on_tier_full="error")
    found = {"lines": binding.notes, "room": binding.room, "threads": torch.get_num_threads()}
    for tier in ("dram", "cxl"):
        buffers = [memory.allocate(size, Placement((tier,)), TensorRole.MOMENTUM) for size in (5, 300_000, 64 * MIB)]
        found[tier] = [page_nodes(buffer.address, buffer.nbytes) for buffer in buffers]
    memory.close()
    with Host(config, torch.device("cpu"), binding=binding).activate():
        weight = torch.nn.Parameter(lightning_cxl.empty(1 << 20, tier="cxl").normal_())
    optimizer = CPUAdam([weight])
    weight.grad = torch.ones_like(weight)
    other = threading.Event()
    waiting = threading.Thread(target=other.wait)
    waiting.start()
    optimizer.step()
    found["weight"] = page_nodes(weight.data_ptr(), weight.nbytes)
    states = [state for state in optimizer.state[weight].values() if state.numel() > 1]
    found["state"] = [page_nodes(state.data_ptr(), state.nbytes) for state in states]
    cpus = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # one of the step, which the system has not forgotten yet
            cpus.append(tuple(sorted(os.sched_getaffinity(int(thread)))))
    other.set()
    return {**found, "cpus": set(cpus), "num_threads": len(cpus)}


def check_near(found, socket):
    """Assert that all pages are on a socket's memory or its card, and all threads on its CPUs."""
    card = socket + 2
    assert [set(nodes) for nodes in found["dram"]] == [{socket}] * 3
    assert [set(nodes) for nodes in found["cxl"]] == [{card}] * 3
    assert set(found["weight"]) == {card}
    assert found["state"] and all(set(nodes) == {socket} for nodes in found["state"]), found["state"]


def test_ranks_run_and_allocate_on_sockets_in_turn(started):
    both = started(2, lambda rank, gather: seen_by(rank, 2, gather))
    for rank, found in enumerate(both):
        check_near(found, rank)
        # threads of kernels sleep on a core of the process
        assert set().union(*found["cpus"]) == {2 * rank, 2 * rank + 1}
        assert found["num_threads"] > 2 and found["threads"] == 2
        assert f"CPUs {2 * rank}-{2 * rank + 1} of node {rank}" in found["lines"][0]


def test_ranks_are_near_their_device_as_its_pci_bus_says(started, monkeypatch):
    monkeypatch.setattr(devices.CudaDevices, "pci_address", lambda self, index: PORTS[1 - index])
    both = started(2, lambda rank, gather: seen_by(rank, 2, gather, device="cuda"))
    for rank, found in enumerate(both):
        check_near(found, 1 - rank)
        assert set().union(*found["cpus"]) == {2 - 2 * rank, 3 - 2 * rank}


def test_ranks_of_one_socket_have_cores_of_their_own_and_a_share_of_its_memory(started):
    found = started(4, lambda rank, gather: seen_by(rank, 4, gather))
    topology = Topology.detect()
    for rank, each in enumerate(found):
        check_near(each, rank // 2)
        assert each["cpus"] == {(rank,)} and each["threads"] == 1
    for tier in topology.tiers:
        free = sum(topology.node_free_bytes(node) for node in tier.node_ids)
        assert 0.8 * free < sum(each["room"][tier.name] for each in found) <= tier.capacity_bytes


def test_a_process_that_its_launcher_has_bound_stays_and_allocates_there(started):
    def work(rank, gather):
        os.sched_setaffinity(0, {3})
        return seen_by(rank, 2, gather)

    for found in started(2, work):
        check_near(found, 1)
        assert found["cpus"] == {(3,)}
        assert any("CPUs 3 were chosen before" in line for line in found["lines"])


def test_a_full_card_spills_to_the_other_socket_s_card(started):
    def work(rank, gather):
        binding = bind_rank(rank, rank, 2, torch.device("cpu"), OffloadConfig(), Topology.detect(), gather)
        if rank == 0:
            return None
        memory = HostMemory(binding.topology, on_tier_full="error")  # without its budget
        # not in one: a node that turns out to have less than it said gives a buffer up as a whole
        buffers = [memory.allocate(32 * MIB, Placement(("cxl",)), TensorRole.MOMENTUM) for _ in range(20)]
        return [page_nodes(buffer.address, buffer.nbytes) for buffer in buffers]

    nodes = started(2, work)[1]
    assert nodes[:8] == [{3: 32 * MIB}] * 8, "the nearest card is filled first"
    assert nodes[-4:] == [{2: 32 * MIB}] * 4


def test_without_binding_memory_is_striped_over_sockets(started):
    for found in started(2, lambda rank, gather: seen_by(rank, 2, gather, numa_binding=False)):
        assert set(found["dram"][2]) == {0, 1} and set(found["cxl"][2]) == {2, 3}
        assert found["cpus"] == {(0, 1, 2, 3)}
