"""A run that memory cannot hold, planned with the tier ssd: inventory, decision and report say the same."""

import json

import pytest
import torch
from torch.optim import AdamW

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import SpillWarning, TierFullError, UnsupportedError
from lightning_cxl.inventory.tensors import SLOTS_OWNER, Loop
from lightning_cxl.machine.topology import Topology
from lightning_cxl.placement.placement import Placement
from lightning_cxl.planning.decide import free_for, memory_bytes_of
from lightning_cxl.run.host import Host
from lightning_cxl.run.session import format_report
from lightning_cxl.run.state_on_ssd import SsdUse
from tests.cases import others_full
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import offload, train
from tests.models import TinyTransformer

pytestmark = pytest.mark.on_cpu

CPU = torch.device("cpu")
SPEEDS = """
tiers:
  - {name: dram, adam_bytes_per_s: 200e9, device_read_bytes_per_s: 200e9, device_write_bytes_per_s: 200e9}
ssd: {read_bytes_per_s: 1e9, write_bytes_per_s: 1e9}
"""


class AllOnSsd:
    """A policy that asks for what no policy may."""

    def place(self, request, free):
        return Placement(("ssd",))


class SplitOnSsd:
    """The same of one that plans."""

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
        inventory = host.inventory(model, [AdamW(model.parameters(), lr=1e-3)], Loop())
        return host, inventory, host.decide(inventory)

    yield plan
    for host in hosts:
        host.close()


def one_tier():
    found = Topology.detect()
    return Topology(found.tiers[:1], found.root)


def needed_bytes(planned):
    return memory_bytes_of(planned("1GiB")[1])


@pytest.mark.parametrize(
    "policy", others_full(["auto", "dram_only", "interleave", "latency_first"], ["auto", "interleave"])
)
def test_state_goes_there_and_every_policy_has_room_for_the_rest(planned, policy):
    needed = needed_bytes(planned)
    host, inventory, decision = planned(needed, policy=policy)  # a plan may fill 7/8 of so little
    assert [record.name for record in inventory.ssd_records]
    assert memory_bytes_of(inventory) <= free_for(inventory.model, host.memory).usable_bytes < needed
    for each in inventory.tensors:
        decision.count(each.role, each.nbytes, decision.of(each))
    on_ssd = {role: tiers["ssd"] for role, tiers in decision.roles().items() if "ssd" in tiers}
    assert set(on_ssd) == {"momentum", "variance"}  # float32 weights are their own masters
    state = sum(each.nbytes for record in inventory.ssd_records for each in record.tensors)
    assert sum(on_ssd.values()) == state
    assert "ssd (does not fit in memory)" in decision.reasons()["momentum"]
    assert any(each.owner == SLOTS_OWNER for each in inventory.tensors)


def test_with_speeds_the_bandwidth_policy_plans_with_it(planned, tmp_path):
    needed = needed_bytes(planned)
    file = tmp_path / "machine.yaml"
    file.write_text(SPEEDS)
    _, inventory, _ = planned(needed, policy="bandwidth", machine=str(file), batch_tokens=64)
    assert inventory.ssd_records


def test_without_the_tier_the_run_is_refused(planned):
    needed = needed_bytes(planned)
    config = OffloadConfig(tiers={"dram": needed * 3 // 4}, stream_weights=True)
    host = Host(config, CPU, one_tier())
    model = TinyTransformer(depth=6, width=64)
    inventory = host.inventory(model, [AdamW(model.parameters(), lr=1e-3)], Loop())
    assert not inventory.ssd_records
    with pytest.raises(TierFullError):
        host.decide(inventory)
    host.close()
    planned(needed * 3 // 4)


def test_what_a_rule_puts_there_is_refused_where_it_is_too_small(planned):
    rules = {"blocks.*": {"optimizer_state": "ssd"}}
    assert len(planned("1GiB", rules=rules)[1].ssd_records) == 6
    with pytest.warns(SpillWarning, match="state of 6 of 6 records stays in memory"):
        assert not planned("1GiB", "4KiB", rules=rules)[1].ssd_records
    with pytest.raises(TierFullError, match="and what goes there needs"):
        planned("1GiB", "4KiB", rules=rules, on_tier_full="error")


@pytest.mark.parametrize("policy", [AllOnSsd, SplitOnSsd])
def test_a_policy_cannot_put_anything_there(planned, policy):
    with pytest.raises((UnsupportedError, ValueError), match="ssd"):
        planned("1GiB", policy=f"{__name__}.{policy.__name__}")


def test_the_report_has_a_row_for_the_tier_and_what_a_step_wrote(planned):
    host, _, _ = planned(needed_bytes(planned))
    before = host.report()
    assert before["tiers"]["ssd"] == {
        "capacity_bytes": 1 << 30, "budget_bytes": 1 << 30, "used_bytes": 0, "peak_bytes": 0, "held_bytes": 0,
    }  # fmt: skip
    assert before["ssd"] == {}
    assert ["ssd", "1.0", "GiB", "1.0", "GiB", "0", "B", "0", "B"] in map(str.split, format_report(before).splitlines())
    use = SsdUse(
        used_bytes=1 << 20,
        peak_bytes=2 << 20,
        held_bytes=3 << 20,
        read_bytes=20 * 10**9,
        written_bytes=10 * 10**9,
        num_steps=10,
        seconds=20.0,
    )
    report = json.loads(json.dumps(host.report("running", use)))
    assert [report["tiers"]["ssd"][f"{name}_bytes"] for name in ("used", "peak", "held")] == [1 << 20, 2 << 20, 3 << 20]
    moved = report["ssd"]
    assert (moved["written_bytes_per_step"], moved["read_bytes_per_step"], moved["step_seconds"]) == (1e9, 2e9, 2.0)
    text = format_report(report)
    assert "tier ssd, 10 steps of 2.00 s: 2 GB read and 1 GB written per step" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_run_that_does_not_fit_in_memory_trains_as_one_that_does(tmp_path):
    def model():
        return tiny_llama(6, hidden_size=64, intermediate_size=128)

    free = offload(stream_weights=True)
    theirs = train(model, free, steps=6, task=LlamaTask)
    roles = free.report()["planned_roles"]
    needed = sum(sum(tiers.values()) for tiers in roles.values())
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
