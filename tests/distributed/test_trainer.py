"""Several processes under the Trainer of transformers: as one process, with folders that any number goes on from."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from tests.distributed import trainer_runs
from tests.distributed.ranks import RankError, of_rank_0
from tests.distributed.test_lightning import assert_close, assert_identical
from tests.integration.accelerate_loop import PLAIN
from tests.integration.llama import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of peft, TRL
STREAMED = {"stream_weights": True}
CASES = {
    "plain": {},
    "accumulated with a rest and clipped": {"gradient_accumulation_steps": 4, "max_grad_norm": 0.3},
    "LoRA": {"lora": True},
    "LoRA on a quantised base": {
        "lora": True, "quantised": "4 bit, nested", "options": {"stream_weights": True},
        "gradient_accumulation_steps": 2,
    },
    "evaluated before and meanwhile, tied": {
        "tied": True, "evaluates_first": True, "eval_strategy": "steps", "eval_steps": 2,
    },
    "twice": {"trains": 2},
}  # fmt: skip


def run(ranks, world, folder, *args, **keywords):
    """Return what rank 0 has of a run of `world` ranks."""
    return of_rank_0(ranks, world, trainer_runs.train, str(folder), *args, **keywords)


@pytest.mark.parametrize("name", CASES)
def test_several_processes_train_as_one(ranks, tmp_path, name):
    two, one = run(ranks, 2, tmp_path / "two", **CASES[name]), run(ranks, 1, tmp_path / "one", **CASES[name])
    assert_close(two, one)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=1e-6)


@pytest.mark.parametrize("name", ["plain", "LoRA", "evaluated before and meanwhile, tied"])
def test_transformers_loads_what_is_saved(ranks, tmp_path, name):
    weights = run(ranks, 2, tmp_path, **CASES[name])["weights"]
    if "LoRA" in name:
        loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path / "saved")
        assert not (tmp_path / "saved/model.safetensors").exists()
    else:
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    found = dict(loaded.named_parameters())
    assert weights.keys() == found.keys()
    assert all(torch.equal(found[each], value) for each, value in weights.items())


STATES = {
    "float32": {},
    "LoRA": {"lora": True},
    "LoRA with biases": {"lora": {"bias": "all"}, "biased": True},
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
    ],
)
def test_another_number_of_processes_goes_on(ranks, tmp_path, before, after, state):
    whole = run(ranks, before, tmp_path, **SAVING, **STATES[state])
    rest = run(ranks, after, tmp_path, resume=str(tmp_path / "checkpoint-4"), **STATES[state])
    assert len(whole["losses"]) == len(rest["losses"]) == 6
    if before == after:
        assert_identical(rest, whole)
    else:
        assert_close(
            rest, whole, 2**-7 if "bf16" in state else 1e-6
        )  # one rounding: they differ with the order of sums


def test_one_process_writes_where_several_have_written(ranks, tmp_path):
    run(ranks, 2, tmp_path, **SAVING)
    saved = run(ranks, 1, tmp_path, learning_rate=1e-2, **SAVING)
    rest = run(ranks, 1, tmp_path, resume=str(tmp_path / "checkpoint-4"), learning_rate=1e-2)
    assert_identical(rest, saved)


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


full = pytest.mark.full
REFERENCE = {"beta": 0.1, "num_generations": 2}
FOLLOWS = {"sync_ref_model": True, "ref_model_sync_steps": 2}
TRL = {
    "SFT, LoRA": ("sft", {"lora": True}),
    "DPO, two models": ("dpo", {}),
    "GRPO, LoRA without its adapters is the reference": ("grpo", {**REFERENCE, "lora": True}),
}
TRL_FULL = {
    "DPO, reference values computed before": ("dpo", {"precompute_ref_log_probs": True, "reference": False}),
    "GRPO, reference that follows": ("grpo", {**REFERENCE, **FOLLOWS}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "given"),
    [*TRL.values(), *(pytest.param(*each, marks=full) for each in TRL_FULL.values())],
    ids=[*TRL, *TRL_FULL],
)
def test_trl_is_as_with_its_own_processes(ranks, tmp_path, name, given):
    """TRL alone copies models to all processes; tokens are drawn by each, so one process would draw others."""
    pytest.importorskip("trl")
    folders = tmp_path / "plain", tmp_path / "ours"
    for folder in folders:
        folder.mkdir()
    plain, ours = [
        of_rank_0(ranks, 2, trainer_runs.of_trl, name, str(folder), options, **given)
        for folder, options in zip(folders, (PLAIN, STREAMED), strict=True)
    ]
    assert all(ours["cut"]) and not any(plain["cut"]), "the reference, too"
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-6, abs=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert len(ours["log"]) == len(plain["log"])
    for mine, theirs in zip(ours["log"], plain["log"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for each, weights in plain["weights"].items():
        assert (ours["weights"][each] - weights).abs().max() <= 1e-6, each


def test_generation_that_reads_whole_weights_is_refused(ranks, tmp_path):
    pytest.importorskip("trl")
    (tmp_path / "run").mkdir()
    given = {"num_generations": 2, "use_transformers_continuous_batching": True}
    with pytest.raises(RankError, match=r"use_transformers_continuous_batching=True.*each of 2 processes has only"):
        of_rank_0(ranks, 2, trainer_runs.of_trl, "grpo", str(tmp_path / "run"), STREAMED, **given)


@pytest.mark.full
def test_files_of_each_machine_are_refused(ranks, tmp_path):
    with pytest.raises(RankError, match=r"save_on_each_node=True.*2 processes write one checkpoint together"):
        run(ranks, 2, tmp_path, save_on_each_node=True)
