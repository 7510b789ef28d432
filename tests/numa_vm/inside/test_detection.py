"""Nodes, speeds and distances as the guest's firmware describes them, and what `env` makes of them."""

import pytest

from lightning_cxl import TierKind
from lightning_cxl.commands.env import environment_report, format_environment


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


def test_speeds_are_what_the_firmware_says(topology, machine):
    for tier in topology.tiers:
        for node in tier.nodes:
            spec = machine.nodes[node.node_id]
            if not machine.hmat:
                assert node.read_bytes_per_s is None and node.write_latency_ns is None
                continue
            # the firmware counts in MB/s
            assert node.read_bytes_per_s == node.write_bytes_per_s == pytest.approx((spec.bw >> 20) * 1e6)
            assert node.read_latency_ns == node.write_latency_ns == spec.lat


def test_report_shows_every_node(machine):
    report = environment_report()
    assert [row["zone"] for row in report["nodes"]] == ["movable" if spec.hot else "normal" for spec in machine.nodes]
    assert not any(tier["emulated"] for tier in report["tiers"])
    text = format_environment(report)
    for index, spec in enumerate(machine.nodes):
        assert f"node_id {index}, has_cpus {bool(spec.cpus)}" in text
    assert ("28.7 GB/s" in text) is machine.hmat


def test_movable_cards_get_advice(machine):
    advice = [line for line in environment_report()["advice"] if "movable" in line]
    movable = [index for index, spec in enumerate(machine.nodes) if spec.hot]
    assert len(advice) == len(movable)
    for index, line in zip(movable, advice, strict=True):
        assert line.startswith(f"Node {index} ") and "daxctl online-memory --no-movable" in line
