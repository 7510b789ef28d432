"""One short training of a tiny Llama through each front end, with us and without, for the contract of front ends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.optim.lr_scheduler import LinearLR
from transformers import TrainerCallback

from lightning_cxl import CXLFabricStrategy
from tests import training_device
from tests.integration import hf_trainer
from tests.integration.accelerate_loop import PLAIN, make_accelerator
from tests.integration.llama import tiny_llama
from tests.integration.training import assert_equal, make_fabric, make_trainer, offload

STEPS, HALF = 4, 2


@dataclass
class Job:
    """What is trained: `STEPS` steps, or those after `HALF` where it resumes; it saves after `HALF`, if asked to."""

    folder: Path
    options: Any = PLAIN
    accumulate: int = 1
    clip: float = 1.0
    precision: str | None = None
    make_model: Callable[[], torch.nn.Module] = tiny_llama
    resumes: bool = False
    saves: bool = False
    evaluates: bool = False
    before_step: Callable[[int, torch.nn.Module], None] = lambda step, model: None
    """Gets the number of steps so far and the model, before the first backward of a step."""
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = HALF if self.resumes else 0
        self.rows = hf_trainer.rows(2 * STEPS * self.accumulate)

    def batches(self) -> list[torch.Tensor]:
        tokens = torch.tensor([row["input_ids"] for row in self.rows])
        return list(tokens.split(2))[self.first * self.accumulate :]

    def adamw(self, model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


class LightningRun:
    def __init__(self, job: Job) -> None:
        self.job, self.module = job, _Module(job)
        self.model = self.module.model
        self.ours = "auto" if job.options == PLAIN else offload(**job.options)
        self.trainer = make_trainer(
            self.ours, precision=job.precision, max_steps=STEPS, accumulate_grad_batches=job.accumulate,
            gradient_clip_val=job.clip or None, num_sanity_val_steps=0, check_val_every_n_epoch=None,
            val_check_interval=job.accumulate if job.evaluates else None,
            limit_val_batches=1 if job.evaluates else 0,
        )  # fmt: skip

    def run(self):
        batches = torch.utils.data.DataLoader(self.job.batches(), batch_size=None)
        held_out = torch.utils.data.DataLoader(self.job.batches()[:1], batch_size=None)
        path = self.job.folder / "middle.ckpt" if self.job.resumes else None
        self.trainer.fit(self.module, batches, held_out, ckpt_path=path)

    def end(self):
        pass


class _Module(LightningModule):
    def __init__(self, job):
        super().__init__()
        self.job, self.model = job, job.make_model()

    def training_step(self, batch, batch_idx):
        if batch_idx % self.job.accumulate == 0:
            self.job.before_step(self.global_step, self.model)
        loss = self.model(input_ids=batch, labels=batch).loss
        self.job.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.job.losses.append(self.model(input_ids=batch, labels=batch).loss.item())

    def configure_optimizers(self):
        optimizer = self.job.adamw(self.model)
        return [optimizer], [{"scheduler": LinearLR(optimizer, total_iters=4), "interval": "step"}]

    def on_train_batch_end(self, *_):
        path = self.job.folder / "middle.ckpt"
        if self.job.saves and self.global_step == HALF and not path.exists():
            self.trainer.save_checkpoint(path)


class _Loop:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = job.make_model()
        self.optimizer = job.adamw(self.model)

    def run(self):
        job, (model, optimizer, scheduler) = self.job, self.start()
        held_out = job.batches()[0].to(training_device.current)
        if job.resumes:
            self.load()
        for index, batch in enumerate(job.batches()):
            step, is_last = job.first + index // job.accumulate, index % job.accumulate == job.accumulate - 1
            if index % job.accumulate == 0:
                job.before_step(step, self.model)
            job.losses.append(self.micro_batch(model, batch.to(training_device.current), is_last))
            if not is_last:
                continue
            if job.clip:
                self.clip(model, optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if job.evaluates:
                with torch.no_grad():
                    job.losses.append(model(input_ids=held_out, labels=held_out).loss.item())
            if job.saves and step + 1 == HALF:
                self.save()


class FabricRun(_Loop):
    """A loop as LitGPT's."""

    def start(self):
        self.ours = "auto" if self.job.options == PLAIN else CXLFabricStrategy(**self.job.options)
        self.fabric = make_fabric(self.ours, self.job.precision)
        model, optimizer = self.fabric.setup(self.model, self.optimizer)
        scheduler = LinearLR(optimizer, total_iters=4)
        self.state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return model, optimizer, scheduler

    def micro_batch(self, model, batch, is_last):
        with self.fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(input_ids=batch, labels=batch).loss
            self.fabric.backward(loss / self.job.accumulate)
        return loss.item()

    def clip(self, model, optimizer):
        self.fabric.clip_gradients(model, optimizer, max_norm=self.job.clip, error_if_nonfinite=False)

    def save(self):
        self.fabric.save(self.job.folder / "middle.ckpt", self.state)

    def load(self):
        self.fabric.load(self.job.folder / "middle.ckpt", self.state)

    def end(self):
        if self.job.options != PLAIN:
            self.ours.teardown()


