"""Per-step memory for activations: one reserved address range whose pages come and go at its end."""

from collections import deque

from lightning_cxl.errors import TierFullError
from lightning_cxl.memory.adaptors import whole_pages
from lightning_cxl.memory.blocks import BlockList
from lightning_cxl.memory.numa import HUGE_PAGE_BYTES, PageSource, reserve
from lightning_cxl.memory.reclaim import ReclaimingResource
from lightning_cxl.memory.resource import Buffer, Span, cut_spans
from lightning_cxl.units import format_bytes

STEP_BYTES = 32 * 2**20
_STEPS_KEPT = 4
_SHRINK_BELOW_FRACTION = 0.75


class ArenaResource(ReclaimingResource):
    """Hands out the lowest free addresses of one reserved range and backs them as the high-water mark grows.

    Growth never moves a tensor. `end_step` gives the pages above the highest mark of the last four steps back when
    that mark is below three quarters of what is backed. Thread-safe.

    Args:
        source: backs the range with memory, and charges budgets for it.
        reserve_bytes: size of the range; costs addresses, no memory.
        step_bytes: the range grows to a multiple of this, a multiple of 2 MiB. While it is small, it grows by about a
            quarter instead, so that a small run does not take 32 MiB for its first input.
        least_bytes: such a small step is a multiple of this.
    """

    def __init__(
        self,
        source: PageSource,
        reserve_bytes: int,
        *,
        step_bytes: int = STEP_BYTES,
        least_bytes: int = HUGE_PAGE_BYTES,
    ) -> None:
        super().__init__()
        self._source = source
        self._step_bytes = step_bytes
        self._least_bytes = least_bytes
        self._mapping = reserve(reserve_bytes, HUGE_PAGE_BYTES, source)
        self._blocks = BlockList()
        self._blocks.add_range(0, self._mapping.nbytes)
        self._used_bytes = 0
        self._backed = 0  # bytes, from the start of the range
        self._spans: list[Span] = []  # of the backed part
        self._step_mark = 0
        self._marks: deque[int] = deque(maxlen=_STEPS_KEPT)

    def allocate(self, nbytes: int, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes`, aligned.

        Raises:
            TierFullError: budget, node or range exhausted; what was backed before stays.
        """
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        with self._lock:
            self._drain()
            offset = self._blocks.allocate(nbytes, alignment, lowest=True)
            if offset is None:
                raise TierFullError(
                    f"cannot place {format_bytes(nbytes)} in the arena of tier `{self._source.tier_name}`: its range "
                    f"of {format_bytes(self._mapping.nbytes)} has no gap that large. Raise the tier's budget."
                )
            end = offset + nbytes
            try:
                if end > self._backed:
                    self._grow(end)
                spans = cut_spans(self._spans, offset, nbytes)
            except BaseException:
                self._blocks.free(offset)
                raise
            self._used_bytes += nbytes
            self._step_mark = max(self._step_mark, end)
            return Buffer(self._mapping.address + offset, nbytes, spans, self, self._mapping)

    def end_step(self) -> None:
        """Say that a training step is over: the range shrinks when the last steps needed much less than is backed."""
        with self._lock:
            self._drain()
            top = self._blocks.end_of_use(0)
            self._marks.append(self._step_mark)
            self._step_mark = top
            keep = max(*self._marks, top)
            if len(self._marks) == _STEPS_KEPT and keep < self._backed * _SHRINK_BELOW_FRACTION:
                self._shrink(-(-keep // self._step_bytes) * self._step_bytes)

    def usage(self) -> tuple[int, int]:
        """Return the bytes in living buffers and the bytes that are backed."""
        with self._lock:
            self._drain()
            return self._used_bytes, self._backed

    def _grow(self, end: int) -> None:
        """Back the range up to `end` and some more; near the end of a budget by less and less more."""
        quarter = -(-end // 4 // self._least_bytes) * self._least_bytes
        units = (min(self._step_bytes, quarter), HUGE_PAGE_BYTES)
        sizes = [min(-(-end // unit) * unit, self._mapping.nbytes) for unit in units]
        for size in sizes:
            try:
                return self._back_up_to(size)
            except TierFullError:
                continue
        self._back_up_to(whole_pages(end))

    def _back_up_to(self, end: int) -> None:
        spans = self._source.commit(self._mapping, self._backed, end - self._backed)
        for span in spans:
            last = self._spans[-1] if self._spans else None
            if last is not None and (last.tier, last.node_id) == (span.tier, span.node_id):
                self._spans[-1] = Span(last.tier, last.node_id, last.offset, last.nbytes + span.nbytes)
            else:
                self._spans.append(span)
        self._backed = end

    def _shrink(self, end: int) -> None:
        if end >= self._backed:
            return
        self._mapping.discard(end, self._backed - end)
        gone = cut_spans(self._spans, end, self._backed - end)
        self._spans = list(cut_spans(self._spans, 0, end))
        self._source.release(gone)
        self._backed = end

    def _take_back(self, address: int, nbytes: int) -> None:
        self._used_bytes -= nbytes
        self._blocks.free(address - self._mapping.address)

    def _release_free(self) -> None:
        # whole huge pages: the kernel gives back a part of one only when it has split it
        self._shrink(-(-self._blocks.end_of_use(0) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
