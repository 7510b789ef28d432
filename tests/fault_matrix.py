"""What a user sees when a training meets a fault, what is left, and how it goes on: a table.

    python -m tests.fault_matrix [--only WORD] [--json FILE]

A small model trains with optimizer state on SSD, a checkpoint every two steps and eight steps in all. Each fault comes
in the sixth step, in a process of its own. Then the training is resumed from the newest checkpoint that loads, and its
last weights are compared with those of a training without a fault. Needs root.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

FAULT_AT, NUM_STEPS = 5, 8

JOB = """
import glob, multiprocessing, os, signal, sys, time, zlib
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
import lightning_cxl
from tests.models import InStep, Task, no_dropout, token_data

folder, fault, resume = sys.argv[1:4]
torch.set_num_threads(1)

class Module(InStep, Task):
    def training_step(self, batch, index):
        if self.global_step == FAULT_AT and fault:
            happen()
        return super().training_step(batch, index)

def happen():
    if fault in ("SIGKILL", "SIGTERM", "SIGINT"):
        os.kill(os.getpid(), getattr(signal, fault))
    elif fault == "clock":
        real = time.time
        time.time = lambda: real() - 86400
    elif fault == "tier":
        lightning_cxl.empty((1 << 30,), tier="dram")
    elif fault == "group":
        held = []
        while True:
            held.append(b"x" * (64 << 20))
            time.sleep(0.05)
    elif fault == "waits":
        time.sleep(60)
    elif fault == "worker":
        multiprocessing.active_children()[0].kill()
    elif fault == "drive":
        for each in glob.glob("/proc/self/fd/*"):  # they have no name
            if os.path.realpath(each).startswith(ssd) and os.path.getsize(each) > 1 << 12:
                os.truncate(each, 0)

ssd = os.path.join(folder, "ssd")
os.makedirs(ssd, exist_ok=True)
options = {"tiers": {"ssd": {"path": ssd}}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}
if fault == "tier":
    options = {"tiers": {"dram": "64MiB"}, "on_tier_full": "error"}
