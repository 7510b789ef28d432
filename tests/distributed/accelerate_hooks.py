"""What hooks of users see on several ranks when Accelerate saves and loads a state, and who counts the ranks."""

import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.integrations.accelerate import load_whole
from tests.distributed.accelerate_runs import accelerator_of
from tests.distributed.training import place, whole
from tests.integration.accelerate_loop import forget_accelerators
from tests.integration.llama import tiny_llama
from tests.models import TinyTransformer


def save_and_load(folder: str, *, own: bool) -> dict[str, Any]:
    """Save two models with hooks and load them; with `own` the hooks take the first model for themselves."""
    torch.manual_seed(5)
    accelerator = accelerator_of()
    models = [TinyTransformer(dropout=0.0), TinyTransformer(dropout=0.0)]
    saved: list[Any] = []
    loaded: list[Any] = []

    def on_save(models: list[Any], weights: list[Any], folder: str) -> None:
        saved.extend([list(models), list(weights)])
        if own:
            weights.pop(0)

    def on_load(models: list[Any], folder: str) -> None:
        loaded.extend(models)
        if own:
            models.pop(0)

    try:
        models = [accelerator.prepare(model) for model in models]
        accelerator.register_save_state_pre_hook(on_save)
        accelerator.register_load_state_pre_hook(on_load)
        before = [_whole(model) for model in models]
        accelerator.save_state(folder)
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.zero_()
        accelerator.load_state(folder)
        return {
            "losses": [], "norms": [],
            "all given": saved[0] == models and loaded == models, "weights given": saved[1],
            "back": [all(map(torch.equal, _whole(model), old)) for model, old in zip(models, before, strict=True)],
            "files": sorted(path for path in os.listdir(folder) if "model" in path),
        }  # fmt: skip
    finally:
        accelerator.free_memory()


def load_what_was_compiled(folder: str) -> bool:
    """Return whether weights that one process has saved of a compiled model come back."""
    torch.manual_seed(5)
    rank, _ = place()
    model = TinyTransformer(dropout=0.0)
    expected = [each.detach().clone() for each in model.parameters()]
    if rank == 0:
        named = {f"_orig_mod.{name}": value for name, value in model.state_dict().items()}
        save_file(named, Path(folder) / "model.safetensors")
    accelerator = accelerator_of()
    try:
        model = accelerator.prepare(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load_whole(Path(folder), 0, model)
        return all(map(torch.equal, _whole(model), expected))
    finally:
        accelerator.free_memory()


def generate() -> tuple[int, bool]:
    """Return how many tokens a rank gets where each wants another number, and whether a plain model gives them."""
    torch.manual_seed(5)
    accelerator = accelerator_of()
    model = tiny_llama()
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    try:
        model = accelerator.prepare(model)
        rank = accelerator.process_index
        tokens = torch.arange(1, 5 + rank)[None]
        given = {"max_new_tokens": 2 + 4 * rank, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(tokens, **given)
        return found.shape[1], torch.equal(found, plain.generate(tokens, **given))
    finally:
        accelerator.free_memory()


def _whole(model: Any) -> list[torch.Tensor]:
    return [whole(parameter).clone() for parameter in model.parameters()]


def budget_of_each() -> dict[str, Any]:
    """Return a rank's part of a budget of 1 GiB where no launcher says how many ranks a machine has."""
    forget_accelerators()
    rank, world = place()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    kept = os.environ.pop("LOCAL_WORLD_SIZE", None)
    accelerator = CXLAccelerator(cpu=True, offload={"tiers": {"dram": "1GiB"}})
    try:
        accelerator.prepare(TinyTransformer(dropout=0.0))
        return {"losses": [], "norms": [], "bytes": accelerator.report()["tiers"]["dram"]["budget_bytes"]}
    finally:
        accelerator.free_memory()
        del os.environ["MASTER_ADDR"]
        if kept is not None:
            os.environ["LOCAL_WORLD_SIZE"] = kept
