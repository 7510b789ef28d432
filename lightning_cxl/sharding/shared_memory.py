"""`share_weights`: the shards of the ranks of one machine lie in memory that all of them map, and no gather is sent.

Each rank has segments (`memory/shared.py`), one or more for each place that its shards belong to, with its counters in
the first; it alone writes them. All others map them, and FSDP2 calls a `SharedGather` in the place of a gather. Who may
read and write when: [Note: Turns at shared weights].

The memory of a machine is counted once: pages lie on the tier of the rank that owns the shard, and its budget alone is
charged. What the kernel shows as a process's own memory does not contain them; `RssShmem` counts the pages of the
others, too, as far as a process has read them.
"""

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.numa import PageNodes
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.memory.shared import ForeignSegment, SharedSegment, segment_bytes
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.fsdp import fill_home
from lightning_cxl.sharding.host_shard import HostShard
from lightning_cxl.sharding.same_machine import Place, own_place, why_apart
from lightning_cxl.sharding.segments import PageLock, Segments
from lightning_cxl.sharding.shared_gather import Lies, SharedGather, SharedShard
from lightning_cxl.sharding.torch_private import (
    FsdpUnit,
    flat_shard,
    fsdp_units,
    gathered_dtype,
    padded_size,
    shard_name,
    timeout_s,
)
from lightning_cxl.sharding.turns import Counters, Peer, Turns, counters_bytes
from lightning_cxl.shards import local
from lightning_cxl.transfer.engine import TransferEngine

_TIMEOUT_S = 1800.0  # where the backend of a group does not say; torch's own
_SEGMENT_BYTES = 16 * 2**30  # a segment is page-locked in one piece, and no driver does that above 128 GiB


class SharedPlaces(Protocol):
    """Says where shards lie, and gives the memory there."""

    def place(self, parameter: nn.Parameter, nbytes: int) -> Hashable:
        """Return where a shard of `nbytes`, with its padding, belongs; what is equal lies together."""

    def back(self, place: Any, nbytes: int, fd: int) -> Buffer:
        """Give the memory of one place to a file; see `BackFile`."""


class SharedWeights:
    """The shards of a model in shared memory, until `close`.

    Args:
        segments: of all ranks, with the shards of the units in them.
    """

    def __init__(self, units: Sequence[FsdpUnit], segments: Segments, turns: Turns) -> None:
        self._units = units
        self._segments = segments
        self._turns = turns
        self._before = [unit.gather for unit in units]
        self._closed = False

    def close(self) -> None:
        """Let FSDP2 gather again as before; all ranks do it at the same step. Idempotent.

        Shards stay where they are: this rank's memory is free when the parameters are, and the others have let go.
        In a forked child, nothing: the run is its parent's.
        """
        if self._closed or self._turns.is_inherited:
            return
        self._closed = True
        for unit, gather in zip(self._units, self._before, strict=True):
            unit.module.set_custom_all_gather(gather)
        self._turns.close()
        for unit in self._units:
            _read_by_others(unit, None)
        self._segments.close()


def share_weights(
    model: nn.Module,
    places: SharedPlaces,
    engine: TransferEngine,
    *,
    page_lock: PageLock | None = None,
    where: PageNodes | None = None,
) -> SharedWeights:
    """Move the shards of all units of a model into shared memory, and let FSDP2 read there in the place of a gather.

    All ranks of the group that shards the model call it, before anything keeps the memory of the shards (an optimizer
    that looks at local tensors): parameters stay the objects that they are, their local tensors change.

    Args:
        model: with units made by ``fully_shard``, all sharded over one group; not meta, nothing gathered now.
        page_lock: page-locks all segments for this rank's device, until `SharedWeights.close`; None for no device.
        where: asks where pages are, after page-locking; None where they can only be in one place.
    """
    units = fsdp_units(model)
    group = group_of(units)
    managed = [each for unit in units for each in unit.shards]
    sizes = [_checked_bytes(each) for each in managed]
    facts = on_all_ranks(lambda: (own_place(), sizes), group)
    _check([place for place, _ in facts], [sizes for _, sizes in facts])

    own = _OwnMemory(places, counters_bytes(len(units)))
    peers: list[Peer] = []
    with ExitStack() as undo:  # nothing of it is left after an error
        segments = Segments(lambda: own.make(managed, sizes), group, page_lock, where)
        undo.callback(segments.close)
        lies = on_all_ranks(lambda: own.lies, group)

        def meet() -> None:
            for rank, other in segments.others.items():
                counters = Counters(_part(other, lies[rank][0], own.counters.nbytes), len(units))
                peers.append(Peer(rank, segments.pids[rank], counters))
                undo.callback(peers[-1].close)

        on_all_ranks(meet, group)
        on_all_ranks(own.fill, group)  # last: where one rank has no room, say, the shards of all stay where they are
        limit = timeout_s(group) or _TIMEOUT_S
        turns = Turns(Counters(own.counters, len(units)), peers, len(units), timeout_s=limit, device=engine.device)
        shared = SharedWeights(units, segments, turns)
        undo.callback(shared.close)
        ends = list(accumulate((len(unit.shards) for unit in units), initial=1))  # the first is of the counters
        for number, unit in enumerate(units):
            where_lies = [of_rank[ends[number] : ends[number + 1]] for of_rank in lies]
            shards = [_shared_shard(each) for each in unit.shards]
            gather = SharedGather(number, shards, where_lies, segments.others, group, turns, engine, unit.gather)
            unit.module.set_custom_all_gather(gather)
            _read_by_others(unit, partial(turns.wait_read, number))
        undo.pop_all()
    return shared


