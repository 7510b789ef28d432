import subprocess
import sys

import lightning.pytorch.strategies
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_cxl import callbacks, timing
from lightning_cxl.callbacks import OffloadProgressBar
from lightning_cxl.integrations import lightning as ours
from lightning_cxl.integrations.lightning import Trainer


def test_lightning_is_the_choice_when_nothing_else_was_imported():
    assert issubclass(ours.ParallelStrategy, lightning.pytorch.strategies.ParallelStrategy)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "expected"),
    [("pytorch_lightning", "pytorch_lightning"), ("lightning.pytorch, pytorch_lightning", "lightning")],
)
def test_the_package_follows_what_the_program_imported(first, expected):
    program = f"import {first}, lightning_cxl; print(lightning_cxl.CXLOffloadStrategy.__mro__[2].__module__)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split("\n")[-2].split(".")[0] == expected


class Numbers(BoringModel):
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.layer(batch).square().mean(), prog_bar=True)
        self.log("tokens_per_s", 12345.6, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch).square().mean(), prog_bar=True)


def fit(bar, tmp_path, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "log_every_n_steps": 1}
    options |= {**quiet, "default_root_dir": tmp_path}
    trainer = Trainer(accelerator="cpu", max_steps=7, limit_train_batches=7, callbacks=[bar], **options)
    trainer.fit(Numbers())
    return trainer


def test_without_a_terminal_it_prints_plain_lines(tmp_path, capsys):
    fit(OffloadProgressBar(plain_every_n_steps=3), tmp_path, limit_val_batches=0)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7"]
    assert all("loss " in line and "host_GiB " in line and "tokens_per_s 12,346" in line for line in lines)


@pytest.mark.parametrize(("seconds", "shown"), [(0.5, ["ssd 50%"]), (0.01, [])])
def test_it_says_what_the_training_waits_for(tmp_path, monkeypatch, seconds, shown):
    clock, found = [0.0], []
    monkeypatch.setattr(callbacks.time, "perf_counter", lambda: clock[0])

    class Bar(OffloadProgressBar):
        def get_metrics(self, *given):
            clock[0] += 1.5
            timing.add("stall_ssd_s", 1.5 * seconds)
            timing.add("stall_update_s", 0.5 * seconds)
            metrics = super().get_metrics(*given)
            found.append(metrics.get("waits_for"))
            return metrics

    fit(Bar(plain_every_n_steps=1), tmp_path, limit_val_batches=0)
    assert len(found) >= 7 and {each for each in found if each} == set(shown)
