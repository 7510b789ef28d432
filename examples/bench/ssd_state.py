"""Host memory per parameter and seconds per step with all state in memory, and with all optimizer state on SSD.

The job: a Llama of 206 M parameters (random weights) in `bf16-true`, byte tokens of the standard library's sources, one
sequence of 64, `CPUAdam`, the CPU as accelerator; once per precision of the state. Three processes take turns, in a
new random order in each round, so that a noisy machine disturbs all alike:

* memory, ssd: one training step each. Their losses must be equal bit for bit. The *update* is what lies between the end
  of the backward and the moment when the state is where it belongs; writes behind it included.
* disk: writes as many records of the same sizes through the package's storage, and reads them, and nothing else; then
  *both* at once, as an update does. A disk whose reads and writes share its speed cannot do that in the longer time.

*Longest* is the longest of reading alone, computing alone (the update of the process with state in memory) and writing
alone: an update cannot be shorter than that. What it takes beyond that is printed as a ratio, a median over rounds.
*CPU* is what all threads of a process took meanwhile, in user code and in the kernel: checksums are most of that of
reading and writing. Where the CPU seconds of all three, divided by the cores, are more than the longest, the cores are
what an update waits for.

*Grown* is what the process grew by: its own anonymous memory (`RssAnon`) at the peak, sampled every 2 ms. A tiny run
comes first, so that what libraries take at their first use does not count.

With `--speed` the drive is a simulated one (`simulated_drive.py`): reading alone and writing alone take what such a
drive takes. Only updates are measured: the loss is the sum of one number of each weight. Peaks mean nothing then.

    python examples/bench/ssd_state.py --folder DIR [--state fp32 bf16 8bit] [--rounds 7] [--size tiny] [--json FILE]
    python examples/bench/ssd_state.py --folder /dev/shm --speed 7 [...]
"""

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from own_memory import Growth
from results import Results, machine, print_columns
from simulated_drive import SimulatedDrive
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_cxl
from lightning_cxl.storage import store as storage

WARM_UP = 2
LENGTH = 64
SHAPES = {"200M": (1024, 2816, 16), "100M": (768, 2112, 16), "tiny": (64, 128, 2)}
KINDS = ("memory", "ssd", "disk")
SLOTS = 3
Row = dict[str, float]


# -- a child: one of the kinds -----------------------------------------------------------------------------------------


def make_model(size: str) -> LlamaForCausalLM:
    width, inner, layers = SHAPES[size]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, max_position_embeddings=LENGTH,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    return model


def batches() -> Iterator[torch.Tensor]:
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    for step in itertools.count():
        yield rows[[step % len(rows)]].long()


class Job(LightningModule):
    """Next-token loss of a model; or, where only updates are measured, the sum of one number of each weight."""

    def __init__(self, size: str, *, computes: bool = True) -> None:
        super().__init__()
        self.model = make_model(size)
        self.computes = computes

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not self.computes:
            return torch.stack([each.view(-1)[7] for each in self.model.parameters()]).float().sum()
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)

    def train_dataloader(self) -> Iterator[torch.Tensor]:
        return batches()


class Turns(Callback):
    """Waits for the parent's word before each step, and tells it the seconds of the step and of the update."""

    def on_train_batch_start(self, *_: Any) -> None:
        wait_for_turn()
        self.start = time.perf_counter()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.update_start, self.update_start_cpu = time.perf_counter(), time.process_time()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        on_ssd = trainer.strategy.run.on_ssd
        trainer.strategy.run.wait_for_updates()
        if on_ssd is not None:
            on_ssd.state.wait()
        now, cpu = time.perf_counter(), time.process_time() - self.update_start_cpu
        tell(step=now - self.start, update=now - self.update_start, cpu=cpu, loss=float(outputs["loss"]))


def wait_for_turn() -> None:
    if not sys.stdin.readline():
        raise SystemExit("the parent is gone")


def tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def fit(
    kind: str, state: str, size: str, steps: int, folder: Path, callbacks: Sequence[Callback], *, computes: bool
) -> dict[str, Any]:
    """Train; returns the strategy's report and the number of parameters."""
    options: dict[str, Any] = {"state": state}
    if kind == "ssd":
        ssd = {"path": str(folder / "state"), "budget": "8GiB"}
        options |= {"tiers": {"ssd": ssd}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}
    strategy = lightning_cxl.CXLOffloadStrategy(**options)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=steps, precision="bf16-true",
        callbacks=[*callbacks], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    job = Job(size, computes=computes)
    trainer.fit(job)
    return {"report": strategy.report(), "num_parameters": sum(each.numel() for each in job.parameters())}


