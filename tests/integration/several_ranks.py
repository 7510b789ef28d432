"""A program that trains in two processes, and the launchers that start it: `Started`. A rank of it fails on demand."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, TensorDataset

import lightning_cxl
from tests.integration.training import make_trainer
from tests.models import Task, TinyTransformer

ROOT = Path(__file__).resolve().parents[2]
NUM_ROWS = 16


class Failing(Task):
    def __init__(self, asked) -> None:
        super().__init__(TinyTransformer(vocab=NUM_ROWS, dropout=0.0))
        self.asked, self.rows = asked, []

    def setup(self, stage):
        if self.fails("setup"):
            lightning_cxl.empty(1 << 40)

    def training_step(self, batch, batch_idx):
        self.rows += batch[0][:, 0].tolist()
        if self.global_step == 2:
            if self.asked.fail is not None and self.global_rank == 0:
                print("failing", flush=True)
            if self.fails("raise") or self.fails("raise, and save"):
                raise ValueError("this batch is bad")
            while self.fails("hang"):
                time.sleep(1)
        loss = super().training_step(batch, batch_idx)
        self.log("own", loss.detach())
        self.log("mean", loss.detach(), sync_dist=True)
        return loss

    def fails(self, how: str) -> bool:
        return self.asked.fail == how and self.global_rank == 1


@record
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--fail")
    parser.add_argument("--timeout", type=float)
    asked = parser.parse_args()
    seed_everything(3, verbose=False)
    timeout = None if asked.timeout is None else timedelta(seconds=asked.timeout)
    options = {"tiers": {"dram": "1GiB"}, "on_tier_full": "error", "replicate_machines": True, "timeout": timeout}
    saves = [ModelCheckpoint(asked.folder, save_on_exception=True)] if asked.fail == "raise, and save" else []
    trainer = make_trainer(
        options, devices=asked.devices, num_nodes=asked.machines, callbacks=saves, enable_checkpointing=bool(saves),
        max_epochs=1,
    )  # fmt: skip
    rows = torch.arange(NUM_ROWS).repeat_interleave(4).view(NUM_ROWS, 4)
    data = DataLoader(TensorDataset(rows, rows), batch_size=2)
    module = Failing(asked)
    trainer.fit(module, data)
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trainer.validate(module, data, verbose=False)
    ours = trainer.strategy
    found = {
        "ranks": [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size],
        "environment": type(ours.cluster_environment).__name__,
        "mesh": dict(zip(ours.device_mesh.mesh_dim_names, ours.device_mesh.shape, strict=True)),
        "rows": module.rows,
        "metrics": fitted,
        "from_1": ours.broadcast(trainer.global_rank, 1),
        "all_zero": ours.reduce_boolean_decision(trainer.is_global_zero),
        "any_zero": ours.reduce_boolean_decision(trainer.is_global_zero, all=False),
        "gathered": module.all_gather(torch.tensor(trainer.global_rank)).tolist(),
        "largest": ours.reduce(torch.tensor(trainer.global_rank), reduce_op="max").item(),
    }
    (asked.folder / f"rank_{trainer.global_rank}.json").write_text(json.dumps(found))


class Started:
    """Two ranks of a program, and the processes that a user of a launcher starts for them.

    Their output goes to `folder`: ``0.log``, ``1.log``. How often torchrun starts them again is `max_restarts`.
    """

    def __init__(
        self, launcher: str, folder: Path, *arguments: str, program: str = __file__, max_restarts: int = 0
    ) -> None:
        port = str(free_port())
        own = [str(Path(program).resolve()), str(folder), *arguments]
        python = [sys.executable, *own]
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        slurm = {
            "SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_NODEID": "0", "SLURM_NNODES": "1",
        }  # fmt: skip
        started = {
            "lightning": [({}, python)],
            "machines": [({**here, "NODE_RANK": str(n)}, [*python, "--machines=2", "--devices=1"]) for n in range(2)],
            "torchrun": [({}, [*torchrun, f"--max-restarts={max_restarts}", *own])],
            "slurm": [({**here, **slurm, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}, python) for n in range(2)],
        }[launcher]
        others = ("SLURM_", "MASTER_", "WORLD_", "ACCELERATE_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        clean.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        self._folder, self._processes = folder, []
        for number, (more, command) in enumerate(started):
            with (folder / f"{number}.log").open("w") as log:
                options = {"cwd": folder, "stdout": log, "stderr": log, "start_new_session": True}
                self._processes.append(subprocess.Popen(command, env={**clean, **more}, **options))

    def logs(self) -> list[str]:
        return [(self._folder / f"{number}.log").read_text() for number in range(len(self._processes))]

    def codes(self, seconds: float, look: Callable[[], object] = lambda: None) -> list[int]:
        """Wait until all processes have ended, also those of a rank of its own; return the exit codes."""
        end = time.monotonic() + seconds
        try:
            while any(process.poll() is None or processes_of(process.pid) for process in self._processes):
                look()
                assert time.monotonic() < end, "\n".join(text[-5000:] for text in self.logs())
                time.sleep(0.05)
            return [process.returncode for process in self._processes]
        finally:
            self.close()

    def close(self) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def processes_of(group):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _, number = stat.read_text().rpartition(")")[2].split()[:3]
            if int(number) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    main()
