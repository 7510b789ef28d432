"""Memory that processes share lies on its tier, whoever maps it and touches it."""

from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.numa import NumaResource
from lightning_cxl.memory.shared import ForeignSegment, SharedSegment
from lightning_cxl.memory.tier_pages import make_leaf
from lightning_cxl.native._numa import Mapping, Range, page_nodes

MIB = 2**20


def test_segments_lie_on_the_nodes_of_their_tiers(topology: Topology, cards):
    for tier in topology.tiers:
        segment = SharedSegment(64 * MIB, make_leaf(tier, topology, 2 * MIB))
        found = page_nodes(segment.address, segment.nbytes)
        assert set(found) == set(tier.node_ids) and sum(found.values()) == segment.nbytes
        other = ForeignSegment(segment.name)
        view = memoryview(Range(other.address, other.nbytes, other))
        view[::4096] = bytes(len(view[::4096]))  # another mapping touches every page
        assert page_nodes(other.address, other.nbytes) == found


def test_pages_that_are_given_back_can_lie_elsewhere(topology: Topology, cards):
    dram, card = (NumaResource(name, node, topology) for name, node in (("dram", 0), ("cxl", cards[0])))
    segment = SharedSegment(16 * MIB, dram)
    mapping = Mapping(segment.nbytes, fd=segment.name.fd)
    mapping.discard(0, segment.nbytes)
    card.commit(mapping, 0, segment.nbytes)
    assert page_nodes(mapping.address, segment.nbytes) == {cards[0]: segment.nbytes}
