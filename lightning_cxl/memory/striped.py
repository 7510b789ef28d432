"""Stripe contiguous memory over several nodes by weight, so that their bandwidths add up."""

from collections.abc import Sequence

from lightning_cxl._numa import Mapping
from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, PAGE_BYTES, NumaResource, allocate_pages
from lightning_cxl.memory.resource import Buffer, Span
from lightning_cxl.units import format_bytes


class StripedResource:
    """One contiguous range per buffer; each child backs its weighted share of the stripes.

    The kernel's own weighted interleave needs root and one system-wide set of weights; binding sub-ranges needs
    neither, but each border costs the kernel an entry of a limited table: choose `stripe_bytes` for the tier's size
    (see `stripe_bytes_for`). The children's turns run on from one range to the next, so small ranges are spread too.

    Args:
        children: leaves and their weights, in the proportion of their bandwidths. They share tier and inheritance.
        stripe_bytes: granularity, a multiple of 2 MiB.
    """

    def __init__(self, children: Sequence[tuple[NumaResource, float]], stripe_bytes: int = HUGE_PAGE_BYTES) -> None:
        if not children or any(not weight > 0 for _, weight in children):
            raise ValueError("a StripedResource needs at least one child, and weights above zero")
        if stripe_bytes < HUGE_PAGE_BYTES or stripe_bytes % HUGE_PAGE_BYTES:
            raise ValueError(f"stripe_bytes must be a multiple of {HUGE_PAGE_BYTES}, got {stripe_bytes}")
        self.tier_name = children[0][0].tier_name
        self.inherit = children[0][0].inherit
        self._leaves = [leaf for leaf, _ in children]
        total = sum(weight for _, weight in children)
        self._shares = [weight / total for _, weight in children]
        self._stripe_bytes = stripe_bytes
        self._credit = [0.0] * len(children)  # bytes each child is behind its share, over all ranges so far

    def free_bytes(self) -> int:
        """Return what all children have free together."""
        return sum(leaf.free_bytes() for leaf in self._leaves)

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return `nbytes` of contiguous memory striped over the children."""
        return allocate_pages(self, nbytes, alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Nothing to do: the mapping dies with its buffer."""

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Back a range stripe by stripe; a child that turns out to be full leaves its share to the others."""
        free = [leaf.free_bytes() for leaf in self._leaves]
        while True:
            parts = self._plan(offset, nbytes, free)
            spans: list[Span] = []
            try:
                for child, begin, size in parts:
                    spans.extend(self._leaves[child].back(mapping, begin, size))
            except TierFullError:
                # one child fewer each time, so this ends
                free[child] = 0
                mapping.discard(offset, nbytes)
            except BaseException:
                mapping.discard(offset, nbytes)
                raise
            else:
                return tuple(spans)

    def _plan(self, offset: int, nbytes: int, free: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (child, offset, size) per part: each stripe goes to the child furthest behind its share."""
        left = list(free)
        credit = list(self._credit)
        parts: list[tuple[int, int, int]] = []
        position, end = offset, offset + nbytes
        while position < end:
            size = min(self._stripe_bytes - position % self._stripe_bytes, end - position)
            able = [child for child, room in enumerate(left) if room >= size]
            if not able:
                raise TierFullError(
                    f"cannot place {format_bytes(nbytes)} on tier `{self.tier_name}`: its nodes have "
                    f"{', '.join(format_bytes(room) for room in free)} free. Use a smaller job, or allow another tier."
                )
            share = sum(self._shares[child] for child in able)
            for index in able:
                credit[index] += size * self._shares[index] / share
            child = max(able, key=credit.__getitem__)
            credit[child] -= size
            left[child] -= size
            if parts and parts[-1][0] == child:
                parts[-1] = (child, parts[-1][1], parts[-1][2] + size)
            else:
                parts.append((child, position, size))
            position += size
        self._credit = credit
        return parts


def stripe_bytes_for(capacity_bytes: int, max_stripes: int = 16384) -> int:
    """Return the smallest stripe that keeps a tier of `capacity_bytes` within `max_stripes` stripes.

    Each stripe is a mapping entry of the process, and ``vm.max_map_count`` is 65530 by default.
    """
    return max(1, -(-capacity_bytes // (max_stripes * HUGE_PAGE_BYTES))) * HUGE_PAGE_BYTES
