"""The same job through five front ends, each with us and without: losses, resuming, planned bytes, seconds per step.

A small Llama learns a text of the standard library, byte by byte: two epochs over the same rows in the same order,
gradients of two micro-batches added up and clipped, the learning rate warming up and falling. The front ends are
Lightning, Fabric, Accelerate, the Trainer of transformers, and the SFTTrainer of TRL where TRL is installed.

For each front end:

* loss: the largest relative difference of a step's loss to the same front end without us (goal: 1e-6);
* resumed: a run that begins from the files which another one has written in the middle, against that other one; losses
  and weights are compared bit for bit;
* planned: what the report planned when the run began, against the peaks that it measured. Weights, gradients and
  optimizer state: the role that is off most (goal: 3 %). Activations: an input may still be held when the next forward
  begins, so its peak may be one more than planned. Staging is planned for copies that all wait (goal: no more),
  where it is known before the run that gradients will be added up: not in a loop of Fabric;
* seconds: the median step without us and with us, over interleaved rounds. The first step of a run does not count.

    python examples/bench/front_ends.py FOLDER [--only NAME ...] [--rounds N] [--layers N] [--json FILE]
"""

import argparse
import importlib.util
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from results import Results, machine, print_columns
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, get_linear_schedule_with_warmup

import lightning_cxl

PER_EPOCH, MICRO_BATCHES, ROWS = 6, 2, 2
"""Steps of an epoch, micro-batches of a step, rows of a micro-batch."""
EPOCHS = 2
STEPS = EPOCHS * PER_EPOCH
RATE, WARM, CLIP = 1e-3, 2, 1.0
GOAL_LOSS, GOAL_PLANNED = 1e-6, 0.03


@dataclass(frozen=True)
class Job:
    """What is trained, and where."""

    folder: Path
    layers: int = 4
    hidden: int = 128
    sequence: int = 128
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    accelerator: Any = "cpu"
    """What Lightning and Fabric call the device."""
    options: dict[str, Any] = field(default_factory=lambda: {"stream_weights": True})
    """Ours."""

    def model(self) -> LlamaForCausalLM:
        """Return the model as it is before the training."""
        torch.manual_seed(5)
        shape = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "num_hidden_layers": self.layers}
        config = LlamaConfig(vocab_size=256, num_attention_heads=4, max_position_embeddings=self.sequence, **shape)
        return LlamaForCausalLM(config).train()

    def rows(self) -> list[list[int]]:
        """Return the tokens of an epoch."""
        text = Path(textwrap.__file__).read_bytes()
        return [list(text[i * self.sequence :][: self.sequence]) for i in range(PER_EPOCH * MICRO_BATCHES * ROWS)]

    def batches(self) -> list[Tensor]:
        """Return the micro-batches of an epoch."""
        return list(torch.tensor(self.rows()).split(ROWS))


@dataclass
class Trained:
    """What came of a run."""

    losses: list[float] = field(default_factory=list)
    """Of each step."""
    seconds: list[float] = field(default_factory=list)
    """Of each step but the first."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    report: dict[str, Any] | None = None
    """Ours."""

    def note_step(self, loss: float, began: float) -> None:
        """Add a step; its loss has been read, so the device has done its forward and backward."""
        self.losses.append(loss)
        self.seconds.append(time.perf_counter() - began)

    def keep(self, model: nn.Module, report: Callable[[], dict[str, Any]] | None) -> None:
        """Copy what is asked for when the training is over."""
        self.report = None if report is None else report()
        self.weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
        del self.seconds[:1]


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the optimizer, and the schedule that the Trainer of transformers calls linear."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    return optimizer, get_linear_schedule_with_warmup(optimizer, WARM, STEPS)


# -- front ends: each trains from the beginning and saves in the middle, or begins with what was saved there -----------


def lightning(job: Job, *, ours: bool, resumes: bool = False) -> Trained:
    """Train a LightningModule."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torch.utils.data import DataLoader

    trained = Trained()

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.model(input_ids=batch, labels=batch).loss

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = adamw(self.model)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    class Notes(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index % MICRO_BATCHES == 0:
                self.began, self.parts = time.perf_counter(), []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.parts.append(MICRO_BATCHES * float(outputs["loss"]))  # Lightning has divided it
            if len(self.parts) == MICRO_BATCHES:
                trained.note_step(statistics.fmean(self.parts), self.began)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            trained.keep(module.model, trainer.strategy.report if ours else None)

    strategy = lightning_cxl.CXLOffloadStrategy(**job.options) if ours else SingleDeviceStrategy(job.device)
    trainer = Trainer(
        accelerator=job.accelerator, devices=1, strategy=strategy, max_epochs=EPOCHS,
        accumulate_grad_batches=MICRO_BATCHES, gradient_clip_val=CLIP, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Notes(), ModelCheckpoint(job.folder, "{step}", save_top_k=-1)],
    )  # fmt: skip
    middle = job.folder / f"step={PER_EPOCH}.ckpt"
    loader = DataLoader(job.batches(), batch_size=None)
    trainer.fit(Task(), loader, ckpt_path=middle if resumes else None, weights_only=False)
    return trained


