from collections import Counter
from collections.abc import Sequence

import pytest

from lightning_cxl.errors import TierFullError
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.resource import NumaResource, Span, StripedResource, stripe_bytes_for
from lightning_cxl.native._numa import NOWHERE, Mapping, page_nodes

MIB = 2**20


class Card(NumaResource):
    """A leaf that pretends to be node `label` and really uses node 0; `full` makes it fail when it backs memory."""

    def __init__(self, label: int, free: int = 1024 * MIB, full: bool = False) -> None:
        super().__init__("cxl", 0, Topology.fake(dram=("64GiB",), cxl=()), free_bytes=lambda: free)
        self.label = label
        self.full = full

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        spans = super().back(mapping, parts)
        if self.full:
            raise TierFullError(f"card {self.label} is full")
        return tuple(Span(span.tier, self.label, span.offset, span.nbytes) for span in spans)


def bytes_by_card(spans: tuple[Span, ...]) -> Counter[int]:
    count: Counter[int] = Counter()
    for span in spans:
        count[span.node_id] += span.nbytes
    return count


def test_stripes_follow_the_weights() -> None:
    buffer = StripedResource([(Card(1), 3.0), (Card(2), 1.0)]).allocate(64 * MIB)

    assert bytes_by_card(buffer.spans) == {1: 48 * MIB, 2: 16 * MIB}
    assert max(span.nbytes for span in buffer.spans if span.node_id == 2) == 2 * MIB
    assert page_nodes(buffer.address, buffer.nbytes) == {0: 64 * MIB}


def test_a_nearly_full_card_gets_only_what_it_holds() -> None:
    buffer = StripedResource([(Card(1, free=5 * MIB), 1.0), (Card(2), 1.0)]).allocate(32 * MIB)

    assert bytes_by_card(buffer.spans) == {1: 4 * MIB, 2: 28 * MIB}


def test_when_all_are_full_nothing_stays_backed() -> None:
    resource = StripedResource([(Card(1, full=True), 1.0), (Card(2, full=True), 1.0)])
    mapping = Mapping(8 * MIB)

    with pytest.raises(TierFullError, match=r"cannot place 8\.0 MiB on tier `cxl`"):
        resource.back(mapping, [(0, 8 * MIB)])
    assert page_nodes(mapping.address, mapping.nbytes) == {NOWHERE: 8 * MIB}


@pytest.mark.parametrize("capacity, expected", [(0, 2), (2**30, 2), (64 * 2**30, 2), (2**40, 32), (2**40 + 1, 34)])
def test_stripes_grow_with_the_tier_so_that_the_kernel_can_count_them(capacity: int, expected: int) -> None:
    assert stripe_bytes_for(capacity) == expected * MIB


def test_a_turn_comes_when_all_before_it_are_full() -> None:
    near, also_near, far = Card(1, free=9 * MIB), Card(2, free=9 * MIB), Card(3)
    resource = StripedResource([(far, 1.0), (near, 1.0), (also_near, 1.0)], turns=[21, 10, 10])

    buffer = resource.allocate(12 * MIB)
    assert bytes_by_card(buffer.spans) == {1: 6 * MIB, 2: 6 * MIB}
    buffer = resource.allocate(32 * MIB)
    assert bytes_by_card(buffer.spans) == {1: 8 * MIB, 2: 8 * MIB, 3: 16 * MIB}
    assert [span.node_id for span in buffer.spans][-1] == 3


def test_a_turn_comes_when_one_before_it_turns_out_to_be_full() -> None:
    buffer = StripedResource([(Card(1, full=True), 1.0), (Card(2), 1.0)], turns=[10, 21]).allocate(8 * MIB)

    assert bytes_by_card(buffer.spans) == {2: 8 * MIB}
