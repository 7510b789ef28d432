"""What `test_weight_memory` measures: does things with a model of 400 MiB and prints what memory each took, as JSON.

    python tests/integration/weight_memory.py FOLDER

Reads one task a line, and answers with one line. Each task runs in a child of its own. Counted is memory that is
nobody's cache: RssAnon and RssShmem of the kernel, at the start, at most, and at the end.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

import lightning_cxl
from lightning_cxl.config import OffloadConfig
from lightning_cxl.run.checkpoint import load_file, save_file
from lightning_cxl.run.run import Host

MIB = 2**20
WIDTH, DEPTH = 1448, 50  # 8 MiB a layer, 400 MiB in all


def memory_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


class Peak:
    """Samples memory while a region runs."""

    def __init__(self, measure: Callable[[], int] = memory_bytes) -> None:
        self.measure = measure

    def __enter__(self) -> "Peak":
        self.start = self.peak = self.measure()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def look(self) -> int:
        """Return what there is more than at the start."""
        now = self.measure()
        self.peak = max(self.peak, now)
        return now - self.start

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.look()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.end = self.start + self.look()  # on a busy machine the last sample may be old


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def make() -> nn.Module:
    with torch.device("meta"):
        model = layers()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(0.5)
    return model


def load(folder: Path, dtype: torch.dtype | None, run: bool) -> tuple[Callable[[], object], nn.Module]:
    with lightning_cxl.empty_weights():
        model = layers()
    host = Host(OffloadConfig(), torch.device("cpu"))

    def work() -> None:
        with host.activate() if run else nullcontext():
            lightning_cxl.load_weights(model, folder, dtype=dtype)

    return work, model


def prepare(task: str, folder: Path) -> tuple[Callable[[], object], object]:
    """Return what to measure, and what must stay alive meanwhile."""
    dtype = torch.bfloat16 if "bf16" in task else None
    if task.startswith("load"):
        return load(folder / "model", dtype, "run" in task)
    if task.startswith("save"):
        model = make()
        return lambda: lightning_cxl.save_weights(model, folder / "saved", "100MiB", dtype), model
    if task.startswith("checkpoint of views"):
        views = nn.ParameterList(torch.full((DEPTH, WIDTH, WIDTH), 0.5).unbind())
        return lambda: save_file({"state_dict": views.state_dict()}, folder / "views.ckpt"), views
    assert task == "resume"
    model = make()
    optimizer = lightning_cxl.CPUAdam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    save_file({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}, folder / "c.ckpt")

    def resume() -> None:
        read = load_file(folder / "c.ckpt", "cpu", True)
        model.load_state_dict(read["state_dict"])
        optimizer.load_state_dict(read["optimizer_states"][0])

    return resume, model


def answer(task: str, folder: Path) -> dict[str, float]:
    """Do a task in a process that has done nothing before, and return what memory it takes."""
    torch.set_num_threads(1)
    lightning_cxl.save_weights(nn.Linear(2, 2), folder / "warm")  # what is imported and allocated once
    small = nn.Linear(2, 2)
    lightning_cxl.load_weights(small, folder / "warm")
    save_file({"state_dict": small.state_dict()}, folder / "warm.ckpt")
    if task == "make":
        lightning_cxl.save_weights(make(), folder / "model", "100MiB")
        return {}
    work, alive = prepare(task, folder)
    with Peak() as peak:
        work()
    model_bytes = sum(p.nbytes for p in alive.parameters()) if isinstance(alive, nn.Module) else 0
    added = {"peak_mib": (peak.peak - peak.start) / MIB, "end_mib": (peak.end - peak.start) / MIB}
    return {"model_mib": model_bytes / MIB, **added}


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            print(json.dumps(answer(line.strip(), Path(sys.argv[1]))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("null", flush=True)  # its error is on stderr


if __name__ == "__main__":
    main()