def fabric(job: Job, *, ours: bool, resumes: bool = False) -> Trained:
    """Train in a loop as LitGPT has it."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import SingleDeviceStrategy

    strategy = lightning_cxl.CXLFabricStrategy(**job.options) if ours else SingleDeviceStrategy(job.device)
    runner = Fabric(accelerator=job.accelerator, devices=1, strategy=strategy)
    runner.launch()
    optimizer, scheduler = adamw(model := job.model())
    model, optimizer = runner.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    trained, path, batches = Trained(), job.folder / "middle.ckpt", job.batches()
    if resumes:
        runner.load(path, state)
    for step in _steps(resumes):
        began, parts = time.perf_counter(), []
        for part in range(MICRO_BATCHES):
            batch = batches[step % PER_EPOCH * MICRO_BATCHES + part].to(runner.device)
            with runner.no_backward_sync(model, enabled=part < MICRO_BATCHES - 1):
                loss = model(input_ids=batch, labels=batch).loss
                runner.backward(loss / MICRO_BATCHES)
            parts.append(loss.item())
        runner.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        trained.note_step(statistics.fmean(parts), began)
        if step + 1 == PER_EPOCH:
            runner.save(path, state)
    trained.keep(model, strategy.report if ours else None)
    runner.strategy.teardown()
    return trained


def accelerate(job: Job, *, ours: bool, resumes: bool = False) -> Trained:
    """Train in a loop as Accelerate's guide has it."""
    from accelerate import Accelerator

    from lightning_cxl.accelerate import CXLAccelerator

    given: dict[str, Any] = {"cpu": job.device.type == "cpu", "gradient_accumulation_steps": MICRO_BATCHES}
    runner = CXLAccelerator(offload=job.options, **given) if ours else Accelerator(**given)
    optimizer, scheduler = adamw(model := job.model())
    model, optimizer, scheduler = runner.prepare(model, optimizer, scheduler)
    trained, path, batches = Trained(), job.folder / "middle", job.batches()
    if resumes:
        runner.load_state(str(path))
    for step in _steps(resumes):
        began, parts = time.perf_counter(), []
        for part in range(MICRO_BATCHES):
            batch = batches[step % PER_EPOCH * MICRO_BATCHES + part].to(runner.device)
            with runner.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                runner.backward(loss)
                if runner.sync_gradients:
                    runner.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            parts.append(loss.item())
        trained.note_step(statistics.fmean(parts), began)
        if step + 1 == PER_EPOCH:
            runner.save_state(str(path))
    trained.keep(model, runner.report if ours else None)
    runner.free_memory()
    return trained


class _Notes(TrainerCallback):
    """Notes the loss and the seconds of each step of a Trainer of transformers."""

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.trained.note_step(logs["loss"], self.began)


def _arguments(job: Job, cls: Any, **given: Any) -> Any:
    return cls(
        str(job.folder), num_train_epochs=EPOCHS, per_device_train_batch_size=ROWS, learning_rate=RATE,
        gradient_accumulation_steps=MICRO_BATCHES, max_grad_norm=CLIP, warmup_steps=WARM, optim="adamw_torch",
        train_sampling_strategy="sequential", logging_steps=1, save_steps=PER_EPOCH, bf16=False, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, use_cpu=job.device.type == "cpu", **given,
    )  # fmt: skip


def _finish(job: Job, trainer: Any, trained: Trained, *, ours: bool, resumes: bool) -> Trained:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_Notes(trained))
    trainer.train(resume_from_checkpoint=str(job.folder / f"checkpoint-{PER_EPOCH}") if resumes else None)
    trained.keep(trainer.model, trainer.report if ours else None)
    trainer.end()
    return trained


def hf_trainer(job: Job, *, ours: bool, resumes: bool = False) -> Trained:
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    from lightning_cxl.transformers import CXLTrainer

    parts = {"train_dataset": [{"input_ids": row, "labels": row} for row in job.rows()]}
    args, model = _arguments(job, TrainingArguments), job.model()
    trainer = CXLTrainer(model, args, offload=job.options, **parts) if ours else Trainer(model, args, **parts)
    return _finish(job, trainer, Trained(), ours=ours, resumes=resumes)