class _OwnMemory:
    """The segments of this rank."""

    def __init__(self, places: SharedPlaces, counters_nbytes: int) -> None:
        self._places = places
        self._counters_nbytes = counters_nbytes
        self._homes: list[tuple[Any, Buffer]] = []
        self.lies: list[Lies] = []
        """Where the counters are, and each shard."""
        self.counters: Buffer

    def make(self, managed: Sequence[Any], sizes: Sequence[int]) -> list[SharedSegment]:
        """Return new segments with room for shards of these sizes."""
        sizes_of: list[list[int]] = []  # of each segment
        place_of: list[Hashable] = []
        last: dict[Hashable, int] = {}  # the segment of a place that is being filled
        numbers = []
        for each, size in zip(managed, sizes, strict=True):
            place = self._places.place(each.sharded_param, size)
            if place not in last or sum(sizes_of[last[place]]) + size > _SEGMENT_BYTES:
                last[place] = len(sizes_of)
                sizes_of.append([] if sizes_of else [self._counters_nbytes])
                place_of.append(place)
            sizes_of[last[place]].append(size)
            numbers.append(last[place])
        segments = [
            SharedSegment(segment_bytes(parts), partial(self._places.back, place))
            for place, parts in zip(place_of, sizes_of, strict=True)
        ]
        self.counters = segments[0].allocate(self._counters_nbytes)
        self.lies = [Lies(0, segments[0].offset(self.counters))]
        for each, size, number in zip(managed, sizes, numbers, strict=True):
            buffer = segments[number].allocate(size)
            self._homes.append((each, buffer))
            self.lies.append(Lies(number, segments[number].offset(buffer)))
        return segments

    def fill(self) -> None:
        """Move the shards there."""
        for each, buffer in self._homes:
            dtype = local(each.sharded_param).dtype
            fill_home(each, buffer.tensor((buffer.nbytes // dtype.itemsize,), dtype))
        self._homes = []


def _part(segments: Sequence[ForeignSegment], lies: Lies, nbytes: int) -> Buffer:
    return segments[lies.segment].part(lies.offset, nbytes)


def _checked_bytes(managed: Any) -> int:
    shard = managed.sharded_param._local_tensor
    if not isinstance(shard, HostShard) and (shard.device.type != "cpu" or type(shard) is not Tensor):
        raise UnsupportedError(
            f"the shard of `{shard_name(managed)}` is a {type(shard).__name__} on `{shard.device}`: only plain tensors "
            "in host memory can be shared"
        )
    return int(padded_size(managed).numel()) * int(shard.dtype.itemsize)


def _shared_shard(managed: Any) -> SharedShard:
    flat = flat_shard(managed)
    return SharedShard(
        shard_name(managed),
        padded_size(managed).numel(),
        flat.dtype,
        lambda: gathered_dtype(managed),
        lambda: flat_shard(managed) is flat,
    )


def _read_by_others(unit: FsdpUnit, wait: Callable[[], None] | None) -> None:
    for managed in unit.shards:
        shard = managed.sharded_param._local_tensor
        if isinstance(shard, HostShard):
            shard.read_by_others(wait)


def group_of(units: Sequence[FsdpUnit]) -> Any:
    """Return the group of ranks that all units are sharded over."""
    if not units:
        raise UnsupportedError("the model has no units that are gathered: apply `fully_shard` to its blocks first")
    group = units[0].process_group
    for unit in units:
        kind = type(unit.module).__name__
        if unit.num_groups > 1:
            raise UnsupportedError(
                f"{kind} shards its parameters over {unit.num_groups} meshes (`shard_placement_fn`): no gather of "
                "one's own can be set for it. Make the parts that differ units of their own."
            )
        if unit.process_group is not group:
            raise UnsupportedError(
                f"{kind} is sharded over ranks {dist.get_process_group_ranks(unit.process_group)}, the first unit over "
                f"{dist.get_process_group_ranks(group)}: weights are shared by one group of ranks."
            )
    return group


def _check(places: Sequence[Place], sizes: Sequence[list[int]]) -> None:
    reason = why_apart(places)
    if reason is not None:
        raise UnsupportedError(
            f"weights cannot be shared: {reason}. Gather them (share_weights=False), or use a mesh of two dimensions "
            "whose last one, over which weights are sharded, stays inside a machine (HSDP)."
        )
    for rank, other in enumerate(sizes):
        if other != sizes[0]:
            raise UnsupportedError(
                f"weights cannot be shared: rank {rank} of the group has shards of {sum(other)} bytes in "
                f"{len(other)} parameters, rank 0 {sum(sizes[0])} bytes in {len(sizes[0])}"
            )
