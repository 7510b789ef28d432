"""Reads and writes of the SSD tier against fio, a plain loop, and DeepSpeed's, on one disk.

    python examples/bench/ssd.py --folder FOLDER [--sizes 64KiB 16MiB ...] [--rounds 9] [--json FILE]

fio (io_uring and libaio, the fastest of several settings) and DeepSpeed's `aio_handle`, with which ZeRO-Infinity swaps
tensors, take part where they are installed; DeepSpeed compiles its own when it is first used, and needs libaio. All go
over the same bytes of one file, past the page cache, tensor after tensor; a write counts when it is on the disk.
Contenders take turns in random order; tables show medians, the spread of all rounds, and the median of the rounds'
ratios. The file is gone afterwards.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from ssd_bench.contenders import DiskContender, Job, clocked, fastest
from ssd_bench.turns import make_parser, run
from timing import reason

NAME = "DeepSpeed aio"
# bytes of a request, requests in flight, threads that share a tensor; the first setting is DeepSpeed's own
SETTINGS = ((1 << 20, 8, 1), (1 << 20, 32, 4), (8 << 20, 32, 1), (8 << 20, 8, 4))
# each request that is not waited for has the file open once more
MOST_PENDING = 512


class Swapper:
    """DeepSpeed's handles, and memory that it has locked: other memory it copies to and from such memory."""

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().load()
        self._memory: torch.Tensor | None = None
        self._owner: Any = None

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return locked bytes, the same ones at every call."""
        if self._memory is None or self._memory.numel() < nbytes:
            self._owner = self._handle(*SETTINGS[0])
            self._memory = self._owner.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
            self._memory.random_(256)
        return self._memory[:nbytes]

    def contender(self, job: Job, block_bytes: int, depth: int, threads: int, *, writes: bool) -> DiskContender:
        """Return reads or writes of all tensors of a job with one setting."""
        handle, path = self._handle(block_bytes, depth, threads), str(job.area.path)
        tensors = self.memory(job.nbytes).split(job.tensor_bytes)
        start: Callable[[torch.Tensor, str, int], int] = handle.async_pwrite if writes else handle.async_pread

        def swap() -> None:
            for batch in batches(len(tensors)):
                for index in batch:
                    if start(tensors[index], path, index * job.tensor_bytes) != 0:
                        raise OSError(f"DeepSpeed could not start with tensor {index}")
                handle.wait()

        name = f"{NAME}, {threads} x {depth} x {block_bytes >> 20} MiB"
        return DiskContender(name, lambda: clocked(job, swap, writes=writes))

    def _handle(self, block_bytes: int, depth: int, threads: int) -> Any:
        return self._module.aio_handle(
            block_size=block_bytes,
            queue_depth=depth,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=threads,
        )


def batches(count: int) -> Iterator[Sequence[int]]:
    for start in range(0, count, MOST_PENDING):
        yield range(start, min(start + MOST_PENDING, count))


def peers(swapper: Swapper, job: Job, *, writes: bool) -> list[DiskContender]:
    """Return DeepSpeed with its own setting, and with the fastest one where that is another."""
    all_settings = [swapper.contender(job, *setting, writes=writes) for setting in SETTINGS]
    best = fastest(all_settings)
    return [best] if best is all_settings[0] else [all_settings[0], best]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    args = parser.parse_args(arguments)
    try:
        swapper = Swapper()
    except Exception as error:  # whatever DeepSpeed and its compiler say
        print(f"{NAME}: skipped, {reason(error)}")
        run(parser, args, peers=None)
        return
    run(parser, args, peers=lambda job, writes: peers(swapper, job, writes=writes))


if __name__ == "__main__":
    main()