def sft_trainer(job: Job, *, ours: bool, resumes: bool = False) -> Trained:
    """Train with the SFTTrainer of TRL."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from lightning_cxl.transformers import CXLTrainerMixin

    class CXLSFTTrainer(CXLTrainerMixin, SFTTrainer):
        pass

    words = {f"<{i}>": i for i in range(256)}  # is not asked: rows are tokens
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")), pad_token="<0>", eos_token="<1>"
    )
    parts = {"train_dataset": Dataset.from_dict({"input_ids": job.rows()}), "processing_class": tokenizer}
    args = _arguments(job, SFTConfig, max_length=None, gradient_checkpointing=False)
    cls = (lambda **given: CXLSFTTrainer(offload=job.options, **given)) if ours else SFTTrainer
    return _finish(job, cls(model=job.model(), args=args, **parts), Trained(), ours=ours, resumes=resumes)


def _steps(resumes: bool) -> Iterator[int]:
    yield from range(PER_EPOCH if resumes else 0, STEPS)


FRONT_ENDS: dict[str, Callable[..., Trained]] = {
    "Lightning": lightning,
    "Fabric": fabric,
    "Accelerate": accelerate,
    "HF Trainer": hf_trainer,
    "TRL SFTTrainer": sft_trainer,
}


def there_are() -> list[str]:
    """Return the front ends that are installed."""
    return [name for name in FRONT_ENDS if not name.startswith("TRL") or importlib.util.find_spec("trl")]


# -- comparisons -------------------------------------------------------------------------------------------------------


@dataclass
class Compared:
    """A front end with us and without."""

    loss: float
    """The largest relative difference."""
    resumes_exactly: bool
    worst_role: float
    """Of weights, gradients and state: what was planned is off by this part of the measured bytes."""
    activations: float
    """The same for them."""
    staging: float | None
    """Its peak, as a part of what was planned; None where none was."""
    plain_seconds: float
    our_seconds: float


def compare(name: str, job: Job, rounds: int = 1) -> Compared:
    """Train a front end both ways, `rounds` times in turns, and once from the middle.

    Raises:
        RuntimeError: it has not trained, so a comparison says nothing.
    """
    train = FRONT_ENDS[name]
    plain, ours = [], []
    for index in range(rounds):
        for found, with_us in ((plain, False), (ours, True)):
            folder = job.folder / name / f"{index}, {'ours' if with_us else 'plain'}"
            found.append(train(replaced(job, folder), ours=with_us))
    whole, other = ours[0], plain[0]
    if len(whole.losses) != STEPS or whole.losses[-1] > whole.losses[0] - 0.1:
        raise RuntimeError(f"{name} has not trained: its losses are {whole.losses}")
    resumed = train(replaced(job, job.folder / name / "0, ours"), ours=True, resumes=True)
    exact = resumed.losses == whole.losses[PER_EPOCH:] and all(
        torch.equal(resumed.weights[key], value) for key, value in whole.weights.items()
    )
    report = whole.report
    assert report is not None
    planned, peaks = (_by_role(report[key]) for key in ("planned_roles", "peak_roles"))
    staged = peaks.pop("staging", 0)
    off = {role: abs(planned.get(role, 0) - peak) / peak for role, peak in peaks.items()}
    activations = off.pop("activations", 0.0)
    return Compared(
        max(abs(b / a - 1) for a, b in zip(other.losses, whole.losses, strict=True)),
        exact,
        max(off.values()),
        activations,
        staged / planned["staging"] if "staging" in planned else None,
        statistics.median(second for each in plain for second in each.seconds),
        statistics.median(second for each in ours for second in each.seconds),
    )


def replaced(job: Job, folder: Path) -> Job:
    """Return the same job with a folder of its own, which is there."""
    folder.mkdir(parents=True, exist_ok=True)
    return Job(folder, job.layers, job.hidden, job.sequence, job.device, job.accelerator, job.options)


def _by_role(roles: dict[str, dict[str, int]]) -> dict[str, int]:
    return {role: total for role, tiers in roles.items() if (total := sum(tiers.values()))}


def run(job: Job, names: list[str], rounds: int, target: Path | None = None) -> None:
    """Compare front ends, print a table, and judge it."""
    warnings.simplefilter("ignore")
    results = Results(machine(torch.get_num_threads()) | {"device": str(job.device), "rounds": rounds})
    rows = [
        ("", "loss differs by", "resumed", "planned off by", "activations", "staging", "s per step without", "with us")
    ]
    for name in names:
        found = compare(name, job, rounds)
        rows.append(
            (
                name,
                f"{found.loss:.1e}",
                "bit for bit" if found.resumes_exactly else "DIFFERS",
                f"{found.worst_role:.2%}",
                f"{found.activations:.1%}",
                "not planned" if found.staging is None else f"{found.staging:.0%}",
                f"{found.plain_seconds:.3f}",
                f"{found.our_seconds:.3f}",
            )
        )
        results.at_most(f"{name}: losses differ by", found.loss, "of the loss without us", GOAL_LOSS)
        results.at_least(f"{name}: resumed runs that are exact", float(found.resumes_exactly), "of 1", 1.0)
        results.at_most(f"{name}: worst role, planned off by", found.worst_role, "of the peak", GOAL_PLANNED)
        if found.staging is not None:
            results.at_most(f"{name}: staging", found.staging, "of what was planned", 1.0)
        results.add(f"{name}: a step with us", found.our_seconds / found.plain_seconds, "of one without")
    print()
    print_columns(rows)
    print(f"\n{results.summary()}")
    if target is not None:
        results.write(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--only", nargs="+", choices=list(FRONT_ENDS), default=there_are())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    job = Job(options.folder, options.layers, options.hidden)
    run(job, options.only, options.rounds, options.json)


if __name__ == "__main__":
    main()
