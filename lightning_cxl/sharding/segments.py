"""`Segments`: the memory of this rank that others read, and theirs, which this rank reads."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch.distributed as dist

from lightning_cxl.memory.numa import PageNodes, page_locking
from lightning_cxl.memory.shared import ForeignSegment, SharedSegment
from lightning_cxl.sharding.agreement import on_all_ranks


class PageLock(Protocol):
    """Page-locks memory for a device: a `DeviceType`."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock a range."""

    def unregister(self, address: int) -> None:
        """Undo `register`. Never raises."""


class Segments:
    """Segments of each rank of a group, mapped by all of them, until `close`. All ranks make it.

    Args:
        page_lock: page-locks all segments for this rank's device; None for no device.
        where: asks where pages are, after that; None where they can only be in one place.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[SharedSegment]],
        group: Any,
        page_lock: PageLock | None = None,
        where: PageNodes | None = None,
    ) -> None:
        self._page_lock = page_lock
        self._locked: list[int] = []
        self.own: list[SharedSegment] = []
        self.others: dict[int, list[ForeignSegment]] = {}
        """By rank in the group. Each rank begins with its neighbour, so that not all read the same one at once."""

        def fill() -> Any:
            self.own.extend(make())
            return [segment.name for segment in self.own]

        names = on_all_ranks(fill, group)
        self.pids = [own[0].pid for own in names]
        rank = dist.get_rank(group)

        def map_others() -> None:
            self._lock(self.own)
            for other in ((rank + step) % len(names) for step in range(1, len(names))):
                self.others[other] = [ForeignSegment(name) for name in names[other]]
                self._lock(self.others[other])
            for segment in self.own if page_lock is not None else ():
                segment.check_nodes(where)

        try:
            on_all_ranks(map_others, group)
        except BaseException:
            self.close()
            raise
        for segment in self.own:
            segment.lock_door()

    def close(self) -> None:
        """Let go of the segments of the others. What was handed out of this rank's own ones stays. Idempotent."""
        for address in self._locked:
            assert self._page_lock is not None
            self._page_lock.unregister(address)
        self._locked = []
        self.others = {}

    def _lock(self, segments: Sequence[SharedSegment | ForeignSegment]) -> None:
        for segment in segments if self._page_lock is not None else ():
            assert self._page_lock is not None
            with page_locking(segment.nbytes):
                self._page_lock.register(segment.address, segment.nbytes)
            self._locked.append(segment.address)
