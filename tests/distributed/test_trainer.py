import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForCausalLM
from transformers.trainer_utils import set_seed

from lightning_cxl.sharding.fsdp import is_cut
from lightning_cxl.transformers import CXLTrainer
from tests.distributed.ranks import of_rank_0
from tests.distributed.training import assert_close, assert_identical, assert_same_weights, difference, place, whole
from tests.integration.hf_trainer import PLAIN, arguments, rows
from tests.integration.llama import tiny_llama
from tests.integration.quantised import quantise

BATCH = 4
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)


def of_all(**given: Any) -> dict[str, Any]:
    """Return arguments with which every number of ranks takes the same rows for a step."""
    rank, world = place()
    if world > 1:  # a run of Lightning before takes some away
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    sizes = {"per_device_train_batch_size": BATCH // world, "per_device_eval_batch_size": BATCH // world}
    return {**sizes, "use_cpu": True, "adam_epsilon": 1e-5, **given}


def train(
    folder, *, options=None, lora=None, biased=False, tied=False, quantised="", dtype=torch.float32, resume=None,
    evaluates_first=False, trains=1, **given,
) -> dict[str, Any]:  # fmt: skip
    """Train on all ranks, and save the model; return what the Trainer has logged, and the weights."""
    set_seed(5)
    args = arguments(folder, **of_all(**given))
    model = tiny_llama(tie_word_embeddings=tied, attention_bias=biased).to(dtype)
    if quantised:
        model = tiny_llama(hidden_size=64)
        quantise(model, quantised)
    if lora is not None:
        model = get_peft_model(model, replace(LORA, **lora))
    trainer = CXLTrainer(model, args, train_dataset=rows(24), eval_dataset=rows(8, seed=4), offload=options)
    return _trained(trainer, resume, folder, evaluates_first=evaluates_first, trains=trains)


def of_trl(name: str, folder: str, options: dict[str, Any] | str | None, **given: Any) -> dict[str, Any]:
    """Train with a function of `test_hf_trl` on all ranks; of `PLAIN` options is TRL with DistributedDataParallel."""
    from tests.integration import test_hf_trl

    set_seed(5)
    return _trained(getattr(test_hf_trl, name)(Path(folder), options, **of_all(**given)), None, folder)


def _trained(
    trainer: Any, resume: str | None, folder: str, *, evaluates_first: bool = False, trains: int = 1
) -> dict[str, Any]:
    try:
        first = [trainer.evaluate()["eval_loss"]] if evaluates_first else []
        for _ in range(trains):
            trainer.train(resume_from_checkpoint=resume)
        log = trainer.state.log_history
        trainer.save_model(str(Path(folder) / "saved"))
        return {
            "losses": [each["loss"] for each in log if "loss" in each],
            "norms": [each["grad_norm"] for each in log if "grad_norm" in each],
            "cut": [is_cut(each) for each in trainer.accelerator._models],
            "log": [_measured(each) for each in log[:-1]],
            "evaluated": [*first, *(each["eval_loss"] for each in log if "eval_loss" in each)],
            "weights": {name: whole(parameter) for name, parameter in trainer.model.named_parameters()},
        }
    finally:
        if hasattr(trainer.accelerator, "offload"):
            trainer.accelerator.offload.close()  # `end` would let the process group go, too


def _measured(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what was logged of a step, but losses, norms and seconds."""
    return {
        name: value for name, value in entry.items()
        if not any(word in name for word in ("loss", "grad_norm", "time", "per_second"))
    }  # fmt: skip


STREAMED = {"stream_weights": True}
CASES = {
    "plain": {},
    "accumulated with a rest and clipped": {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3},
    "LoRA": {"lora": {}},
    "LoRA on a quantised base": {
        "lora": {}, "quantised": "4 bit, nested", "options": {"stream_weights": True},
        "gradient_accumulation_steps": 2,
    },
    "evaluated before and meanwhile, tied": {
        "tied": True, "evaluates_first": True, "eval_strategy": "steps", "eval_steps": 2,
    },
    "twice": {"trains": 2},
}  # fmt: skip


def run(ranks, world, folder, *args, **keywords):
    return of_rank_0(ranks, world, train, str(folder), *args, **keywords)


@pytest.mark.parametrize("name", CASES)
def test_several_processes_train_as_one(ranks, tmp_path, name):
    two, one = run(ranks, 2, tmp_path / "two", **CASES[name]), run(ranks, 1, tmp_path / "one", **CASES[name])
    assert_close(two, one)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=1e-6)
    saved = tmp_path / "two" / "saved"
    if "quantised" not in name:
        adapted = PeftModel.from_pretrained(tiny_llama(), saved) if name == "LoRA" else None
        assert (saved / "model.safetensors").exists() == (adapted is None)
        loaded = adapted or LlamaForCausalLM.from_pretrained(saved)
        assert_same_weights(dict(loaded.named_parameters()), two["weights"])


STATES = {
    "float32": {},
    "LoRA": {"lora": {}},
    "LoRA with biases": {"lora": {"bias": "all"}, "biased": True},
    "LoRA on a quantised base": {"lora": {}, "quantised": "4 bit", "options": {"stream_weights": True}},
    "bf16 with split masters": {"dtype": torch.bfloat16},
    "bf16 with float32 masters": {"dtype": torch.bfloat16, "options": {"master": "fp32"}},
}
SAVING = {"save_strategy": "steps", "save_steps": 4}


@pytest.mark.parametrize(
    "before, after, state",
    [
        (2, 2, "bf16 with split masters"),
        (2, 2, "LoRA with biases"),
        (2, 1, "float32"),
        (1, 2, "bf16 with float32 masters"),
        (2, 1, "LoRA"),
        (2, 1, "LoRA on a quantised base"),
    ],
)
def test_another_number_of_processes_goes_on(ranks, tmp_path, before, after, state):
    whole = run(ranks, before, tmp_path, **SAVING, **STATES[state])
    rest = run(ranks, after, tmp_path, resume=str(tmp_path / "checkpoint-4"), **STATES[state])
    assert len(whole["losses"]) == len(rest["losses"]) == 6
    if before == after:
        assert_identical(rest, whole)
    else:  # one rounding: they differ with the order of sums
        assert_close(rest, whole, 2**-7 if "bf16" in state else 1e-6)


def test_the_best_model_comes_back(ranks, tmp_path):
    given = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip
    two = run(ranks, 2, tmp_path, **given)
    best = max(range(3), key=lambda number: two["evaluated"][number])
    assert best != 2, "the last one is not the best"
    loaded = LlamaForCausalLM.from_pretrained(Path(tmp_path) / f"checkpoint-{2 * (best + 1)}")
    assert all(torch.equal(value, two["weights"][name]) for name, value in loaded.named_parameters())


REFERENCE = {"beta": 0.1, "num_generations": 2}
FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 2}
TRL = {
    "SFT, LoRA": ("sft", {"lora": True}),
    "DPO, two models": ("dpo", {}),
    "GRPO, LoRA without its adapters is the reference": ("grpo", {**REFERENCE, "lora": True}),
    "DPO, reference values computed before": ("dpo", {"precompute_ref_log_probs": True, "reference": False}),
    "GRPO, reference that follows": ("grpo", {**REFERENCE, **FOLLOWS}),
}


@pytest.mark.parametrize(("name", "given"), TRL.values(), ids=TRL)
def test_trl_is_as_with_its_own_processes(ranks, tmp_path, name, given):
    """TRL alone copies models to all processes; tokens are drawn by each, so one process would draw others."""
    pytest.importorskip("trl")
    folders = tmp_path / "plain", tmp_path / "ours"
    for folder in folders:
        folder.mkdir()
    plain, ours = [
        of_rank_0(ranks, 2, of_trl, name, str(folder), options, **given)
        for folder, options in zip(folders, (PLAIN, STREAMED), strict=True)
    ]
    assert all(ours["cut"]) and not any(plain["cut"]), "the reference, too"
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6, abs=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert len(ours["log"]) == len(plain["log"])
    for mine, theirs in zip(ours["log"], plain["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert difference(ours["weights"], plain["weights"]) <= 1e-6
