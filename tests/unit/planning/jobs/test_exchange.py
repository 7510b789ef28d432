"""What ranks exchange in a step and what that keeps busy, by hand; and what holds for any number of ranks."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.tensors import Mesh
from lightning_cxl.machine.speeds import Device, Machine, MachineLinks, MachineTier
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import (
    Exchange,
    Job,
    MemoryClass,
    UnitShards,
    exchanges,
    groups_of,
    predict_step,
)

TIER = MachineTier(
    name="dram0",
    kind=TierKind.DRAM,
    capacity_bytes=0,
    adam_bytes_per_s=100,
    device_read_bytes_per_s=100,
    device_write_bytes_per_s=100,
)
LINKS = MachineLinks(peer_bytes_per_s=20, network_bytes_per_s=4, peer_latency_s=0.01, network_latency_s=0.1)
MACHINE = Machine(
    name="two",
    tiers=(TIER,),
    device=Device(flops=1, h2d_bytes_per_s=10, d2h_bytes_per_s=10, count=2),
    links=LINKS,
)
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


def job_of(*found, units=4, forward=20.0, backward=60.0, moves=(), overlap="none"):
    return Job(
        name="job",
        classes=(MemoryClass(role=TensorRole.COMPUTE_WEIGHTS, nbytes=1, moves=moves),),
        num_units=units,
        forward_flops=forward,
        backward_flops=backward,
        exchanges=found,
        overlap=overlap,
    )


def time_of(job, machine=MACHINE):
    return predict_step(job, {TensorRole.COMPUTE_WEIGHTS: {"dram0": 1.0}}, machine)


def test_the_first_gather_and_the_last_reduction_are_waited_for():
    time = time_of(
        job_of(exchange("forward", "gather", 80, 0, 0), exchange("backward", "reduce", 160, 0, 100)),
    )
    assert time.forward.seconds == pytest.approx(20 + 4 / 4)
    assert time.backward.seconds == pytest.approx(60 + (8 + 1) / 4)
    assert time.backward.resources["peer links"] == pytest.approx(9)
    assert time.backward.resources["network"] == 0


def test_machines_exchange_over_the_network_while_devices_do_over_their_links():
    time = time_of(job_of(exchange("forward", "gather", 200, 200, 10), forward=1.0))
    assert time.forward.resources["peer links"] == pytest.approx(10)
    assert time.forward.resources["network"] == pytest.approx(50 + 1)
    assert time.forward.seconds == pytest.approx(51 + 1 / 4)
    unknown = replace(MACHINE, links=replace(LINKS, network_bytes_per_s=None))
    with pytest.raises(ConfigError, match="`two` does not say how fast: give network_bytes_per_s under `links`"):
        time_of(job_of(exchange("forward", "gather", 200, 200, 10)), unknown)


def test_devices_without_links_exchange_through_host_memory():
    machine = replace(MACHINE, links=MachineLinks())
    time = time_of(job_of(exchange("forward", "gather", 80, 0, 5), forward=1.0), machine)
    # each of two devices sends and receives 80 bytes over its link, and memory is written and read twice
    assert time.forward.resources == pytest.approx(
        {"compute": 1, "link h2d": 8, "link d2h": 8, "tier dram0": 3.2, "peer links": 0, "network": 0}
    )
    assert time.forward.seconds >= 8
    cpu = replace(machine, device=replace(machine.device, is_host=True))
    assert time_of(job_of(exchange("forward", "gather", 80, 0, 5), forward=1.0), cpu).forward.resources[
        "tier dram0"
    ] == pytest.approx(3.2)
