"""What the main job alone needs may be missing: everything else works."""

import subprocess
import sys

WITHOUT = """
import importlib.metadata as metadata, sys
from importlib.machinery import PathFinder

hidden = ("bitsandbytes", "datasets", "jsonargparse", "peft", "matplotlib")

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


def test_a_module_trains_without_packages_of_the_main_job():
    result = subprocess.run([sys.executable, "-c", WITHOUT + TRAIN], capture_output=True, text=True)
    assert result.stdout.strip().endswith("steps 2"), result.stderr
