"""Callbacks of the main job: the summary, samples at evaluations, and the export."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_cxl import CXLOffloadStrategy
from lightning_cxl.__main__ import main
from lightning_cxl.finetune.cli import Summary
from lightning_cxl.finetune.data import TextData
from lightning_cxl.finetune.evaluation_samples import EvaluationSamples
from lightning_cxl.finetune.export import ExportPretrained
from lightning_cxl.finetune.model import CausalLM
from tests.unit.finetune.conftest import SHAPE


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


@pytest.fixture
def chats(ask, chat_tokenizer):
    return TextData(ask(10), seq_len=64, batch_size=2, val_fraction=0.2, tokenizer_name_or_path=chat_tokenizer)


def test_held_out_conversations_are_cut_where_the_answer_begins(chats):
    chats.setup()
    held_out = chats.held_out(5)
    assert len(held_out) == 2
    for prompt, expected in held_out:
        asked = chats.tokenizer.decode(prompt)
        assert asked.endswith("<|im_end|>\n<|im_start|>assistant\n")
        number = asked.split("What is ")[1].split("?")[0]
        assert chats.tokenizer.decode(expected) == f"It is {number}.<|im_end|>"


def test_a_sample_ends_where_the_models_own_settings_end_an_answer(tiny_model):
    tiny_model.configure_model()
    prompt = torch.tensor([7])
    free = tiny_model.generate_tokens(prompt, max_new_tokens=4)
    tiny_model.model.generation_config.eos_token_id = [299, int(free[2])]
    assert tiny_model.generate_tokens(prompt, max_new_tokens=4).tolist() == free[:3].tolist()


def test_each_evaluation_shows_samples_and_training_goes_on_as_without_them(chats, make_trainer, capsys):
    def trained(*callbacks):
        torch.manual_seed(0)
        model = CausalLM(**SHAPE, lr=1e-2, warmup_steps=2)
        trainer = make_trainer(max_steps=4, val_check_interval=2, num_sanity_val_steps=1, callbacks=list(callbacks))
        trainer.fit(model, chats)
        return model.state_dict()

    plain = trained()
    capsys.readouterr()
    shown_too = trained(EvaluationSamples(count=2, max_new_tokens=5))
    shown = capsys.readouterr().out
    assert all(torch.equal(value, shown_too[name]) for name, value in plain.items())
    titles = [line for line in shown.splitlines() if line.startswith("step ")]
    assert titles == [f"step {step}, held-out sample {number}" for step in (2, 4) for number in (1, 2)]
    assert shown.count("expected: It is\n") == 4  # five tokens of bytes
    assert shown.count("What is ") == 4


def test_the_held_out_loss_is_the_mean_over_all_tokens_of_answers(write_lines, chat_tokenizer, make_trainer):
    """Samples with more answer count more; as one sum over transformers' logits of each has it."""
    rows = [{"prompt": "?", "completion": "a" * (1 + 5 * (number % 5))} for number in range(10)]
    options = {"val_fraction": 0.6, "tokenizer_name_or_path": chat_tokenizer}
    data = TextData(str(write_lines(*rows)), seq_len=64, batch_size=2, **options)
    model = CausalLM(**SHAPE)
    found = make_trainer().validate(model, data, verbose=False)[0]["val_loss"]
    total, count, means = 0.0, 0, []
    for sample in data._split["test"]:  # one by one: batches have several in a row
        tokens, labels = (torch.as_tensor(sample[name])[None] for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model.model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
        total, count = total + float(loss), count + int((labels[0, 1:] != -100).sum())
        means.append(float(loss) / int((labels[0, 1:] != -100).sum()))
    assert found == pytest.approx(total / count, rel=1e-6)
    assert abs(found - sum(means) / len(means)) > 1e-5


REFERS = {"tiers": {"ssd": {"path": "ssd", "budget": "1GiB", "checkpoint": "reference"}}}
REFERS["tier_rules"] = {"*": {"optimizer_state": "ssd"}}


@pytest.mark.parametrize("options", [{}, REFERS], ids=["in memory", "refers to SSD"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
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
