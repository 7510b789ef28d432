"""The roof: the fastest that this machine's memory lets a kernel be, from loops that only move the kernel's bytes."""

import time
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from lightning_cxl.native import _cpu, _membench

_CALIBRATION_RUNS = 5
# prefetchers of all CPUs we know follow at least so many places at once
_MAX_PLACES = 8
_LINE = 64


class Stream(NamedTuple):
    """Bytes that are touched once, in order."""

    address: int
    nbytes: int
    access: int


def read(tensor: torch.Tensor) -> Stream:
    """Return the stream of a dense tensor that a kernel reads."""
    return Stream(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _membench.READ)


def update(tensor: torch.Tensor) -> Stream:
    """Return the stream of a dense tensor that a kernel reads and writes in place."""
    return Stream(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _membench.UPDATE)


def write(tensor: torch.Tensor) -> Stream:
    """Return the stream of a dense tensor, aligned to a cache line, that is overwritten past the caches."""
    return Stream(tensor.data_ptr(), tensor.numel() * tensor.element_size(), _membench.WRITE_PAST_CACHE)


class Roof:
    """One pass over the bytes of a kernel; contents stay as they are, except what is only written. Call it to run it.

    What is fastest differs from CPU to CPU by up to a tenth: how wide loads are, and whether a thread walks one place
    of a tensor or several. All are tried, and the fastest is the roof.

    Args:
        groups: per span of the kernel, the streams that it walks side by side.
        num_threads: as many as the kernel uses.
        max_places: of all streams together that a thread walks at once, at least one of each.
    """

    def __init__(self, groups: Sequence[Sequence[Stream]], num_threads: int, max_places: int = _MAX_PLACES) -> None:
        self.num_threads = num_threads
        self.isa, self._table = self._fastest(list(_variants(groups, max_places)))

    def __call__(self) -> None:
        """Run one pass."""
        _membench.sweep(self._table, self.num_threads, self.isa)

    def _fastest(self, variants: "list[tuple[str, array[int]]]") -> "tuple[str, array[int]]":
        """Return the variant with the fastest run, of several runs of each in turn."""
        best = [float("inf")] * len(variants)
        for _ in range(_CALIBRATION_RUNS):
            for index, (isa, table) in enumerate(variants):
                start = time.perf_counter()
                _membench.sweep(table, self.num_threads, isa)
                best[index] = min(best[index], time.perf_counter() - start)
        return variants[best.index(min(best))]


def _variants(groups: Sequence[Sequence[Stream]], max_places: int) -> "Iterator[tuple[str, array[int]]]":
    places = {1}
    if len(groups) == 1:
        places.add(max(1, max_places // len(groups[0])))
    for num_places in sorted(places):
        table = _table(groups, num_places)
        for isa in _cpu.supported_isas():
            yield isa, table


def _table(groups: Sequence[Sequence[Stream]], num_places: int) -> "array[int]":
    """Return the table for `_membench.sweep`, every stream cut into so many that are walked side by side."""
    table = array("Q")
    for index, group in enumerate(groups):
        for stream in group:
            length = stream.nbytes // num_places // _LINE * _LINE
            for place in range(num_places):
                begin = place * length
                end = stream.nbytes if place == num_places - 1 else begin + length
                table.extend((index, stream.address + begin, end - begin, stream.access))
    return table
