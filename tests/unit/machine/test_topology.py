import copy
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_cxl.config import SsdOptions
from lightning_cxl.errors import MissingTierWarning, TierNotFoundError
from lightning_cxl.machine.topology import TierKind, Topology

NODE = "sys/devices/system/node"


def cpuset(nodes):
    return {"proc/self/status": f"Name:\tpython\nMems_allowed_list:\t{nodes}\n"}


@pytest.mark.parametrize(("name", "cards"), [("2node", (1,)), ("3node", (1, 2))])
def test_memory_only_nodes_are_cxl(machine, name, cards):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology = Topology.detect(machine(name))
    assert topology.names == ("dram", "cxl")
    assert topology.tier("dram").node_ids == (0,)
    cxl = topology.tier("cxl")
    assert (cxl.kind, cxl.node_ids, cxl.emulated) == (TierKind.CXL, cards, False)
    assert cxl.capacity_bytes == {1: 1031208, 2: 1032020 + 1031208}[len(cards)] * 1024
    assert cxl.read_bytes_per_s == cxl.write_bytes_per_s == 28672e6 * len(cards)
    assert cxl.read_latency_ns == 250
    assert topology.notes == ()


def test_the_memory_of_a_gpu_is_no_tier(machine):
    """Such a node has no CPUs, either."""
    status = "proc/driver/nvidia/gpus/0009:01:00.0/numa_status"
    topology = Topology.detect(machine("3node", {status: "Node: 1\nStatus: online\n"}))
    assert topology.tier("cxl").node_ids == (2,)


def test_speed_of_a_tier_is_unknown_when_one_node_has_no_rating(machine):
    root = machine(
        "3node", {f"{NODE}/node2/access1/initiators/{kind}": None for kind in ("read_bandwidth", "read_latency")}
    )
    cxl = Topology.detect(root).tier("cxl")
    assert cxl.read_bytes_per_s is None
    assert cxl.read_latency_ns is None
    assert cxl.write_bytes_per_s == 2 * 28672e6


def test_two_sockets_without_a_card_are_one_tier_and_no_word_about_it(machine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology = Topology.detect(machine("2socket"))
    assert topology.names == ("dram",)
    assert topology.tier("dram").node_ids == (0, 1)
    assert "cxl" not in topology.describe().lower()


def test_the_missing_tier_that_is_asked_for_is_dram_with_one_warning(machine):
    topology = Topology.detect(machine("2socket"))
    with pytest.warns(MissingTierWarning) as caught:
        cxl = topology.tier("cxl")
        assert topology.tier("cxl") is cxl
    assert len(caught) == 1
    assert "node 0, 1" in str(caught[0].message)
    assert (cxl.emulated, cxl.kind, cxl.node_ids) == (True, TierKind.CXL, (0, 1))
    assert cxl.describe().endswith("[emulated: backed by DRAM]")
    assert topology.names == ("dram", "cxl")


def test_threads_that_ask_at_once_get_one_missing_tier():
    topology = Topology.fake(("8GiB",), ())
    with warnings.catch_warnings(record=True) as caught, ThreadPoolExecutor(8) as pool:
        warnings.simplefilter("always")
        assert len(set(pool.map(lambda _: topology.tier("cxl"), range(64)))) == 1
    assert len(caught) == 1
    assert topology.names == ("dram", "cxl")


def test_missing_tier_can_be_refused(machine):
    with pytest.raises(TierNotFoundError, match=r"no CXL memory.*dram: 2\.9 GiB.*daxctl"):
        Topology.detect(machine("2socket"), on_missing_tier="error")


def test_cpuset_leaves_a_card_out(machine):
    topology = Topology.detect(machine("3node", cpuset("0,2")))
    assert topology.tier("cxl").node_ids == (2,)
    (note,) = topology.notes
    assert "node 1 (CXL, 1007.8 MiB)" in note
    assert "cpuset" in note


def test_unknown_tier_names_what_exists(machine):
    with pytest.raises(TierNotFoundError, match=r"no tier 'cxl7'.*'dram', 'cxl'"):
        Topology.detect(machine("2node")).tier("cxl7")


def test_node_tier_is_never_an_emulated_one():
    topology = Topology.fake(("1GiB",), ())
    assert topology.tier("cxl").node_ids == (0,)
    assert topology.node_tier(0).name == "dram"


def test_node_free_reads_now(machine):
    root = machine("2node")
    topology = Topology.detect(root)
    before = topology.node_free_bytes(1)
    assert 0 < before < topology.tier("cxl").capacity_bytes
    (root / NODE / "node1/meminfo").write_text("Node 1 MemTotal: 1032020 kB\nNode 1 MemFree: 102400 kB\n")
    assert topology.node_free_bytes(1) < before


def test_node_free_respects_a_control_group(machine):
    group = "sys/fs/cgroup/job"
    root = machine(
        "2node",
        {
            "proc/self/cgroup": "0::/job\n",
            f"{group}/memory.max": str(256 << 20),
            f"{group}/memory.current": str(200 << 20),
        },
    )
    topology = Topology.detect(root)
    assert topology.node_free_bytes(1) == 56 << 20
    assert topology.host_limit_bytes() == 256 << 20


def test_copies_and_pickles(machine):
    topology = Topology.detect(machine("3node"))
    assert copy.deepcopy(topology).tiers == topology.tiers
    assert pickle.loads(pickle.dumps(topology)).tiers == topology.tiers


ON_DISK = SsdOptions((Path("/nvme/run"),), 1 << 40)


def test_the_tier_ssd_is_no_tier_of_memory():
    plain = Topology.fake(("1GiB",), ("2GiB",))
    topology = plain.with_ssd(ON_DISK)
    assert topology.names == ("dram", "cxl")
    assert topology.tier("ssd") is topology.ssd
    assert topology.select(kind=TierKind.SSD) == (topology.ssd,)
    assert topology.ssd.capacity_bytes == 1 << 40
    assert topology.ssd.node_ids == ()
    assert topology.host_limit_bytes() == plain.host_limit_bytes() == 3 << 30
    assert topology.describe().splitlines()[-1] == "ssd: 1.0 TiB in /nvme/run"
    assert plain.ssd is None


def test_a_missing_tier_ssd_says_how_to_have_it():
    with pytest.raises(TierNotFoundError, match=r'this machine has: .dram., .cxl.\. Name a folder.*"path": "/nvme'):
        Topology.fake().tier("ssd")