class AccelerateRun(_Loop):
    """A loop as Accelerate's guide has it, with accumulation by hand."""

    ours = None

    def start(self):
        precision = {"mixed_precision": "bf16"} if self.job.precision == "bf16-mixed" else {}
        self.ours = make_accelerator(self.job.options, **precision)
        scheduler = LinearLR(self.optimizer, total_iters=4)
        return self.ours.prepare(self.model, self.optimizer, scheduler)

    def micro_batch(self, model, batch, is_last):
        loss = model(input_ids=batch, labels=batch).loss
        self.ours.backward(loss / self.job.accumulate)
        return loss.item()

    def clip(self, model, optimizer):
        self.ours.clip_grad_norm_(model.parameters(), self.job.clip)

    def save(self):
        self.ours.save_state(str(self.job.folder / "middle"))

    def load(self):
        self.ours.load_state(str(self.job.folder / "middle"))

    def end(self):
        if self.ours is not None:  # it was not refused
            self.ours.free_memory()


class TrainerRun:
    ours = None

    def __init__(self, job: Job) -> None:
        self.job, self.model = job, job.make_model()

    def run(self):
        job = self.job
        given = {"save_strategy": "steps" if job.saves else "no", "save_steps": HALF}
        if job.evaluates:
            given |= {"eval_strategy": "steps", "eval_steps": 1}
        parts = {"train_dataset": job.rows, "eval_dataset": job.rows[:2], "callbacks": [_Calls(job)]}
        self.ours = hf_trainer.make_trainer(
            job.folder, job.options, model=self.model, parts=parts, bf16=job.precision == "bf16-mixed",
            max_steps=STEPS, max_grad_norm=job.clip, gradient_accumulation_steps=job.accumulate,
            train_sampling_strategy="sequential", **given,
        )  # fmt: skip
        path = job.folder / f"checkpoint-{HALF}"
        self.ours.train(resume_from_checkpoint=str(path) if job.resumes else None)

    def end(self):
        if self.ours is not None and self.job.options != PLAIN:
            self.ours.end()


class _Calls(TrainerCallback):
    def __init__(self, job):
        self.job = job

    def on_step_begin(self, args, state, control, model, **_):
        self.job.before_step(state.global_step, model)

    def on_log(self, *_, logs, **__):
        self.job.losses += [logs[key] for key in ("loss", "grad_norm", "eval_loss") if key in logs]


FRONT_ENDS = {"Lightning": LightningRun, "Fabric": FabricRun, "Accelerate": AccelerateRun, "HF Trainer": TrainerRun}


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, torch.Tensor]
    report: dict[str, Any]


def train(front_end: str, folder: Path, options=PLAIN, **given) -> Trained:
    job = Job(folder, options, **given)
    run = FRONT_ENDS[front_end](job)
    try:
        run.run()
        weights = {name: value.detach().cpu().clone() for name, value in run.model.state_dict().items()}
        return Trained(job.losses, weights, {} if options == PLAIN else run.ours.report())
    finally:
        run.end()


def assert_identical(ours: Trained, plain: Trained) -> None:
    assert len(set(plain.losses)) > 1, "it trains"
    assert ours.losses == plain.losses[len(plain.losses) - len(ours.losses) :] and len(ours.losses) >= HALF
    assert_equal(ours.weights, plain.weights)


def assert_close(ours: Trained, plain: Trained, atol: float = 1e-5) -> None:
    assert len(ours.losses) >= HALF
    expected = torch.tensor(plain.losses[len(plain.losses) - len(ours.losses) :])
    torch.testing.assert_close(torch.tensor(ours.losses), expected, rtol=1e-5, atol=atol)