def train(kind: str, state: str, size: str, steps: int, folder: Path, *, computes: bool) -> None:
    fit(kind, state, "tiny", 2, folder, [], computes=computes)
    growth = Growth()
    growth.start()
    found = fit(kind, state, size, steps, folder, [Turns()], computes=computes)
    tell(grown=growth.stop(), **found)


def move(state: str, size: str, steps: int, folder: Path) -> None:
    """Write and read records, as large as those of the run, in turn."""
    from lightning_cxl.config import OffloadConfig
    from lightning_cxl.inventory.plan import list_tensors
    from lightning_cxl.inventory.tensors import Workload, records_of
    from lightning_cxl.memory.resource import Buffer
    from lightning_cxl.native._numa import Mapping
    from lightning_cxl.storage.store import Store

    with torch.device("meta"):
        model = make_model(size)
    config = OffloadConfig(state=state)
    inventory = list_tensors(model, None, config, Workload(batch=1, sequence=LENGTH, computes_on_host=True))
    planned = [each for each in records_of(inventory.tensors, inventory.record_of) if each.is_state]
    store = Store([folder / "alone"], budget_bytes=1 << 40)
    records = [store.reserve(each.name, each.nbytes) for each in planned]
    largest = max(record.padded_nbytes for record in records)
    mappings = [Mapping(largest) for _ in range(2 * SLOTS)]
    slots = [Buffer(each.address, each.nbytes, (), None, each) for each in mappings]
    for slot in slots:
        slot.tensor((slot.nbytes,), torch.uint8).random_()

    def seconds(*starts: Any) -> tuple[float, float]:
        begin, begin_cpu = time.perf_counter(), time.process_time()
        running: list[Any] = []
        for index in range(len(records)):
            for number, start in enumerate(starts):  # reads and writes are of records that are far from each other
                if len(running) == SLOTS * len(starts):
                    running.pop(0).wait_host()
                record = records[(index + number * len(records) // 2) % len(records)]
                running.append(start(record, slots[number * SLOTS + index % SLOTS]))
        store.wait()
        return time.perf_counter() - begin, time.process_time() - begin_cpu

    for _ in range(steps):
        wait_for_turn()
        (write, write_cpu), (read, read_cpu) = seconds(store.write), seconds(store.read)
        tell(write=write, write_cpu=write_cpu, read=read, read_cpu=read_cpu, both=seconds(store.read, store.write)[0])
    store.close()
    tell(nbytes=sum(record.padded_nbytes for record in records), num_records=len(records))


def child(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    state = options.state[0]
    if options.speed is not None:
        drive = SimulatedDrive(options.speed * 1e9, keeps_bytes=options.child != "disk")
        vars(storage)["System"] = lambda: drive
    if options.child == "disk":
        move(state, options.size, options.rounds + WARM_UP, options.folder)
    else:
        steps = options.rounds + WARM_UP
        train(options.child, state, options.size, steps, options.folder, computes=options.speed is None)


# -- the parent --------------------------------------------------------------------------------------------------------


class Process:
    """A child that does one turn when told to."""

    def __init__(self, kind: str, state: str, options: argparse.Namespace, folder: Path) -> None:
        command = [sys.executable, "-W", "ignore", __file__, "--child", kind, "--state", state, "--size", options.size]
        command += [] if options.speed is None else ["--speed", str(options.speed)]
        self.rounds: list[Row] = []
        self._errors = folder / f"{kind}.txt"
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                [*command, "--rounds", str(options.rounds), "--folder", str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def message(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a process ended:\n{self._errors.read_text()[-3000:]}")

    def turn(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.rounds.append(self.message())

    def end(self) -> dict[str, Any]:
        found = self.message()
        self._process.wait()
        return found


def measure(state: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        processes = {kind: Process(kind, state, options, folder) for kind in KINDS}
        order = random.Random(0)
        for number in range(options.rounds + WARM_UP):
            for kind in order.sample(KINDS, len(KINDS)):
                processes[kind].turn()
            print(f"state {state}: round {number + 1}", file=sys.stderr, flush=True)
        found = {kind: process.end() for kind, process in processes.items()}
    finally:
        shutil.rmtree(folder)
    rounds = {kind: process.rounds for kind, process in processes.items()}
    losses = {kind: [each["loss"] for each in rounds[kind]] for kind in ("memory", "ssd")}
    if losses["memory"] != losses["ssd"]:
        raise SystemExit(f"losses differ with state on SSD: {losses}")
    return {"found": found, "rounds": {kind: each[WARM_UP:] for kind, each in rounds.items()}}


def show(state: str, measured: dict[str, Any], results: Results, speed: float | None) -> None:
    found, rounds = measured["found"], measured["rounds"]
    count = found["memory"]["num_parameters"]

    def column(kind: str, key: str) -> list[float]:
        return [each[key] for each in rounds[kind]]

    read, write = column("disk", "read"), column("disk", "write")
    if speed is not None:
        read = write = [found["disk"]["nbytes"] / speed / 1e9] * len(read)
    compute, update = column("memory", "update"), column("ssd", "update")
    longest = [max(each) for each in zip(read, compute, write, strict=True)]
    print(
        f"\nstate {state}, {count:,} parameters, {found['disk']['num_records']} records of {found['disk']['nbytes']:,}"
    )
    print_columns(
        [
            ("", "grown, B/parameter", "tensors, B/parameter", "s per step", "s per update"),
            *(
                (
                    kind,
                    f"{found[kind]['grown'] / count:.2f}",
                    f"{planned_bytes(found[kind]['report']) / count:.2f}",
                    f"{statistics.median(column(kind, 'step')):.2f}",
                    f"{statistics.median(column(kind, 'update')):.2f}",
                )
                for kind in ("memory", "ssd")
            ),
        ]
    )
    both = column("disk", "both")
    seconds = {"both": both, "read": read, "compute": compute, "write": write, "longest": longest, "update": update}
    print("  " + ", ".join(f"{name} {statistics.median(each):.2f} s" for name, each in seconds.items()))
    cpu = {
        "read": statistics.median(column("disk", "read_cpu")),
        "compute": statistics.median(column("memory", "cpu")),
        "write": statistics.median(column("disk", "write_cpu")),
        "update": statistics.median(column("ssd", "cpu")),
    }
    print("  CPU: " + ", ".join(f"{name} {value:.2f} s" for name, value in cpu.items()))
    for name, value in cpu.items():
        results.add(f"{state}: {name}, CPU", value, "s")
    for kind in ("memory", "ssd"):
        results.add(f"{state}, {kind}: grown", found[kind]["grown"] / count, "B/parameter")
        results.add(
            f"{state}, {kind}: tensors of tiers of memory", planned_bytes(found[kind]["report"]) / count, "B/parameter"
        )
        results.add(f"{state}, {kind}: step", statistics.median(column(kind, "step")), "s")
    for name, each in seconds.items():
        results.add(f"{state}: {name}", statistics.median(each), "s")
    saved = 1 - found["ssd"]["grown"] / found["memory"]["grown"]
    results.add(f"{state}: host memory saved", saved, "of that with state in memory")
    steps = zip(column("ssd", "step"), column("memory", "step"), strict=True)
    results.add(f"{state}: step / step with state in memory", statistics.median(a / b for a, b in steps), "x")
    over = statistics.median(a / b for a, b in zip(update, longest, strict=True))
    disk = [max(each) for each in zip(both, compute, strict=True)]
    disk_over = statistics.median(a / b for a, b in zip(update, disk, strict=True))
    results.add(f"{state}: update / longer of compute, and read and write at once", disk_over, "x")
    print(f"  update / longer of compute, and read and write at once: {disk_over:.2f}")
    results.at_most(f"{state}: update / longest of read, compute, write", over, "x", 1.15 if speed is None else 1.1)


def planned_bytes(report: dict[str, Any]) -> int:
    """Return the bytes of all roles at their peaks, on tiers of memory."""
    return sum(nbytes for tiers in report["peak_roles"].values() for tier, nbytes in tiers.items() if tier != "ssd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the drive that is measured")
    parser.add_argument("--state", nargs="+", choices=["fp32", "bf16", "8bit"], default=["fp32", "bf16", "8bit"])
    parser.add_argument("--rounds", type=int, default=7, help=f"that count, besides {WARM_UP} before them")
    parser.add_argument("--size", choices=list(SHAPES), default="200M")
    parser.add_argument("--speed", type=float, help="GB/s of a simulated drive; FOLDER is then on a tmpfs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    results = Results(machine(len(os.sched_getaffinity(0))))
    for state in options.state:
        show(state, measure(state, options), results, options.speed)
    print(f"\n{results.summary()}")
    if options.json is not None:
        results.write(options.json)


if __name__ == "__main__":
    main()
