"""`SharedGather`: what FSDP2 calls to gather a unit whose shards all ranks of the machine can read.

FSDP2 gives an output for the whole unit: the parts of the ranks one after the other, each the rank's shards, padded and
flat, in their order. It has written this rank's own part already, cast where computing uses another dtype. The parts of
the others are copied from their segments: by the CPU, with torch's threads, or by the device over its own link, in the
stream that FSDP2 gathers in.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_cxl.memory.shared import ForeignSegment
from lightning_cxl.sharding.turns import Turns


class Gather(Protocol):
    """What ``FSDPModule.set_custom_all_gather`` takes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an output."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Fill `output_tensor`; `input_tensor` is this rank's part of it, and filled. Returns what to wait for."""


@dataclass(frozen=True, slots=True)
class SharedShard:
    """One sharded parameter; it lies at the same offset in the segments of all ranks.

    Args:
        name: of the parameter, for messages.
        offset: in the segment, in bytes.
        numel: with padding.
        dtype: in the segment.
        gathered_dtype: asked at the first gather: FSDP2 settles it with the first forward.
        is_in_place: whether this rank's part is still what FSDP2 has.
    """

    name: str
    offset: int
    numel: int
    dtype: torch.dtype
    gathered_dtype: Callable[[], torch.dtype]
    is_in_place: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbours in memory that are copied as one.

    Args:
        begin: in the part of a rank, in elements of the output.
        length: in elements of the output.
        sources: by rank.
        cast: to which dtype they are cast before they are taken as bytes; None where the copy casts, or nothing does.
    """

    begin: int
    length: int
    sources: Mapping[int, Tensor]
    cast: torch.dtype | None


class SharedGather:
    """Gathers one unit.

    Args:
        unit: its number in `turns`.
        shards: its parameters, in the order in which FSDP2 gathers them.
        segments: of the other ranks, by rank in the group, in the order in which they are read.
        group: over which the unit is sharded.
        turns: when it may be read.
        otherwise: gathers what is not in shared memory: parameters that were sharded anew after a forward.
    """

    def __init__(
        self,
        unit: int,
        shards: Sequence[SharedShard],
        segments: Mapping[int, ForeignSegment],
        group: Any,
        turns: Turns,
        otherwise: Gather,
    ) -> None:
        self._unit = unit
        self._shards = shards
        self._group = group
        self._turns = turns
        self._otherwise = otherwise
        self._segments = segments
        self._runs: dict[torch.dtype, list[_Run]] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for an output, from where it came before."""
        return self._otherwise.allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Copy the parts of the others; there is nothing to wait for but the stream.

        Raises:
            LostRankError: another rank has ended, or does not come.
            ValueError: a shard has been moved out of shared memory, or is being written.
        """
        if group is not self._group:
            return self._otherwise(output_tensor, input_tensor, group, async_op)
        for shard in self._shards:
            if not shard.is_in_place():
                raise ValueError(
                    f"the shard of `{shard.name}` has been replaced, and what the other ranks read is out of date. "
                    "Write into sharded parameters (`copy_`) and do not assign others or convert the model while "
                    "weights are shared; or share them afterwards."
                )
        dtype = output_tensor.dtype
        if dtype not in self._runs:
            self._runs[dtype] = list(_runs(self._shards, self._segments, dtype))
        self._turns.wait_written(self._unit)
        length = input_tensor.numel()
        for rank in self._segments:
            part = output_tensor.narrow(0, rank * length, length)
            for run in self._runs[dtype]:
                _copy(part.narrow(0, run.begin, run.length), run.sources[rank], run.cast)
        return None


def _runs(shards: Sequence[SharedShard], segments: Mapping[int, ForeignSegment], dtype: torch.dtype) -> Iterator[_Run]:
    """Yield what is copied from each rank for an output of `dtype`: neighbours of one dtype together."""
    begin = 0
    for run in _neighbours(shards):
        gathered = run[0].gathered_dtype()
        as_bytes = gathered != dtype  # parameters of several dtypes are gathered as bytes
        numel = sum(shard.numel for shard in run)
        sources = {
            rank: segment.part(run[0].offset, numel * run[0].dtype.itemsize).tensor((numel,), run[0].dtype)
            for rank, segment in segments.items()
        }
        length = numel * gathered.itemsize if as_bytes else numel
        yield _Run(begin, length, sources, gathered if as_bytes else None)
        begin += length


def _neighbours(shards: Sequence[SharedShard]) -> Iterator[list[SharedShard]]:
    run: list[SharedShard] = []
    for shard in shards:
        if run and (
            run[-1].offset + run[-1].numel * run[-1].dtype.itemsize != shard.offset
            or (run[-1].dtype, run[-1].gathered_dtype()) != (shard.dtype, shard.gathered_dtype())
        ):
            yield run
            run = []
        run.append(shard)
    yield run


def _copy(target: Tensor, source: Tensor, cast: torch.dtype | None) -> None:
    if target.device != source.device and (cast or target.dtype) != source.dtype:
        # torch would cast on the host, and wait
        source = source.to(target.device, non_blocking=True)
    if cast is not None:
        source = source.to(cast).view(target.dtype)
    target.copy_(source, non_blocking=True)
