"""Node descriptions, and the arguments that QEMU gets for them."""

from itertools import pairwise

import pytest

from tests.numa_vm.machine import MACHINES, NodeSpec, VmError, machine, numa_arguments, parse_nodes, parse_size

GIB = 1 << 30


def numa(machine):
    arguments = numa_arguments(machine)
    return [value for name, value in pairwise(arguments) if name == "-numa"]


def test_nodes_are_read_clause_by_clause():
    assert parse_nodes("cpus=2,mem=3G,lat=110,bw=120G; mem=512M,dist=24,hot=1") == (
        NodeSpec(cpus=2, mem=3 * GIB, lat=110, bw=120 * GIB),
        NodeSpec(mem=GIB // 2, dist=24, hot=1),
    )
    assert [parse_size(text) for text in ("24", "4K", "2M", "3G")] == [24, 4 << 10, 2 << 20, 3 << 30]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpus=2,mem=3G;size=1G", r"'size=1G' of node 1.*cpus, mem"),
        ("cpus=2,mem=3 GB", "not a size: '3 GB'"),
        ("", "'' of node 0"),
        ("mem=1G;cpus=2,mem=1G", "first nodes, and no others, must have CPUs"),
        ("cpus=2,mem=1G,hot=1;mem=1G", "only the last node"),
    ],
)
def test_bad_nodes_are_refused(text, message):
    with pytest.raises(VmError, match=message):
        parse_nodes(text)


def test_machines_have_names():
    assert machine("cxl2") is MACHINES["cxl2"] and len(machine("cxl2").nodes) == 3
    assert machine("cpus=1,mem=1G").nodes == (NodeSpec(cpus=1, mem=GIB),)


def test_arguments_give_memory_distance_and_speed_to_every_node():
    two_cards = machine("cpus=2,mem=3G,lat=110,bw=120G;mem=1G,lat=250,bw=28G,dist=24;mem=1G,dist=30")
    arguments = numa(two_cards)
    assert arguments[:3] == [
        "node,nodeid=0,cpus=0-1,memdev=m0,initiator=0",
        "node,nodeid=1,memdev=m1,initiator=0",
        "node,nodeid=2,memdev=m2,initiator=0",
    ]
    distances = {tuple(text.split(",")[1:]) for text in arguments if text.startswith("dist,")}
    assert len(distances) == 6
    assert {("src=0", "dst=1", "val=24"), ("src=2", "dst=0", "val=30"), ("src=1", "dst=2", "val=34")} < distances
    assert [text for text in arguments if "target=1" in text] == [
        "hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-latency,latency=250",
        "hmat-lb,initiator=0,target=1,hierarchy=memory,data-type=access-bandwidth,bandwidth=28672M",
    ]
    assert not any("target=2" in text for text in arguments), "a node without speeds"
    assert "5120M" in numa_arguments(two_cards)


def test_a_hot_plugged_node_is_a_dimm_and_no_memory_of_the_boot():
    hot = MACHINES["cxl1hot"]
    arguments = numa_arguments(hot)
    assert "3072M,slots=2,maxmem=64G" in arguments
    assert arguments[-2:] == ["-device", "pc-dimm,id=dimm1,memdev=m1,node=1"]
    assert "node,nodeid=1,initiator=0" in numa(hot)


def test_firmware_without_hmat_names_no_initiator_and_no_speed():
    arguments = numa_arguments(MACHINES["cxl1nohmat"])
    assert not any("hmat" in text or "initiator" in text for text in arguments)
    assert "node,nodeid=1,memdev=m1" in arguments


def test_two_sockets_have_their_cpus_cards_and_pci_ports():
    both = MACHINES["dual2"]
    assert both.sockets == (0, 1)
    arguments, nodes = numa_arguments(both), numa(both)
    assert "4,sockets=2,cores=2,threads=1" in arguments
    assert nodes[:4] == [
        "node,nodeid=0,cpus=0-1,memdev=m0,initiator=0",
        "node,nodeid=1,cpus=2-3,memdev=m1,initiator=1",
        "node,nodeid=2,memdev=m2,initiator=0",
        "node,nodeid=3,memdev=m3,initiator=1",
    ]
    rows = [[both.distance(source, target) for target in range(4)] for source in range(4)]
    assert rows == [[10, 21, 17, 25], [21, 10, 25, 17], [17, 25, 10, 29], [25, 17, 29, 10]]
    assert "dist,src=1,dst=3,val=17" in nodes and "dist,src=3,dst=0,val=25" in nodes
    speeds = [text for text in nodes if "target=3" in text and "access-latency" in text]
    assert [text.split(",")[1] + text[-4:] for text in speeds] == ["initiator=0=500", "initiator=1=250"]
    assert "pxb-pcie,id=pci1,bus=pcie.0,bus_nr=128,numa_node=1" in arguments
    assert not any("pxb" in text for text in numa_arguments(MACHINES["cxl2"]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cpus=2,mem=1G;cpus=1,mem=1G", "as many CPUs"),
        ("cpus=2,mem=1G;mem=1G,at=1", "one of the sockets 0 to 0"),
    ],
)
def test_sockets_and_cards_that_make_no_machine_are_refused(text, message):
    with pytest.raises(VmError, match=message):
        parse_nodes(text)