pl.seed_everything(1)
saves = ModelCheckpoint(os.path.join(folder, "checkpoints"), "{step}", every_n_train_steps=2, save_top_k=-1)
trainer = pl.Trainer(
    accelerator="cpu", strategy=lightning_cxl.CXLOffloadStrategy(**options), max_steps=NUM_STEPS, callbacks=[saves],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
module = Module(no_dropout(), scheduler=False)
print("starts", flush=True)
data = DataLoader(token_data().dataset, 2, num_workers=fault == "worker")
trainer.fit(module, data, ckpt_path=resume or None)
print("weights", zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in module.parameters())))
""".replace("FAULT_AT", str(FAULT_AT)).replace("NUM_STEPS", str(NUM_STEPS))


class Ended(NamedTuple):
    status: int
    said: str
    """The error; of a process that was killed what `env --last` says."""
    weights: str | None


def train(folder: Path, fault: str = "", resume: Path | None = None, before: tuple[str, ...] = ()) -> Ended:
    # the cache has records of trainings that were killed
    options = {"capture_output": True, "text": True, "timeout": 300}
    options["env"] = {**os.environ, "LIGHTNING_CXL_CACHE": str(folder.parent / "cache")}
    done = subprocess.run([*before, sys.executable, "-c", JOB, str(folder), fault, str(resume or "")], **options)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Interrupt|Exception|Exit)\b", line)]
    found = re.search(r"weights (\d+)", done.stdout)
    said = (errors or lines or [""])[-1]
    if done.returncode == -9:
        said = subprocess.run([sys.executable, "-m", "lightning_cxl", "env", "--last"], **options).stdout.strip()
    return Ended(done.returncode, said, found and found[1])


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("*"), key=lambda path: int(re.findall(r"\d+", path.name)[0]))


def resumed(folder: Path) -> tuple[str, Ended]:
    """Resume from the newest checkpoint that loads; returns from which, and how that ended."""
    refusals = []
    for path in reversed(checkpoints(folder)):
        ended = train(folder, resume=path)
        if ended.weights is not None:
            return f"{path.name}{f', after {refusals[-1]}' if refusals else ''}", ended
        refusals.append(f"`{path.name}`: {ended.said}")
    return "; ".join(refusals) or "no checkpoint", train(folder)


def disk_full(folder: Path) -> Ended:
    """The folder of checkpoints has room for one and a half of them."""
    size = checkpoints(folder.parent / "plain")[0].stat().st_size * 3 // 2
    target = folder / "checkpoints"
    target.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)], check=True)
    try:
        ended = train(folder)
        shutil.copytree(target, folder / "kept")
    finally:
        subprocess.run(["umount", str(target)], check=True)
    target.rmdir()
    (folder / "kept").rename(target)
    return ended


def group_full(folder: Path) -> Ended:
    """The training is in a control group that may have 2 GiB, and takes more."""
    from tests.integration.test_memory_limits import own_group

    version, parent = own_group() or (0, Path())
    group = parent / f"fault-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(2 << 30))
        return train(folder, "group", before=("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"))
    finally:
        time.sleep(0.5)
        group.rmdir()


def cut_checkpoint(folder: Path) -> Ended:
    ended = train(folder, "SIGKILL")
    newest = checkpoints(folder)[-1]
    os.truncate(newest, newest.stat().st_size // 2)
    return ended


def flipped_checkpoint(folder: Path) -> Ended:
    ended = train(folder, "SIGKILL")
    newest = checkpoints(folder)[-1]
    with zipfile.ZipFile(newest) as archive:  # between entries there are bytes that nobody reads
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    data = bytearray(newest.read_bytes())
    data[largest.header_offset + largest.file_size // 2] ^= 4
    newest.write_bytes(data)
    return ended


def same_folder(folder: Path) -> Ended:
    """Another training that goes on has the folder on SSD."""
    command = [sys.executable, "-c", JOB, str(folder), "waits", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        assert other.stdout is not None
        other.stdout.readline()
        while not checkpoints(folder):
            time.sleep(0.1)
        ended = train(folder)
        other.kill()
    return ended


# what happens to a folder, or a fault that the training makes itself
FAULTS: dict[str, Callable[[Path], Ended] | str] = {
    "SIGKILL": "SIGKILL", "SIGTERM": "SIGTERM", "Ctrl-C": "SIGINT", "a tier that is full": "tier",
    "a control group that is full": group_full, "a worker of the DataLoader dies": "worker",
    "the disk of the checkpoints is full": disk_full, "data files on SSD are emptied": "drive",
    "the newest checkpoint is cut off": cut_checkpoint, "a bit of the newest checkpoint flips": flipped_checkpoint,
    "two trainings with one folder on SSD": same_folder, "the clock goes back by a day": "clock",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        plain = train(Path(name) / "plain")
        if plain.weights is None:
            sys.exit(f"the training without a fault fails: {plain.said}")
        for fault, happen in FAULTS.items():
            if asked.only not in fault:
                continue
            folder = Path(name) / re.sub(r"\W+", "-", fault)
            ended = train(folder, happen) if isinstance(happen, str) else happen(folder)
            left = ", ".join(path.name for path in checkpoints(folder))
            how = "goes on" if ended.weights is not None else f"status {ended.status}"
            source, after = ("", ended) if ended.weights is not None else resumed(folder)
            row = {"fault": fault, "ended": how, "said": ended.said, "left": left, "resumed from": source}
            rows.append({**row, "same weights": after.weights == plain.weights})
            print("\n".join(f"{key}: {value}" for key, value in rows[-1].items()), end="\n\n", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1))
    sys.exit(0 if all(row["same weights"] for row in rows) else 1)


if __name__ == "__main__":
    main()
