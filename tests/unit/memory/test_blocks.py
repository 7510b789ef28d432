import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lightning_cxl.memory.resource import BlockList

RANGES = {0: 4096, 4096: 8192, 20480: 1 << 16}  # the first two touch


class Blocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockList()
        for offset, nbytes in RANGES.items():
            self.blocks.add_range(offset, nbytes)
        self.live: dict[int, int] = {}

    @rule(nbytes=st.integers(1, 9000), shift=st.integers(0, 13))
    def allocate(self, nbytes: int, shift: int) -> None:
        offset = self.blocks.allocate(nbytes, 1 << shift)
        if offset is None:
            assert not any(self.fits(start, end, nbytes, 1 << shift) for start, end in self.gaps())
            return
        assert offset % (1 << shift) == 0
        assert any(start <= offset and offset + nbytes <= end for start, end in self.gaps())
        self.live[offset] = -(-nbytes // 64) * 64

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.live:
            offset = data.draw(st.sampled_from(sorted(self.live)))
            self.blocks.free(offset)
            del self.live[offset]

    def gaps(self) -> list[tuple[int, int]]:
        """Return the free parts as the live blocks leave them."""
        gaps = []
        for start, nbytes in RANGES.items():
            position = start
            for offset in sorted(o for o in self.live if start <= o < start + nbytes):
                gaps.append((position, offset))
                position = offset + self.live[offset]
            gaps.append((position, start + nbytes))
        return [gap for gap in gaps if gap[0] < gap[1]]

    def fits(self, start: int, end: int, nbytes: int, alignment: int) -> bool:
        return -(-start // alignment) * alignment + -(-nbytes // 64) * 64 <= end

    @invariant()
    def ranges_are_free_exactly_when_nothing_lives_in_them(self) -> None:
        expected = [start for start, size in RANGES.items() if not any(start <= o < start + size for o in self.live)]
        assert self.blocks.free_ranges() == expected


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def test_a_range_in_use_cannot_be_dropped() -> None:
    blocks = BlockList()
    blocks.add_range(0, 4096)
    offset = blocks.allocate(64, 64)

    with pytest.raises(ValueError, match="in use"):
        blocks.drop_range(0)
    blocks.free(offset)
    assert blocks.drop_range(0) == 4096
    assert blocks.allocate(1, 1) is None
