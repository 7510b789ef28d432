"""What `test_ssd_training` measures in a process of its own: the memory of training models that come from files.

Weights and state of units lie on SSD. Counted is memory that is nobody's cache, beside the models.
"""

import gc
import warnings
from pathlib import Path

import torch

import lightning_cxl
from lightning_cxl.memory.host_memory import HeapTrimmer
from tests.integration.training import make_trainer, offload
from tests.integration.weight_memory import Peak
from tests.models import Task, TinyTransformer, token_data

DEPTHS, WIDTH = (3, 9), 256
RULES = {"*": {"weights": "ssd", "optimizer_state": "ssd"}}


def from_file(path: Path, depth: int) -> TinyTransformer:
    """Return a model whose weights are the pages of a file."""
    torch.manual_seed(0)
    lightning_cxl.save_weights(TinyTransformer(depth=depth, width=WIDTH), path)
    with lightning_cxl.empty_weights():
        model = TinyTransformer(depth=depth, width=WIDTH)
    lightning_cxl.load_weights(model, path, mapped=True)
    return model


def fit(folder: Path, model: TinyTransformer) -> None:
    strategy = offload(
        tiers={"ssd": {"path": str(folder / "ssd"), "budget": "1GiB"}},
        tier_rules=RULES,
        stream_weights=True,
        overlap_step=True,
        on_overflow="ignore",
    )
    make_trainer(strategy, max_steps=3).fit(Task(model), token_data())
    for parameter in model.parameters():  # whoever looks sees all of it
        float(parameter.detach().sum())


def bytes_of_weights_and_peaks(folder: Path) -> list[tuple[int, int]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fit(folder, from_file(folder / "first.safetensors", 3))  # what is imported and allocated once
    found = []
    for depth in DEPTHS:
        model = from_file(folder / f"{depth}.safetensors", depth)
        gc.collect()
        HeapTrimmer().trim_now()  # so that nothing of before is counted, or given back meanwhile
        with Peak() as peak:
            fit(folder, model)
        found.append((sum(parameter.nbytes for parameter in model.blocks.parameters()), peak.peak - peak.start))
        del model
    return found
