import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from lightning_cxl.commands.export import export_checkpoint
from tests.distributed.training import assert_same_weights

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "configs" / "finetune_stdlib.yaml"

pytestmark = [pytest.mark.on_cpu, pytest.mark.slow]


def fit(folder, text, steps, **environment):
    """Return what the command shows; Lightning starts the second process."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["model"] |= {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32}
    config["data"] = {"text_files": str(text), "seq_len": 16, "batch_size": 2, "vocab_size": 300}
    config["trainer"] |= {"accelerator": "cpu", "devices": 2, "max_steps": steps, "val_check_interval": 2}
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs", "version": 7}}
    config["trainer"]["logger"] = logger
    saving = {"dirpath": "checkpoints", "every_n_train_steps": 2, "save_last": True}
    config["trainer"]["callbacks"] = [
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saving},
        {"class_path": "lightning_cxl.finetune.export.ExportPretrained"},
        {"class_path": "lightning_cxl.finetune.evaluation_samples.EvaluationSamples"},
    ]
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_", "WORLD_"))}
    done = subprocess.run(
        [sys.executable, "-m", "lightning_cxl", "fit", "--config", "job.yaml", "--ckpt_path", "last"],
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_the_main_job_trains_in_two_processes_and_goes_on_after_a_requeue(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 60)
    status, shown = fit(tmp_path, text, 2)
    assert status == 0, shown[-3000:]
    assert shown.count("step 2, held-out sample 1\n") == 1
    assert re.search(r"validation loss: before \d.*, after \d.* \(step 2\)\n\nsample:\n", shown)
    assert "CXL offload on cpu, finished, rank 0 of 2, local rank 0 of 2\n" in shown
    exported, other = tmp_path / re.search(r"exported to (.*)\n", shown)[1], tmp_path / "other"
    export_checkpoint(tmp_path / "checkpoints" / "last.ckpt", other)
    assert_same_weights(*(AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (exported, other)))

    status, shown = fit(tmp_path, text, 4, SLURM_RESTART_COUNT="1")
    assert status == 0, shown[-3000:]
    assert "Restored all states" in shown and "(step 4)" in shown
