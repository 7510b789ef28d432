"""What the main job alone needs may be missing: everything else works, and commands say what they need."""

import subprocess
import sys

import pytest

MISSING = ("bitsandbytes", "datasets", "jsonargparse", "peft", "matplotlib")
WITHOUT = """
import importlib.metadata as metadata, sys
from importlib.machinery import PathFinder

class Hides(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

def from_name(name, known=metadata.Distribution.from_name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return known(name)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hides
metadata.Distribution.from_name = from_name
"""
TRAIN = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_cxl

class Module(BoringModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(strategy="cxl_offload", accelerator="cpu", max_steps=2, limit_val_batches=0, **quiet)
trainer.fit(Module())
print("steps", trainer.global_step)
"""
COMMAND = """
from lightning_cxl.__main__ import main
sys.argv = ["lightning_cxl", "fit", "--help", "all"]
main()
"""


def run(code: str, hidden: tuple[str, ...] = MISSING) -> subprocess.CompletedProcess[str]:
    code = f"hidden = {hidden}\n{WITHOUT}{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_a_module_trains_without_packages_of_the_main_job():
    result = run(TRAIN)
    assert result.stdout.strip().endswith("steps 2"), result.stderr


@pytest.mark.parametrize("hidden, needs", [(MISSING, "pip install datasets"), (("jsonargparse",), "jsonargparse")])
@pytest.mark.full
def test_the_main_job_says_what_it_needs(hidden, needs):
    result = run(COMMAND, hidden)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("`python -m lightning_cxl fit` needs ")
    assert needs in result.stderr
