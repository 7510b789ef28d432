"""Trainers of TRL with our mixin: supervised fine-tuning, and preferences with a second, frozen model."""

import copy

import pytest
import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification

from lightning_cxl.transformers import CXLTrainerMixin
from tests.cases import every_value
from tests.integration.hf_trainer import EXACT, PLAIN, arguments, assert_close, assert_identical, finish
from tests.integration.llama import tiny_llama, word_tokenizer

trl = pytest.importorskip("trl")

WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{i}" for i in range(14))]
STREAMED = {"stream_weights": True}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0}


def tokenizer():
    return word_tokenizer(WORDS, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def texts(num_rows):
    words = WORDS[4:]
    return [" ".join(words[(i * (k + 1) + k) % len(words)] for k in range(4 + i % 3)) for i in range(num_rows)]


def made(cls, options, lora, **parts):
    parts |= {"processing_class": tokenizer(), "peft_config": LoraConfig(**LORA) if lora else None}
    if options == PLAIN:
        return cls(**parts)
    return type(cls.__name__, (CXLTrainerMixin, cls), {})(**parts, offload=options)


def sft(folder, options=PLAIN, *, lora=False, **given):
    args = arguments(folder, cls=trl.SFTConfig, dataset_num_proc=None, max_length=16, **given)
    data = Dataset.from_dict({"text": texts(16)})
    return made(trl.SFTTrainer, options, lora, model=tiny_llama(), args=args, train_dataset=data)


def grpo(folder, options=PLAIN, *, lora=False, judged=False, **given):
    """Made from a folder, from where TRL loads the reference; a model gives rewards, too, if `judged`."""
    path = folder.parent / "model"
    defaults = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 3}
    args = arguments(folder, cls=trl.GRPOConfig, model_init_kwargs={"dtype": "float32"}, **{**defaults, **given})
    with PartialState().local_main_process_first():
        if not path.exists():
            tiny_llama().save_pretrained(path)
            tokenizer().save_pretrained(path)
    rewards = [lambda completions, **_: [float(len(set(each.split()))) for each in completions]]
    judges = [None]
    if judged:
        torch.manual_seed(3)
        config = LlamaConfig(**{**tiny_llama().config.to_dict(), "num_labels": 1, "pad_token_id": 0})
        rewards, judges = [*rewards, LlamaForSequenceClassification(config).eval()], [None, tokenizer()]
    data = Dataset.from_dict({"prompt": texts(8)})
    parts = {"reward_funcs": rewards, "reward_processing_classes": judges}
    return made(trl.GRPOTrainer, options, lora, model=str(path), args=args, train_dataset=data, **parts)


def dpo(folder, options=PLAIN, *, lora=False, reference=True, **given):
    args = arguments(folder, cls=trl.DPOConfig, dataset_num_proc=None, max_length=16, **given)
    model = tiny_llama()
    ref_model = copy.deepcopy(model).eval() if reference else None
    all_texts = texts(24)
    data = Dataset.from_dict({"prompt": all_texts[:8], "chosen": all_texts[8:16], "rejected": all_texts[16:]})
    if args.precompute_ref_log_probs:  # written beside the data, where all processes find it
        with PartialState().local_main_process_first():
            if PartialState().is_local_main_process:
                data.save_to_disk(folder / "data")
        data = Dataset.load_from_disk(folder / "data")
    return made(trl.DPOTrainer, options, lora, model=model, ref_model=ref_model, args=args, train_dataset=data)


def train(make, folder, options=PLAIN, **given):
    trainer = make(folder, options, **given)
    torch.manual_seed(7)
    trainer.train()
    return finish(trainer)


CASES = {
    "SFT, LoRA": (sft, {"lora": True}),
    "SFT, packed": (sft, {"packing": True, "packing_strategy": "wrapped"}),
    "DPO, two models": (dpo, {}),
    "DPO, reference that follows": (dpo, {"sync_ref_model": True, "ref_model_sync_steps": 2}),
    "GRPO, which generates, with a reference": (grpo, {"beta": 0.1, "num_iterations": 2}),
    "GRPO, a model judges": (grpo, {"judged": True}),
}


OPTIONS = {"CPUAdam": STREAMED, "torch": {**STREAMED, **EXACT}, "weights stay": {"stream_weights": False}}


@pytest.mark.parametrize(("case", "options"), every_value(CASES, OPTIONS))
def test_is_the_plain_trainer(tmp_path, case, options):
    (make, given), options = CASES[case], OPTIONS[options]
    plain = train(make, tmp_path, **given)
    ours = train(make, tmp_path, options, **given)
    (assert_identical if EXACT.items() <= options.items() else assert_close)(plain, ours)


def test_the_frozen_model_streams_and_stays_prepared(tmp_path):
    trainer = dpo(tmp_path, STREAMED)
    (reference,) = trainer.accelerator.offload.session.runs
    trainer.train()
    assert trainer.accelerator.offload.session.runs[0] is reference, "its weights are not placed twice"
    report = trainer.report()
    assert report["num_parameters"] == 2 * sum(p.numel() for p in trainer.model.parameters())
    assert len(report["optimizers"]) == 1
    assert reference.report()["streamed"]["num_fetches"] > 0
    assert not any(p.requires_grad and p.grad is not None for p in trainer.ref_model.parameters())
    trainer.train()
    assert len(trainer.accelerator.offload.session.runs) == 2
    finish(trainer)
