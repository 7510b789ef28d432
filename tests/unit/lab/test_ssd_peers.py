"""`examples/bench/ssd.py`: DeepSpeed's swaps move every tensor of a job, with a module of ours in DeepSpeed's place."""

import importlib.machinery
import os
import sys
import types

import pytest
import ssd
import torch
from ssd_bench import fio
from ssd_bench.contenders import Job
from ssd_bench.disk_area import disk_area

MIB = 1 << 20


class Handle:
    """`aio_handle` as DeepSpeed's: what is started happens when it is waited for."""

    most_pending = 0

    def __init__(self, *, block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism):
        self.setting = (block_size, queue_depth, intra_op_parallelism)
        self.pending = []

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(numel, dtype=like.dtype)

    def async_pread(self, tensor, path, offset):
        return self._start(os.preadv, os.O_RDONLY, tensor, path, offset)

    def async_pwrite(self, tensor, path, offset):
        return self._start(os.pwritev, os.O_WRONLY, tensor, path, offset)

    def _start(self, call, flags, tensor, path, offset):
        assert tensor.is_contiguous() and isinstance(path, str)
        self.pending.append((call, flags, tensor, path, offset))
        Handle.most_pending = max(Handle.most_pending, len(self.pending))
        return 0

    def wait(self):
        for call, flags, tensor, path, offset in self.pending:
            file = os.open(path, flags)
            assert call(file, [tensor.numpy()], offset) == tensor.numel()
            os.close(file)
        self.pending.clear()


@pytest.fixture
def deepspeed(monkeypatch):
    module = types.SimpleNamespace(aio_handle=Handle)
    for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.op_builder"):
        fake = types.ModuleType(name)
        fake.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, fake)
    builder = types.SimpleNamespace(load=lambda: module)
    sys.modules["deepspeed.ops.op_builder"].AsyncIOBuilder = lambda: builder


@pytest.mark.parametrize("tensor_bytes", [4096, MIB, 3 * MIB])
def test_swaps_move_all_tensors_and_no_other_byte(deepspeed, tmp_path, tensor_bytes):
    Handle.most_pending = 0
    with disk_area(tmp_path, 4 * MIB) as area:
        job, swapper = Job(area, tensor_bytes), ssd.Swapper()
        before = area.path.read_bytes()
        memory = swapper.memory(job.nbytes)
        assert memory.data_ptr() == swapper.memory(job.nbytes).data_ptr()
        memory.zero_()
        swapper.contender(job, MIB, 8, 1, writes=False).go()
        assert memory.numpy().tobytes() == before[: job.nbytes]
        memory.random_(256)
        swapper.contender(job, MIB, 8, 1, writes=True).go()
        assert area.path.read_bytes() == memory.numpy().tobytes() + before[job.nbytes :]
    assert Handle.most_pending == min(job.nbytes // tensor_bytes, ssd.MOST_PENDING)


@pytest.mark.parametrize("installed", [True, False])
def test_the_script_runs_with_and_without_deepspeed(installed, request, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fio, "is_installed", lambda: False)
    if installed:
        request.getfixturevalue("deepspeed")
    else:
        monkeypatch.setitem(sys.modules, "deepspeed", None)
    ssd.main([f"--folder={tmp_path}", "--bytes=1MiB", "--sizes=1MiB", "--rounds=1"])
    shown = capsys.readouterr().out
    assert ("DeepSpeed aio: skipped, ModuleNotFoundError" in shown) == (not installed)
    # its own setting is there also where another one is faster
    assert shown.count(f"\n  {ssd.NAME}, 1 x 8 x 1 MiB") == (2 if installed else 0)
