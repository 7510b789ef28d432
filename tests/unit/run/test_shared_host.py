"""A process that shares its machine: what it may take, and what its report says."""

import pytest
import torch

from lightning_cxl import OffloadConfig, Topology
from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.binding import bind_rank
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.run.run import Host

MIB = 1 << 20


@pytest.fixture
def host():
    """Memory of the second of two processes, which are not bound."""
    config = OffloadConfig(tiers={"dram": 64 * MIB}, numa_binding=False, on_tier_full="error")
    topology, cpu = Topology.detect(), torch.device("cpu")
    sent = []

    def hear_only(own):
        sent.append(own)
        return [own] * 2

    bind_rank(0, 0, 2, cpu, config, topology, hear_only)
    binding = bind_rank(1, 1, 2, cpu, config, topology, lambda own: [sent[0], own])
    host = Host(config, cpu, binding=binding)
    yield host
    host.close()


def test_the_budget_of_the_machine_is_divided(host):
    host.memory.allocate(30 * MIB, Placement(("dram",)), TensorRole.MOMENTUM)
    with pytest.raises(TierFullError, match=r"32\.0 MiB"):
        host.memory.allocate(33 * MIB, Placement(("dram",)), TensorRole.MOMENTUM)
