"""`SharedGather`: what FSDP2 calls to gather a unit whose shards all ranks of the machine can read.

FSDP2 gives an output for the whole unit: the parts of the ranks one after the other, each the rank's shards, padded and
flat, in their order. It has written this rank's own part already, cast where computing uses another dtype. The parts of
the others are copied from their segments: by the CPU, with torch's threads, or by the device over its own link, before
what FSDP2 puts into its stream next.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.shared import ForeignSegment
from lightning_cxl.sharding.turns import Turns
from lightning_cxl.transfer.engine import TransferEngine


class Gather(Protocol):
    """What ``FSDPModule.set_custom_all_gather`` takes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an output."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Fill `output_tensor`; `input_tensor` is this rank's part of it, and filled. Returns what to wait for."""


@dataclass(frozen=True, slots=True)
class SharedShard:
    """One sharded parameter, which is as large on all ranks.

    Args:
        gathered_dtype: asked at the first gather: FSDP2 settles it with the first forward.
    """

    name: str
    numel: int
    dtype: torch.dtype
    gathered_dtype: Callable[[], torch.dtype]
    is_in_place: Callable[[], bool]


class Lies(NamedTuple):
    """Where a shard is on one rank."""

    segment: int
    """Which of the rank's segments."""
    offset: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours in the memory of one rank that are copied as one.

    Args:
        begin: in the part of the rank, in elements of the output.
        cast: to which dtype it is cast before it is taken as bytes; None where the copy casts, or nothing does.
    """

    begin: int
    length: int
    source: Tensor
    cast: torch.dtype | None


class SharedGather:
    """Gathers one unit.

    Args:
        segments: of the other ranks, by rank in the group, in the order in which they are read.
        otherwise: gathers what is not in shared memory: parameters that were sharded anew after a forward.
    """

    def __init__(
        self,
        unit: int,
        shards: Sequence[SharedShard],
        lies: Sequence[Sequence[Lies]],
        segments: Mapping[int, Sequence[ForeignSegment]],
        group: Any,
        turns: Turns,
        engine: TransferEngine,
        otherwise: Gather,
    ) -> None:
        self._unit = unit
        self._shards = shards
        self._lies = lies
        self._segments = segments
        self._group = group
        self._turns = turns
        self._engine = engine
        self._otherwise = otherwise
        self._runs: dict[torch.dtype, dict[int, list[_Run]]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an output, the same as before. FSDP2 asks before it copies this rank's own part in."""
        if self._turns.is_inherited:
            raise UnsupportedError(
                "a forked child cannot gather weights: only its parent is a rank. Let a DataLoader worker or another "
                "child leave the model alone, or start it with `spawn` and give it a copy of what it needs."
            )
        return self._otherwise.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Copy the parts of the others; there is nothing to wait for but the stream."""
        if group is not self._group:
            return self._otherwise(output_tensor, input_tensor, group, async_op)
        for shard in self._shards:
            if not shard.is_in_place():
                raise ValueError(
                    f"the shard of `{shard.name}` has been replaced, and what the other ranks read is out of date. "
                    "Write into sharded parameters (`copy_`) and do not assign others or convert the model while "
                    "weights are shared; or train with share_weights=False."
                )
        dtype = output_tensor.dtype
        if dtype not in self._runs:
            self._runs[dtype] = {rank: list(self._runs_of(rank, dtype)) for rank in self._segments}
        length = input_tensor.numel()
        try:
            self._turns.come(self._unit)
            for rank, runs in self._runs[dtype].items():
                part = output_tensor.narrow(0, rank * length, length)
                for run in runs:
                    self._copy(part.narrow(0, run.begin, run.length), run.source, run.cast)
        except BaseException:
            with suppress(Exception):  # of a device that has failed, too; the first error is shown
                self._turns.give_up(self._unit)
            raise
        self._turns.leave(self._unit)
        return None

    def _runs_of(self, rank: int, dtype: torch.dtype) -> Iterator[_Run]:
        """Yield what is copied from a rank for an output of `dtype`: neighbours of one dtype together."""
        lies, begin = self._lies[rank], 0
        for first, end in _neighbours(self._shards, lies):
            shard, numel = self._shards[first], sum(each.numel for each in self._shards[first:end])
            gathered = shard.gathered_dtype()
            as_bytes = gathered != dtype  # parameters of several dtypes are gathered as bytes
            segment = self._segments[rank][lies[first].segment]
            source = segment.part(lies[first].offset, numel * shard.dtype.itemsize).tensor((numel,), shard.dtype)
            length = numel * gathered.itemsize if as_bytes else numel
            yield _Run(begin, length, source, gathered if as_bytes else None)
            begin += length

    def _copy(self, target: Tensor, source: Tensor, cast: torch.dtype | None) -> None:
        if not self._engine.computes_on_host:
            whole = cast is None and target.dtype == source.dtype
            # torch would cast on the host, and wait
            arrived = target if whole else torch.empty_like(source, device=target.device)
            self._engine.h2d(source, arrived).wait()
            if whole:
                return
            source = arrived
        target.copy_(source if cast is None else source.to(cast).view(target.dtype))


def _neighbours(shards: Sequence[SharedShard], lies: Sequence[Lies]) -> Iterator[tuple[int, int]]:
    """Yield the first of shards that lie one behind the other, and the one after the last of them."""
    kinds = [(shard.dtype, shard.gathered_dtype()) for shard in shards]
    ends = [Lies(at.segment, at.offset + s.numel * s.dtype.itemsize) for s, at in zip(shards, lies, strict=True)]
    first = 0
    for index in range(1, len(shards) + 1):
        if index == len(shards) or lies[index] != ends[index - 1] or kinds[index] != kinds[index - 1]:
            yield first, index
            first = index
