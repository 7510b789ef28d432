"""Peak host memory of one job whose optimizer state lies on a drive: this package beside DeepSpeed's ZeRO-Infinity.

The job of `examples/bench/ssd_state.py` (a Llama of 206 M parameters in bfloat16 with float32 state, byte tokens, one
sequence of 64, the CPU as accelerator). Every contender is a process of its own; they run one after the other, in a new
random order each round. A tiny run comes first in each, so that what libraries take at their first use does not count.

*Grown* is what the process grew by at the peak: anonymous memory (`RssAnon`, sampled every 2 ms), in bytes per
parameter. *High water* is the kernel's own peak of all resident memory (`VmHWM`), less what was resident before.

* in memory: all state in memory; in every mode of ours the losses must be equal bit for bit.
* ssd: optimizer state on the drive.
* ssd, streamed: the same, and weights of units stream, so that a unit is updated as soon as its gradients are there.
* ssd, streamed, small units: the same, with attention and MLP of a block as units of their own.
* ssd, streamed, smallest units: the same, every matrix of a block is a unit.
* zero-3 cpu: DeepSpeed's ZeRO-3 with optimizer and parameters in memory.
* zero-3 nvme: the optimizer on the drive, with DeepSpeed's defaults.
* zero-3 nvme, small: the same, with buckets and groups as small as a block or a matrix of this model.
* zero-infinity, small: the same, and the parameters on the drive. DeepSpeed's default, five buffers of 1e8 elements
  each, does not run with this model: "Not enough buffers 0 for swapping 1".

DeepSpeed compiles two extensions at their first use: it needs a C++ compiler, `ninja` and libaio with its headers.
Install it in an environment of its own, with this package: `DS_ACCELERATOR=cpu pip install --no-build-isolation
deepspeed ninja`.

    python examples/bench/against_deepspeed_nvme.py --folder DIR [--rounds 3] [--steps 4] [--only NAME ...]
"""

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from own_memory import Growth, status_bytes
from results import Results, machine, print_columns
from ssd_state import SHAPES, Job, batches, make_model

import lightning_cxl

ON_SSD = {"tier_rules": {"*": {"optimizer_state": "ssd"}}}
STREAMED = {**ON_SSD, "stream_weights": True, "overlap_step": True, "on_overflow": "ignore"}
OURS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "ssd": ON_SSD,
    "ssd, streamed": STREAMED,
    "ssd, streamed, small units": {**STREAMED, "units": ["LlamaAttention", "LlamaMLP"]},
    "ssd, streamed, smallest units": {**STREAMED, "units": ["Linear"]},
}
MATRIX, BLOCK = 2_900_000, 13_000_000  # elements: the largest of the model, and all of one block
SMALL = {
    "sub_group_size": BLOCK, "reduce_bucket_size": MATRIX, "stage3_prefetch_bucket_size": MATRIX,
    "stage3_max_live_parameters": BLOCK, "stage3_max_reuse_distance": 0,
}  # fmt: skip
CPU: dict[str, Any] = {"device": "cpu", "pin_memory": False}
NVME: dict[str, Any] = {"device": "nvme", "nvme_path": "FOLDER"}
THEIRS: dict[str, dict[str, Any]] = {
    "zero-3 cpu": {"offload_optimizer": CPU, "offload_param": CPU},
    "zero-3 nvme": {"offload_optimizer": NVME, "offload_param": CPU},
    "zero-3 nvme, small": {**SMALL, "offload_optimizer": NVME, "offload_param": CPU},
    "zero-infinity, small": {
        **SMALL, "offload_optimizer": NVME,
        "offload_param": {**NVME, "max_in_cpu": 0, "buffer_count": 40, "buffer_size": MATRIX},
    },
}  # fmt: skip
BASE = "zero-infinity, small"
GOALS = {"ssd, streamed": 0.557, "ssd, streamed, small units": 0.557, "ssd, streamed, smallest units": 0.70}


# -- a child: one contender --------------------------------------------------------------------------------------------


class NotedJob(Job):
    """A job that keeps its losses, and when each step began."""

    def __init__(self, size: str) -> None:
        super().__init__(size)
        self.losses: list[float] = []
        self.begins: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.begins.append(time.perf_counter())
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


