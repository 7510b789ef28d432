"""Stripe contiguous memory by weight over several nodes or tiers, so that their bandwidths add up."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, PAGE_BYTES, PageSource, allocate_pages
from lightning_cxl.memory.resource import Buffer, Span
from lightning_cxl.native._numa import Mapping
from lightning_cxl.units import format_bytes

Parts = list[tuple[int, int]]
"""(offset, nbytes) of parts of a mapping, in order."""


class _Thread(threading.local):
    full: set[str] | None = None  # what `lending` was given on this thread


class StripedResource:
    """One contiguous range per buffer; each child backs its weighted share of the stripes.

    The kernel's own weighted interleave needs root and one system-wide set of weights; binding sub-ranges needs
    neither, but each border costs the kernel an entry of a limited table (see `stripe_bytes_for`). The children's turns
    run on from one range to the next, so small ranges are spread too.

    Args:
        children: what backs the stripes, and weights. They share inheritance. Those of one tier have nothing to
            release; those that have are of a tier each.
        stripe_bytes: granularity, a multiple of 2 MiB.
        strict: refuse where a child has no room for its share, except in `lending`. Otherwise it leaves its share to
            the others.
        turns: not for strict ones, a number for each child: those with a higher one get a stripe when all with a lower
            one have no room for it. None: all take part from the start.
    """

    def __init__(
        self,
        children: Sequence[tuple[PageSource, float]],
        stripe_bytes: int = HUGE_PAGE_BYTES,
        *,
        strict: bool = False,
        turns: Sequence[int] | None = None,
    ) -> None:
        if not children or any(not weight > 0 for _, weight in children):
            raise ValueError("a StripedResource needs at least one child, and weights above zero")
        if stripe_bytes < HUGE_PAGE_BYTES or stripe_bytes % HUGE_PAGE_BYTES:
            raise ValueError(f"stripe_bytes must be a multiple of {HUGE_PAGE_BYTES}, got {stripe_bytes}")
        self._children = [child for child, _ in children]
        self._of_tier = {child.tier_name: child for child in self._children}
        self.tier_name = "` and `".join(self._of_tier)
        self.inherit = self._children[0].inherit
        total = sum(weight for _, weight in children)
        self._shares = [weight / total for _, weight in children]
        self._stripe_bytes = stripe_bytes
        self._strict = strict
        self._turns = [0] * len(children) if turns is None else list(turns)
        self._thread = _Thread()
        self._credit = [0.0] * len(children)  # bytes each child is behind its share, over all ranges so far
        self._lock = threading.Lock()

    @contextmanager
    def lending(self, full: set[str]) -> Iterator[None]:
        """Let children without room leave their share to the others, in this thread, until exit.

        It reaches through the pools and adaptors that lie between whoever decides this and here.

        Args:
            full: gets the tiers of such children. OUT.
        """
        self._thread.full = full
        try:
            yield
        finally:
            self._thread.full = None

    def free_bytes(self) -> int:
        """Return what all children have free together."""
        return sum(child.free_bytes() for child in self._children)

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return `nbytes` of contiguous memory striped over the children."""
        return allocate_pages(self, nbytes, alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Tell the children what they do not back any more; the mapping dies with its buffer."""
        self.release(buffer.spans)

    def release(self, spans: Sequence[Span]) -> None:
        """Tell the children what they do not back any more."""
        for span in spans:
            self._of_tier[span.tier].release((span,))

    def commit(self, mapping: Mapping, offset: int, nbytes: int) -> tuple[Span, ...]:
        """Back a range stripe by stripe."""
        return self.back(mapping, [(offset, nbytes)])

    def back(self, mapping: Mapping, parts: Sequence[tuple[int, int]]) -> tuple[Span, ...]:
        """Back parts of a range stripe by stripe."""
        lend = not self._strict or self._thread.full is not None
        free = [child.free_bytes() for child in self._children]
        while True:
            plan, gained, full = self._plan(parts, free, lend)
            child, spans = 0, list[Span]()
            try:
                for child, own in enumerate(plan):
                    spans += self._children[child].back(mapping, own) if own else ()
            except BaseException as error:
                for offset, nbytes in parts:
                    mapping.discard(offset, nbytes)
                self.release(spans)
                if not lend or not isinstance(error, TierFullError):
                    raise
                free[child] = 0  # one child fewer each time, so this ends
            else:
                break
        with self._lock:
            self._credit = [before + more for before, more in zip(self._credit, gained, strict=True)]
        if self._thread.full is not None:
            self._thread.full.update(self._children[child].tier_name for child in full)
        return tuple(sorted(spans, key=lambda span: span.offset))

    def _plan(
        self, parts: Sequence[tuple[int, int]], free: Sequence[int], lend: bool
    ) -> tuple[list[Parts], list[float], set[int]]:
        """Give each stripe to the child furthest behind its share.

        Returns:
            The parts of each child; how far each falls behind by that; the children that had no room for a stripe.
        """
        left, start = list(free), self._credit
        credit = list(start)
        plan: list[Parts] = [[] for _ in left]
        full: set[int] = set()
        everyone = range(len(left))
        for position, end in ((offset, offset + nbytes) for offset, nbytes in parts):
            while position < end:
                size = min(self._stripe_bytes - position % self._stripe_bytes, end - position)
                able = [child for child in everyone if left[child] >= size] if lend else everyone
                turn = min((self._turns[child] for child in able), default=0)
                able = [child for child in able if self._turns[child] == turn]
                full.update(child for child in everyone if left[child] < size)
                share = sum(self._shares[child] for child in able)
                for index in able:
                    credit[index] += size * self._shares[index] / share
                child = max(able, key=credit.__getitem__, default=0)
                if left[child] < size:
                    raise TierFullError(self._full_message(sum(nbytes for _, nbytes in parts), free))
                credit[child] -= size
                left[child] -= size
                if plan[child] and sum(plan[child][-1]) == position:
                    plan[child][-1] = (plan[child][-1][0], plan[child][-1][1] + size)
                else:
                    plan[child].append((position, size))
                position += size
        return plan, [after - before for after, before in zip(credit, start, strict=True)], full

    def _full_message(self, nbytes: int, free: Sequence[int]) -> str:
        return (
            f"cannot place {format_bytes(nbytes)} on tier `{self.tier_name}`: its parts have "
            f"{', '.join(format_bytes(room) for room in free)} free. Use a smaller job, or allow another tier."
        )


def stripe_bytes_for(capacity_bytes: int, max_stripes: int = 32768) -> int:
    """Return the smallest stripe that keeps memory of `capacity_bytes` within `max_stripes` stripes.

    Each stripe is a mapping entry of the process, and ``vm.max_map_count`` is 65530 by default. So the capacity is that
    of all tiers together, however buffers are divided over them; half of the table is left for everything else.
    """
    return max(1, -(-capacity_bytes // (max_stripes * HUGE_PAGE_BYTES))) * HUGE_PAGE_BYTES
