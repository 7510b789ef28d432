import pytest

from lightning_cxl import TierKind
from lightning_cxl.commands.env import environment_report


def test_tiers_are_the_nodes_of_the_machine(topology, machine, cards):
    assert topology.names == ("dram", "cxl") and topology.notes == ()
    assert topology.tier("dram").node_ids == (0,)
    assert topology.tier("cxl").kind is TierKind.CXL and topology.tier("cxl").node_ids == cards
    for node in (*topology.tier("dram").nodes, *topology.tier("cxl").nodes):
        spec = machine.nodes[node.node_id]
        assert node.has_cpus is bool(spec.cpus)
        assert 0.9 * spec.mem < node.capacity_bytes <= spec.mem
        assert node.distance == spec.dist
        assert node.movable is bool(spec.hot)
        # the firmware counts in MB/s
        assert node.read_bytes_per_s == node.write_bytes_per_s == pytest.approx((spec.bw >> 20) * 1e6)
        assert node.read_latency_ns == node.write_latency_ns == spec.lat
    report = environment_report()
    assert [row["zone"] for row in report["nodes"]] == ["movable" if spec.hot else "normal" for spec in machine.nodes]
    assert not any(tier["emulated"] for tier in report["tiers"])
    assert sum("--no-movable" in line for line in report["advice"]) == sum(spec.hot for spec in machine.nodes)