def run_ours(name: str, size: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train with this package."""
    options = dict(OURS[name])
    if "tier_rules" in options:
        options["tiers"] = {"ssd": {"path": str(folder), "budget": "8GiB"}}
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=lightning_cxl.CXLOffloadStrategy(**options), max_steps=steps,
        precision="bf16-true", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    job = NotedJob(size)
    trainer.fit(job)
    return {
        "losses": job.losses,
        "seconds": [later - earlier for earlier, later in itertools.pairwise(job.begins)],
        "num_parameters": sum(each.numel() for each in job.parameters()),
    }


def run_theirs(name: str, size: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train with DeepSpeed."""
    import deepspeed

    options = json.loads(json.dumps(THEIRS[name]).replace("FOLDER", str(folder)))
    if size == "tiny" and "buffer_size" in options["offload_param"]:
        options["offload_param"]["buffer_size"] = 20_000  # what it locks in memory is not given back
    model = make_model(size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **options},
    }
    num_parameters = sum(each.numel() for each in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses: list[float] = []
    seconds: list[float] = []
    for tokens in itertools.islice(batches(), steps):
        begin = time.perf_counter()
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        del loss
    engine.destroy()
    return {"losses": losses, "seconds": seconds[1:], "num_parameters": num_parameters}


def child(name: str, size: str, steps: int, folder: Path) -> None:
    """Train, and print what the process grew by."""
    warnings.simplefilter("ignore")
    if name in THEIRS:
        port = str(random.SystemRandom().randrange(20000, 40000))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    run = run_theirs if name in THEIRS else run_ours
    for each in ("tiny", "measured"):
        (folder / each).mkdir()
    run(name, "tiny", 2, folder / "tiny")
    Path("/proc/self/clear_refs").write_text("5")  # the high water mark starts again
    before = status_bytes("VmRSS")
    growth = Growth()
    growth.start()
    found = run(name, size, steps, folder / "measured")
    print(json.dumps({**found, "grown": growth.stop(), "high_water": status_bytes("VmHWM") - before}), flush=True)


# -- the parent --------------------------------------------------------------------------------------------------------


def measure(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Run one contender; None if it cannot run."""
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--folder", str(folder)]
    command += ["--size", options.size, "--steps", str(options.steps)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    finally:
        shutil.rmtree(folder)
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"losses"')]
    if not lines:
        print(f"{name} did not run: {(ended.stderr.strip().splitlines() or ['no output'])[-1]}", flush=True)
        return None
    return json.loads(lines[-1])


def show(found: dict[str, list[dict[str, Any]]], results: Results) -> None:
    """Print and judge the medians."""
    grown: dict[str, float] = {}
    rows = [("bytes per parameter", "grown", "high water", "s per step", "last loss")]
    for name, runs in found.items():
        count = runs[0]["num_parameters"]
        grown[name] = statistics.median(each["grown"] for each in runs) / count
        high = statistics.median(each["high_water"] for each in runs) / count
        seconds = statistics.median(second for each in runs for second in each["seconds"])
        rows.append((name, f"{grown[name]:.2f}", f"{high:.2f}", f"{seconds:.2f}", f"{runs[0]['losses'][-1]:.4f}"))
        results.add(f"{name}: grown", grown[name], "B/parameter")
        results.add(f"{name}: high water", high, "B/parameter")
        results.add(f"{name}: step", seconds, "s")
    print_columns(rows)
    if len({tuple(each["losses"]) for name in OURS for each in found.get(name, [])}) > 1:
        raise SystemExit("losses of this package differ between its modes")
    for base in THEIRS:
        for name, goal in GOALS.items() if base in grown else ():
            if name in grown:
                saved = f"{name}: saved of {base}"
                if base == BASE:
                    results.at_least(saved, 1 - grown[name] / grown[base], "", goal)
                else:
                    results.add(saved, 1 - grown[name] / grown[base], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive that is used")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--size", choices=list(SHAPES), default="200M")
    parser.add_argument("--only", nargs="+", choices=[*OURS, *THEIRS])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=[*OURS, *THEIRS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.size, options.steps, options.folder)
        return
    names = options.only or [*OURS, *THEIRS]
    if importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed, see --help: its contenders are left out")
        names = [name for name in names if name in OURS]
    found: dict[str, list[dict[str, Any]]] = {}
    order = random.Random(0)
    for number in range(options.rounds):
        for name in order.sample(names, len(names)):
            run = measure(name, options)
            if run is not None:
                found.setdefault(name, []).append(run)
                print(f"round {number + 1}, {name}: {run['grown'] / run['num_parameters']:.2f}", flush=True)
    results = Results(machine(len(os.sched_getaffinity(0))))
    show({name: found[name] for name in names if name in found}, results)
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
