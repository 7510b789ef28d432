"""A run that memory cannot hold, planned with the tier ssd: inventory, decision and report say the same."""

import json

import pytest
import torch
from torch.optim import AdamW

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.inventory.tensors import SLOTS_OWNER, Loop
from lightning_cxl.machine.topology import Topology
from lightning_cxl.planning.decide import free_for, memory_bytes_of
from lightning_cxl.run.run import Host
from lightning_cxl.run.session import format_report
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import offload, train
from tests.models import TinyTransformer

pytestmark = pytest.mark.on_cpu

CPU = torch.device("cpu")


class AllOnSsd:
    """A policy that asks for what no policy may."""

    needs_speeds = False

    def decide(self, job, machine):
        from lightning_cxl.planning.policies import Decision

        return Decision({role: {"ssd": 1.0} for role in job.free_classes()}, {})


@pytest.fixture
def planned(tmp_path):
    """Plans a run with a budget of memory; returns host, inventory and decision."""
    hosts = []

    def plan(dram, budget="1GiB", rules=None, topology=None, **options):
        tiers = {"dram": dram, "ssd": {"path": str(tmp_path / "run"), "budget": budget}}
        config = OffloadConfig(tiers=tiers, tier_rules=rules or {}, stream_weights=True, **options)
        host = Host(config, CPU, topology or one_tier())
        hosts.append(host)
        torch.manual_seed(0)
        model = TinyTransformer(depth=6, width=64)
        inventory = host.plan(model, [AdamW(model.parameters(), lr=1e-3)], Loop())
        return host, inventory, host.decide(inventory)

    yield plan
    for host in hosts:
        host.close()


def one_tier():
    found = Topology.detect()
    return Topology(found.tiers[:1], found.root)


def needed_bytes(planned):
    return memory_bytes_of(planned("1GiB")[1])


@pytest.mark.parametrize("policy", ["auto", "interleave"])
def test_state_goes_there_and_every_policy_has_room_for_the_rest(planned, policy):
    needed = needed_bytes(planned)
    host, inventory, decision = planned(needed, policy=policy)  # a plan may fill 7/8 of so little
    assert [record.name for record in inventory.ssd_records]
    assert memory_bytes_of(inventory) <= free_for(inventory.model, host.memory).usable_bytes < needed
    on_ssd = {role: tiers["ssd"] for role, tiers in decision.report()["planned_roles"].items() if "ssd" in tiers}
    assert set(on_ssd) == {"momentum", "variance"}  # float32 weights are their own masters
    state = sum(each.nbytes for record in inventory.ssd_records for each in record.tensors)
    assert sum(on_ssd.values()) == state
    assert "ssd (does not fit in memory)" in decision.report()["reasons"]["momentum"]
    assert any(each.owner == SLOTS_OWNER for each in inventory.tensors)


def test_a_policy_cannot_put_anything_there(planned):
    with pytest.raises((UnsupportedError, ValueError), match="ssd"):
        planned("1GiB", policy=f"{__name__}.AllOnSsd")


def test_a_run_that_does_not_fit_in_memory_trains_as_one_that_does(tmp_path):
    def model():
        return tiny_llama(6, hidden_size=64, intermediate_size=128)

    free = offload(stream_weights=True)
    theirs = train(model, free, steps=6, task=LlamaTask)
    roles = free.report()["planned_roles"]
    activations = free.report()["peak_roles"]["activations"]
    needed = sum(sum(tiers.values()) for tiers in [*roles.values(), activations])
    ssd = {"path": str(tmp_path / "ssd"), "budget": "64MiB"}
    strategy = offload(stream_weights=True, tiers={"dram": needed, "ssd": ssd}, on_tier_full="error")
    ours = train(model, strategy, steps=6, task=LlamaTask)
    assert ours[0] == theirs[0]
    report = json.loads(json.dumps(strategy.report()))
    moments = report["planned_roles"]["momentum"]
    assert 0 < moments["ssd"] < roles["momentum"]["dram"] == sum(moments.values())
    assert report["tiers"]["ssd"]["used_bytes"] >= 2 * moments["ssd"]
    # a step reads and writes all of it once; the report may be made before the last write
    assert report["ssd"]["num_steps"] == pytest.approx(4, abs=1)
    assert report["ssd"]["written_bytes_per_step"] == pytest.approx(report["tiers"]["ssd"]["used_bytes"], rel=0.3)
    assert report["ssd"]["step_seconds"] > 0
    text = format_report(report)
    assert "GB read and" in text
