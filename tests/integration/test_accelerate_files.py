"""What Accelerate saves and loads: folders of `save_state`, models, and the way to plain Accelerate and back."""

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import lightning_cxl
from tests.integration.accelerate_loop import (
    EXACT,
    PLAIN,
    assert_close,
    assert_identical,
    make_accelerator,
    prepared,
    steps,
    weights_of,
)
from tests.integration.llama import tiny_llama
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True, **EXACT}
BATCHES, HALF = 8, 4


def steady(**arguments):
    return TinyTransformer(dropout=0.0, **arguments)


def start(offload, make_model=steady, **arguments):
    accelerator = make_accelerator(offload, **arguments)
    return accelerator, prepared(accelerator, make_model, data=lambda: token_data(BATCHES))


def go_on(accelerator, parts, first, last):
    """Train on some of the batches; returns the losses."""
    model, optimizer, data, scheduler = parts
    batches = [batch for index, batch in enumerate(data) if first <= index < last]
    return list(steps(accelerator, model, optimizer, batches, scheduler))


def close(accelerator):
    accelerator.free_memory()


def whole(offload, **arguments):
    accelerator, parts = start(offload, **arguments)
    losses = go_on(accelerator, parts, 0, BATCHES)
    result = losses, weights_of(accelerator, parts[0])
    close(accelerator)
    return result


@pytest.mark.parametrize("safe", [True, False])
def test_no_weight_is_missing_in_a_file(safe, tmp_path):
    accelerator, parts = start(STREAMED)
    go_on(accelerator, parts, 0, 2)
    accelerator.save_state(str(tmp_path), safe_serialization=safe)
    path = tmp_path / ("model.safetensors" if safe else "pytorch_model.bin")
    saved = load_file(path) if safe else torch.load(path, weights_only=True, map_location="cpu")
    weights = weights_of(accelerator, parts[0])
    assert saved.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in saved.items())
    close(accelerator)


def test_a_model_alone(tmp_path):
    accelerator, parts = start(STREAMED)
    go_on(accelerator, parts, 0, 2)
    accelerator.save_model(parts[0], str(tmp_path), max_shard_size="20KB")
    saved = {}
    for path in tmp_path.glob("*.safetensors"):
        saved |= load_file(path)
    weights = weights_of(accelerator, parts[0])
    assert saved.keys() == weights.keys() and len(list(tmp_path.glob("*.safetensors"))) > 1
    assert all(torch.equal(value, weights[name]) for name, value in saved.items())
    close(accelerator)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_alone(tied, tmp_path):
    accelerator = make_accelerator(STREAMED, mixed_precision="bf16")
    parts = prepared(accelerator, lambda: tiny_llama(tie_word_embeddings=tied))

    def loss_of(model, batch):
        return model(input_ids=batch[0], labels=batch[0]).loss

    list(steps(accelerator, *parts, loss_of=loss_of))
    accelerator.unwrap_model(parts[0]).save_pretrained(
        tmp_path, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    weights = weights_of(accelerator, parts[0])
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in loaded.items())
    accelerator.unwrap_model(parts[0], keep_fp32_wrapper=False).save_pretrained(
        tmp_path / "2", state_dict=accelerator.get_state_dict(parts[0])
    )
    assert LlamaForCausalLM.from_pretrained(tmp_path / "2").state_dict().keys() == weights.keys()
    close(accelerator)


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def test_automatic_names_and_objects_of_the_user(tmp_path):
    def project():
        return ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)

    accelerator, parts = start(STREAMED, project_config=project())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    losses = []
    for first in (0, 2, 4):
        losses += go_on(accelerator, parts, first, first + 2)
        counter.value += 1
        accelerator.save_state()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    close(accelerator)
    accelerator, parts = start(STREAMED, project_config=project())
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.load_state()
    assert counter.value == 3
    losses += go_on(accelerator, parts, 6, BATCHES)
    assert_identical(whole(PLAIN), (losses, weights_of(accelerator, parts[0])))
    close(accelerator)


def test_loaded_state_lies_on_its_tier(tmp_path):
    """Torch's own optimizers make new tensors when they load."""
    accelerator, parts = start(STREAMED)
    go_on(accelerator, parts, 0, 1)
    accelerator.save_state(str(tmp_path))
    close(accelerator)
    accelerator, parts = start(STREAMED)
    accelerator.load_state(str(tmp_path))
    averages = [state["exp_avg"] for state in parts[1].state.values()]
    assert sum(average.nbytes for average in averages) > 0
    assert all(lightning_cxl.residency(average) == {"dram": average.nbytes} for average in averages)
    assert sum(accelerator.report()["roles"]["momentum"].values()) > 0
    close(accelerator)


# -- the tier ssd


def ssd(folder, **more):
    return {
        "tiers": {"ssd": {"path": str(folder), "budget": "64MiB", **more}},
        "tier_rules": {"*": {"optimizer_state": "ssd"}},
    }


# -- state in formats of ours


def converted(folder):
    """Make the optimizer's file one for plain torch, as the guide says."""
    state = torch.load(folder / "optimizer.bin", weights_only=True)
    weights = load_file(folder / "model.safetensors")
    checkpoint = {"state_dict": weights, "optimizer_states": [state], "lightning_cxl": state["lightning_cxl"]}
    torch.save(lightning_cxl.plain_checkpoint(checkpoint)["optimizer_states"][0], folder / "optimizer.bin")


@pytest.mark.parametrize(("state", "converts"), [("bf16", False), ("bf16", True), ("8bit", True)])
def test_files_with_small_state_go_to_plain_accelerate(state, converts, tmp_path):
    accelerator, parts = start({"state": state}, make_model=wide)
    losses = go_on(accelerator, parts, 0, HALF)
    accelerator.save_state(str(tmp_path))
    close(accelerator)
    if converts:
        converted(tmp_path)
    accelerator, parts = start(PLAIN, make_model=wide)
    accelerator.load_state(str(tmp_path))
    assert {value.dtype for each in parts[1].state.values() for value in each.values()} == {torch.float32}
    losses += go_on(accelerator, parts, HALF, BATCHES)
    assert_close(whole(PLAIN, make_model=wide), (losses, {}), atol=1e-3)


def wide():
    return steady(width=128)  # small tensors have no 8-bit state
