"""`share_weights`: the shards of the ranks of one machine lie in memory that all of them map, and no gather is sent.

Each rank has a segment (`memory/shared.py`) with its counters and its shards of all units, which it alone writes. All
others map it, and FSDP2 calls a `SharedGather` in the place of a gather. Who may read and write when:
[Note: Turns at shared weights].

The memory of a machine is counted once: pages lie on the tier of the rank that owns the shard, and its budget alone is
charged. What the kernel shows as a process's own memory does not contain them; `RssShmem` counts the pages of the
others, too, as far as a process has read them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.numa import PageSource
from lightning_cxl.memory.shared import SharedSegment, segment_bytes
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.same_machine import Place, own_place, why_apart
from lightning_cxl.sharding.segments import PageLock, Segments
from lightning_cxl.sharding.shared_gather import SharedGather, SharedShard
from lightning_cxl.sharding.torch_private import (
    FsdpUnit,
    flat_shard,
    fsdp_units,
    gathered_dtype,
    move_shard,
    shard_name,
)
from lightning_cxl.sharding.turns import Counters, Peer, Turns, counters_bytes

_TIMEOUT_S = 1800.0  # as long as torch.distributed waits for a rank with gloo


class SharedWeights:
    """The shards of a model in shared memory, until `close`.

    Args:
        units: of the model.
        segments: of all ranks, with the shards of the units in them.
        turns: who may read and write.
    """

    def __init__(self, units: Sequence[FsdpUnit], segments: Segments, turns: Turns) -> None:
        self.segment = segments.own
        self._units = units
        self._segments = segments
        self._turns = turns
        self._before = [unit.gather for unit in units]
        self._number = {unit.module: number for number, unit in enumerate(units)}
        self._closed = False

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that are gathered, each by itself."""
        return list(self._number)

    @contextmanager
    def writing(self, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Return a region in which this rank may write its shards: an update, or weights from a checkpoint.

        All ranks must enter it alike, each time, also where one of them has nothing to write.

        Args:
            modules: of `modules`; None for all.

        Raises:
            LostRankError: another rank has ended, or does not come.
            ValueError: weights are not shared any more, or a module is not one of `modules`, or it is being written.
        """
        if self._closed:
            raise ValueError("the weights are not shared any more: `close` has been called")
        unknown = [module for module in modules or () if module not in self._number]
        if unknown:
            raise ValueError(f"{type(unknown[0]).__name__} is none of the {len(self._number)} units that are shared")
        with self._turns.writing(None if modules is None else [self._number[module] for module in modules]):
            yield

    def close(self) -> None:
        """Let FSDP2 gather again as before; all ranks do it at the same step, and none waits for another. Idempotent.

        Shards stay where they are: this rank's memory is free when the parameters are, and the others have let go.
        """
        if self._closed:
            return
        self._closed = True
        for unit, gather in zip(self._units, self._before, strict=True):
            unit.module.set_custom_all_gather(gather)
        self._turns.close()
        self._segments.close()


def share_weights(
    model: nn.Module,
    source: PageSource,
    *,
    host_group: Any = None,
    timeout_s: float = _TIMEOUT_S,
    page_lock: PageLock | None = None,
    finish_reads: Callable[[], None] = lambda: None,
) -> SharedWeights:
    """Move the shards of all units of a model into shared memory, and let FSDP2 read there in the place of a gather.

    All ranks of the group that shards the model call it, before anything keeps the memory of the shards (an optimizer
    that looks at local tensors): parameters stay the objects that they are, their local tensors change.

    Args:
        model: with units made by ``fully_shard``, all sharded over one group; not meta, nothing gathered now.
        source: the tier on which this rank's shards lie; its budget is charged.
        host_group: a group of the same ranks that exchanges objects of the host; None: the group that shards the model.
        timeout_s: how long a rank waits for another one that is alive.
        page_lock: page-locks all segments for this rank's device, until `SharedWeights.close`; None for no device.
        finish_reads: waits until the device has done all copies that it was told.

    Raises:
        UnsupportedError: ranks run on several machines, cannot map each other's memory, or units are not of this kind.
        TierFullError: no room for the shards on the tier of one rank.
        PinnedMemoryError: a rank cannot page-lock a segment.
    """
    units = fsdp_units(model)
    group = _one_group(units)
    host_group = _same_ranks(group, host_group)
    sizes = [_checked_bytes(shard) for unit in units for shard in unit.shards]
    facts = on_all_ranks(lambda: (own_place(), sizes), host_group)
    _check([place for place, _ in facts], [sizes for _, sizes in facts])

    shards: list[list[SharedShard]] = []
    counters_size = counters_bytes(len(units))

    def fill() -> SharedSegment:
        segment = SharedSegment(segment_bytes([counters_size, *sizes]), source)
        counters.append(Counters(segment.allocate(counters_size), len(units)))
        shards.extend([_move(shard, segment) for shard in unit.shards] for unit in units)
        return segment

    counters: list[Counters] = []
    segments = Segments(fill, host_group, page_lock)
    at = segments.own.offset(counters[0].buffer)
    peers = [
        Peer(rank, segments.pids[rank], Counters(other.part(at, counters_size), len(units)))
        for rank, other in segments.others.items()
    ]
    turns = Turns(counters[0], peers, len(units), timeout_s=timeout_s, finish_reads=finish_reads)
    shared = SharedWeights(units, segments, turns)
    for number, unit in enumerate(units):
        gather = SharedGather(number, shards[number], segments.others, group, turns, unit.gather)
        unit.module.set_custom_all_gather(gather)
    return shared


def _checked_bytes(shard: Any) -> int:
    flat = flat_shard(shard)
    if flat.device.type != "cpu" or type(flat) is not Tensor:
        raise UnsupportedError(
            f"the shard of `{shard_name(shard)}` is a {type(flat).__name__} on `{flat.device}`: only plain tensors in "
            "host memory can be shared"
        )
    return flat.nbytes


def _move(shard: Any, segment: SharedSegment) -> SharedShard:
    flat = flat_shard(shard)
    buffer = segment.allocate(flat.nbytes)
    moved = buffer.tensor(flat.shape, flat.dtype)
    moved.copy_(flat)
    move_shard(shard, moved)
    return SharedShard(
        shard_name(shard),
        segment.offset(buffer),
        flat.numel(),
        flat.dtype,
        lambda: gathered_dtype(shard),
        lambda: flat_shard(shard) is moved,
    )


def _one_group(units: Sequence[FsdpUnit]) -> Any:
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


def _same_ranks(group: Any, host_group: Any) -> Any:
    if host_group is None:
        return group
    ranks, others = dist.get_process_group_ranks(group), dist.get_process_group_ranks(host_group)
    if ranks != others:
        raise ValueError(f"host_group has the ranks {others}, but the model is sharded over {ranks}")
    return host_group


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
