import copy
import json
import re
from pathlib import Path

import pytest

from lightning_cxl.commands.env import advice, environment_report, format_environment

FIXTURES = Path(__file__).parents[2] / "fixtures" / "sysfs"


@pytest.fixture(scope="module")
def healthy():
    """A report of a machine with a card and nothing to change."""
    report = environment_report(FIXTURES / "3node")
    report["limits"]["memlock_bytes"] = None
    report["kernel"]["numa_balancing"] = "0"
    return report


def test_a_healthy_machine_needs_no_change(healthy):
    assert advice(healthy) == []
    text = format_environment({**healthy, "advice": []})
    assert text.endswith("advice\n  nothing to change")
    assert "memlock: none" in text


def test_report_and_text_of_a_machine_with_two_cards():
    report = environment_report(FIXTURES / "3node")
    tiers = [(tier["name"], tier["node_ids"], tier["emulated"]) for tier in report["tiers"]]
    assert tiers == [("dram", [0], False), ("cxl", [1, 2], False)]
    card = report["nodes"][1]
    assert (card["zone"], card["allowed"], card["has_cpus"], card["distance"]) == ("normal", True, False, 24)
    assert 0 < card["free_bytes"] < card["capacity_bytes"] and report["limits"]["cgroups"] == []
    assert report["cpu"]["threads"] >= 1 and report["cpu"]["isa"] in report["cpu"]["supported_isas"]
    assert json.loads(json.dumps(report)) == report
    text = format_environment({**report, "limits": {**report["limits"], "memlock_bytes": 8 << 20}})
    for shown in (
        "cxl: 2.0 GiB on nodes 1, 2 (57.3 GB/s read, 250 ns)",
        "node_id 1, has_cpus False, capacity 1007.8 MiB, distance 24, read 28.7 GB/s",
        "memlock: 8.0 MiB",
        "transparent_hugepage: always\n  numa_balancing: 1",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("limits", {"memlock_bytes": 65536}, "limited to 64.0 KiB.*ulimit -l unlimited"),
        ("kernel", {"transparent_hugepage": "never"}, "echo madvise"),
        ("kernel", {"numa_balancing": "2"}, "kernel.numa_balancing=0"),
        ("cpu", {"isa": None, "isa_error": "LIGHTNING_CXL_ISA='avx9'"}, "cannot be used: LIGHTNING_CXL_ISA='avx9'"),
    ],
)
def test_advice(healthy, section, values, message):
    report = copy.deepcopy(healthy)
    report[section].update(values)
    (text,) = advice(report)
    assert re.search(message, text)
