"""Weights from files under the strategy: on their tiers from the first byte, trained, saved, refused when missing."""

import pytest
import torch
import transformers as tf
from lightning.pytorch import LightningModule

import lightning_cxl
from lightning_cxl import residency
from tests.integration.training import make_trainer, offload, run
from tests.models import TINY_LLAMA, Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu

LLAMA = {**TINY_LLAMA, "vocab_size": 37, "tie_word_embeddings": True}


@pytest.fixture
def folder(tmp_path):
    tf.logging.disable_progress_bar()
    torch.manual_seed(3)
    tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    return tmp_path / "llama"


class Language(LightningModule):
    """Loads in `configure_model`, and notes where weights were at once and in the first step."""

    def __init__(self, load):
        super().__init__()
        self.load = load
        self.model = None
        self.losses = []

    def configure_model(self):
        if self.model is None:
            self.model = self.load()
            self.at_once = {name: set(residency(p)) for name, p in self.model.named_parameters()}
            self.addresses = {name: p.data_ptr() for name, p in self.model.named_parameters()}

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.in_training = {name: set(residency(p)) for name, p in self.model.named_parameters()}
            self.moved = [n for n, p in self.model.named_parameters() if p.data_ptr() != self.addresses[n]]
            self.report = getattr(self.trainer.strategy, "report", dict)()
        loss = self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(load, strategy, steps=3, **trainer_args):
    module = Language(load)
    make_trainer(strategy, max_steps=steps, **trainer_args).fit(module, token_data())
    return module


def ours(folder):
    return lightning_cxl.from_pretrained(tf.AutoModelForCausalLM, folder)


def test_a_pretrained_model_is_where_it_belongs_at_once_and_trains_as_any_other(folder):
    module = fit(lambda: ours(folder), offload(activation_offload=False))
    weights = sum(p.nbytes for p in module.model.parameters())
    assert set().union(*module.at_once.values()) == {"dram"} and module.moved == []
    assert (
        module.report["roles"]["compute_weights"] == module.report["peak_roles"]["compute_weights"] == {"dram": weights}
    )
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    plain = fit(lambda: tf.AutoModelForCausalLM.from_pretrained(folder), "auto")
    assert module.losses == pytest.approx(plain.losses, rel=1e-6)


def test_rules_are_applied_at_setup_and_decorators_at_once(folder):
    rules = {"model.model.layers.1*": {"weights": "cxl"}}
    module = fit(lambda: ours(folder), offload(tier_rules=rules))
    assert set().union(*module.at_once.values()) == {"dram"}
    for name, where in module.in_training.items():
        assert where == {"cxl" if "layers.1." in name else "dram"}, name

    def decorated():
        with lightning_cxl.empty_weights():
            model = tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA))
        lightning_cxl.tier(weights="cxl")(model.model.layers[0])
        lightning_cxl.load_weights(model, folder)
        return model

    module = fit(decorated, "cxl_offload")
    assert module.moved == []
    for name, where in module.at_once.items():
        assert where == {"cxl" if "layers.0." in name else "dram"}, name
    assert module.in_training == module.at_once


def test_weights_loaded_in_a_run_are_what_trains_next(tmp_path):
    """Writing in place counts as a change: separate masters take it over, as a copied-in state dict would be."""
    reference = TinyTransformer(dropout=0.0)
    lightning_cxl.save_weights(reference, tmp_path)

    def trained(load):
        module = Task(TinyTransformer(dropout=0.0))
        module.on_train_start = lambda: load(module.model)
        return run({"master": "fp32"}, module, 3, precision="bf16-true")[0].state_dict()

    ours = trained(lambda model: lightning_cxl.load_weights(model, tmp_path))
    expected = trained(lambda model: model.load_state_dict(reference.state_dict()))
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
    assert not torch.equal(ours["model.embed.weight"], reference.embed.weight.bfloat16())
