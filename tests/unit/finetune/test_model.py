import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from lightning_cxl import CXLOffloadStrategy
from lightning_cxl.__main__ import main
from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.cli import Summary
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.export import ExportPretrained
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning import Callback, seed_everything
from tests.unit.finetune.conftest import SHAPE


class Losses(Callback):
    def __init__(self):
        self.values = []
        self.rates = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(outputs["loss"].item())


@pytest.fixture
def gpt2_folder(tmp_path, data):
    """Another architecture with dropout, its tokenizer beside it, as save_pretrained leaves them."""
    data.setup()
    config = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0, attn_pdrop=0.3
    )
    torch.manual_seed(5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    data.tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_optimizer_decays_matrices_alone_leaves_out_frozen_parameters_and_its_rate_rises_and_falls(data, make_trainer):
    tiny_model = CausalLM(**SHAPE, weight_decay=0.25, warmup_steps=4)
    tiny_model.configure_model()
    frozen = tiny_model.model.model.embed_tokens.weight.requires_grad_(False)
    seen = Losses()
    trainer = make_trainer(max_steps=20, limit_val_batches=0, callbacks=[seen])
    trainer.fit(tiny_model, data)
    optimizer = trainer.optimizers[0]
    decayed, plain = optimizer.param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.25, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    every = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert every == {id(p) for p in tiny_model.parameters() if p is not frozen}
    assert seen.rates[:4] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3])
    assert seen.rates[3:] == sorted(seen.rates[3:], reverse=True)
    assert seen.rates[-1] == pytest.approx(1e-4)


def test_name_or_path_takes_that_models_weights_for_training(gpt2_folder, data, make_trainer):
    expected = GPT2LMHeadModel.from_pretrained(gpt2_folder).eval()
    module = CausalLM(str(gpt2_folder))
    trainer = make_trainer()
    validated = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    assert trainer.test(module, data, verbose=False)[0]["test_loss"] == validated
    tokens = trainer.predict(module, data)
    assert sum(len(batch) for batch in tokens) == len(data.val_dataloader()) * 2 and tokens[0].shape == (2, 16)
    with torch.no_grad():
        # without a cache the model keeps packed documents apart
        losses = [
            (expected(**batch, use_cache=False).loss, int((batch["labels"][:, 1:] != -100).sum()))
            for batch in data.val_dataloader()
        ]
    mean = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    assert validated == pytest.approx(float(mean), rel=1e-6)
    assert all(part.training for part in module.model.modules())


def test_samples_that_a_model_cannot_keep_apart_are_predicted_alone():
    sizes = {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=32)).eval()
    module = CausalLM(**SHAPE)
    module.model = model
    ids = torch.randint(4, 64, (3, 9))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0], [0, 1, 0, 1, 2, 3, 4, 5, 0], [0, *range(8)]])  # two padded
    rows = []
    with torch.no_grad():
        whole = model(ids).logits.argmax(-1)
        hook = model.lm_head.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
        found = module.predict_step({"input_ids": ids, "position_ids": positions}, 0)
        hook.remove()
        alone = [model(each[None]).logits.argmax(-1)[0] for each in ids.flatten().split([4, 3, 2, 2, 6, 1, 1, 8])]
    assert torch.equal(found.flatten(), torch.cat(alone)) and not torch.equal(found, whole)
    assert rows[-1] == 8  # not one for each token of padding


@pytest.mark.parametrize(
    ("mapped", "several", "left"), [(True, False, True), (None, True, True), (False, True, False), (None, False, False)]
)
def test_weights_stay_in_their_files_where_that_is_asked_for_or_several_processes_read(
    gpt2_folder, monkeypatch, mapped, several, left
):
    monkeypatch.setattr("lightning_cxl.weights.models.is_reading_deferred", lambda: several)
    module = CausalLM(str(gpt2_folder), mapped=mapped)
    module.configure_model()
    assert (str(gpt2_folder) in Path("/proc/self/maps").read_text()) is left
    expected = GPT2LMHeadModel.from_pretrained(gpt2_folder).state_dict()
    if mapped or not several:  # others are read later
        assert all(value.equal(expected[name]) for name, value in module.model.state_dict().items())


def test_what_cannot_be_is_refused(gpt2_folder, data, text_folder, make_trainer):
    for options, message in (
        ({"hidden_size": 16, "num_heads": 16}, "num_heads 16"),  # must divide the width, an even number of times
        ({"name_or_path": "hub/id", "mapped": True}, "mapped .* need a folder .*hub/id"),
        ({"name_or_path": "/proc"}, "cannot load"),
    ):
        with pytest.raises(ConfigError, match=message):
            CausalLM(**options).configure_model()
    with pytest.raises(ConfigError, match="max_steps"):
        make_trainer(max_steps=-1, max_epochs=-1).fit(CausalLM(**SHAPE), data)
    with pytest.raises(ConfigError, match="embedding 260 rows"):
        make_trainer().fit(CausalLM(**{**SHAPE, "vocab_size": 260}), data)
    long = TextData(f"{text_folder}/**/*.txt", seq_len=17, batch_size=2, tokenizer_name_or_path=str(gpt2_folder))
    with pytest.raises(ConfigError, match="seq_len 17"):
        make_trainer().fit(CausalLM(str(gpt2_folder)), long)


class StopAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


@pytest.mark.parametrize(("stop", "pretrained"), [(3, True), (7, False), (9, True)])  # an epoch has 7
def test_a_resumed_run_is_bit_identical(stop, pretrained, gpt2_folder, text_folder, make_trainer, tmp_path):
    def run(callbacks, ckpt_path=None, seed=3):
        seed_everything(seed)
        module = CausalLM(str(gpt2_folder), lr=1e-2) if pretrained else CausalLM(**SHAPE, lr=1e-2)
        data = TextData(f"{text_folder}/*.txt", seq_len=16, batch_size=5, vocab_size=300, val_fraction=0.2)
        losses = Losses()
        trainer = make_trainer(max_steps=stop + 3, callbacks=[losses, *callbacks], num_sanity_val_steps=0)
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        assert len(data.train_dataloader()) == 7
        return losses.values, module.state_dict()

    straight_losses, straight_weights = run([])
    first_losses, _ = run([StopAt(stop, tmp_path / "stop.ckpt")])
    last_losses, resumed_weights = run([], tmp_path / "stop.ckpt", seed=99)
    assert first_losses + last_losses == straight_losses
    assert straight_weights.keys() == resumed_weights.keys()
    assert all(torch.equal(straight_weights[name], resumed_weights[name]) for name in straight_weights)


def test_losses_are_those_of_the_whole_validation_set_before_and_after(tiny_model, data, make_trainer):
    summary = Summary(max_new_tokens=8)
    trainer = make_trainer(max_steps=6, num_sanity_val_steps=-1, val_check_interval=3, callbacks=[summary])
    tiny_model.configure_model()
    fresh = make_trainer().validate(tiny_model, data, verbose=False)[0]["val_loss"]
    trainer.fit(tiny_model, data)
    after = make_trainer().validate(tiny_model, data, verbose=False)[0]["val_loss"]
    assert fresh > after
    assert (summary.before, summary.after) == (f"{fresh:.4f}", f"{after:.4f} (step 6)")
    assert summary.sample.startswith(data.tokenizer.decode(data.held_out(1)[0][0]))


def test_held_out_conversations_are_cut_where_the_answer_begins(ask, chat_tokenizer):
    chats = TextData(ask(10), seq_len=64, batch_size=2, val_fraction=0.2, tokenizer_name_or_path=chat_tokenizer)
    chats.setup()
    held_out = chats.held_out(5)
    assert len(held_out) == 2
    for prompt, expected in held_out:
        asked = chats.tokenizer.decode(prompt)
        assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")
        number = asked.split("What is ")[1].split("?")[0]
        assert chats.tokenizer.decode(expected) == f"It is {number}.<|im_end|>"


def test_a_sample_is_repeatable_disturbs_nothing_and_ends_where_the_models_own_settings_end_an_answer(tiny_model):
    tiny_model.configure_model()
    tiny_model.train()
    prompt, state = torch.tensor([7]), torch.get_rng_state()
    free = tiny_model.generate_tokens(prompt, max_new_tokens=4)
    assert torch.equal(tiny_model.generate_tokens(prompt, max_new_tokens=4), free) and len(free) > 1
    assert torch.equal(torch.get_rng_state(), state) and all(part.training for part in tiny_model.modules())
    tiny_model.model.generation_config.eos_token_id = [299, int(free[2])]
    assert tiny_model.generate_tokens(prompt, max_new_tokens=4).tolist() == free[:3].tolist()


REFERS = {"tiers": {"ssd": {"path": "ssd", "budget": "1GiB", "checkpoint": "reference"}}}
REFERS["tier_rules"] = {"*": {"optimizer_state": "ssd"}}


@pytest.mark.parametrize(("precision", "options"), [("32-true", {}), ("bf16-true", REFERS)])
def test_a_run_and_its_checkpoint_by_itself_become_folders_of_transformers(
    tiny_model, data, make_trainer, tmp_path, monkeypatch, precision, options
):
    monkeypatch.chdir(tmp_path)
    given = {"strategy": CXLOffloadStrategy(**options), "callbacks": [ExportPretrained("of the run")]}
    trainer = make_trainer(max_steps=2, accelerator="auto", precision=precision, **given)
    trainer.fit(tiny_model, data)
    trainer.save_checkpoint("last.ckpt")
    monkeypatch.setattr(sys, "argv", ["lightning_cxl", "export", "last.ckpt", "of the checkpoint"])
    main()
    expected = torch.load("last.ckpt")["state_dict"]
    for folder in ("of the run", "of the checkpoint"):
        loaded, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert loaded.dtype == (torch.float32 if precision == "32-true" else torch.bfloat16)
        assert {f"model.{name}" for name in loaded.state_dict()} == expected.keys()
        assert all(torch.equal(value, expected[f"model.{name}"]) for name, value in loaded.state_dict().items())
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert tokenizer.get_vocab() == data.tokenizer.get_vocab()
        assert loaded.config.eos_token_id == tokenizer.eos_token_id == data.tokenizer.eos_token_id
    assert tokenizer("word1 word2")["input_ids"] == data.tokenizer("word1 word2")["input_ids"]
