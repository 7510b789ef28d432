"""QLoRA in several processes: each has the whole quantised base, and adapters are cut; as FSDP2 alone, as one."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from transformers import AutoModelForCausalLM

import lightning_cxl
from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.finetune.export import ExportPretrained
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.run.session import Session, cut_for
from tests.distributed import lightning_runs, training
from tests.distributed.ranks import RankError, of_rank_0
from tests.distributed.test_ssd import on_ssd
from tests.distributed.training import LIMIT, Job, assert_close, assert_same, place, trained_as_by_fsdp, whole
from tests.integration.llama import tiny_llama
from tests.integration.test_main_job import LORA, chats_of, make_base


def main_job(folder: Path, out: Path, steps: int, save: str) -> dict[str, torch.Tensor]:
    """Train adapters on all ranks and export them to `out`; return them, whole, by name."""
    seed_everything(11, verbose=False)
    model = CausalLM(str(folder), lora=LORA, lr=1e-2, quantization="4bit")
    trainer = Trainer(
        accelerator="cpu", devices=place()[1], max_steps=steps, max_epochs=-1, logger=False,
        callbacks=[ExportPretrained(str(out))],
        strategy=lightning_cxl.CXLOffloadStrategy(stream_weights=True), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(model, chats_of(folder))
    trainer.save_checkpoint(save)
    return {name: whole(each) for name, each in model.model.named_parameters() if "lora_" in name}


pytest.importorskip("bitsandbytes")
EVERYTHING = {"*": {"weights": "ssd", "optimizer_state": "ssd"}}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}
BASE = {"sizes": SIZES, "lora": True, "micro_batches": 2, "clip": 0.05}
STREAMED = Job(**BASE, quantised="4 bit, nested", options={"stream_weights": True})
JOBS = {
    "4 bit": Job(**BASE, quantised="4 bit"),
    "4 bit, streamed": STREAMED,
    "8 bit, streamed": Job(**BASE, quantised="8 bit", options={"stream_weights": True}),
}


@pytest.mark.parametrize("name", JOBS)
def test_as_fsdp_alone_and_as_one_process(ranks, name):
    trained_as_by_fsdp(ranks, JOBS[name])


def test_every_rank_streams_the_whole_base_ahead(ranks):
    alone = training.by_us(STREAMED).report
    for each in ranks.of(2).run(training.by_us, STREAMED):
        streamed = each.report["streamed"]
        assert streamed["num_units"] == SIZES["num_hidden_layers"]
        # those of one process have its adapters besides, which are new after each step
        assert 0.7 * alone["streamed"]["host_bytes"] < streamed["host_bytes"] < alone["streamed"]["host_bytes"]
        assert streamed["num_fetches"] <= alone["streamed"]["num_fetches"]
        assert streamed["num_late"] <= alone["streamed"]["num_late"]
        planned = each.report["planned_roles"]["compute_weights"]["dram"]
        assert streamed["host_bytes"] < planned < alone["planned_roles"]["compute_weights"]["dram"]


@pytest.mark.parametrize("name", ["4 bit", "4 bit, streamed"])  # of its kernels for 8 bit, none knows the device
def test_on_a_device_apart_as_fsdp_alone_there(ranks, name):
    ours = trained_as_by_fsdp(ranks, JOBS[name], kind="apart")
    assert all(each.report["streamed"]["num_units"] == SIZES["num_hidden_layers"] for each in ours)


@pytest.mark.full
def test_where_what_is_cut_lies_changes_nothing(ranks, tmp_path):
    there = replace(STREAMED, options={**STREAMED.options, **on_ssd(tmp_path / "ssd", EVERYTHING)})
    ours, others = (ranks.of(2, "apart").run(training.by_us, job) for job in (there, STREAMED))
    assert_same(ours, others)
    for mine, other in zip(ours, others, strict=True):
        used, before = (each.report["roles"]["compute_weights"]["dram"] for each in (mine, other))
        assert used < 0.5 * before


@pytest.mark.parametrize("stream", [False, True])
def test_biases_that_loading_has_left_in_files(ranks, tmp_path, stream):
    """They are converted while they load, and belong to layers that are not cut."""
    torch.manual_seed(3)
    tiny_llama(hidden_size=64, vocab_size=64, attention_bias=True).bfloat16().save_pretrained(tmp_path)
    job = Job(folder=str(tmp_path), lora=True, micro_batches=2, clip=0.05, options={"stream_weights": stream})
    ours = ranks.of(2).run(training.by_us, job)
    assert any("q_proj.base_layer.bias" in name for name in ours[0].weights)
    losses, weights = training.largest_difference(ours[0], training.by_one(job))
    assert losses <= LIMIT and weights <= 5 * LIMIT, (losses, weights)


LIGHTNING = {
    "module": {"quantised": "4 bit, nested"},
    "options": {"stream_weights": True},
    "trainer": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
}


@pytest.mark.full
def test_checkpoints_of_lightning_are_of_any_number_of_processes(ranks, tmp_path):
    fit = partial(of_rank_0, ranks, train=lightning_runs.fit, **LIGHTNING)
    whole = fit(1, steps=4)
    assert_close(fit(2, steps=4), whole)
    rest = {**whole, "losses": whole["losses"][4:]}
    for before, after in [(2, 1), (2, 2), (1, 2)]:
        path = str(tmp_path / f"{before}.ckpt")
        fit(before, steps=2, save=path)
        assert_close(fit(after, steps=4, resume=path), rest)


def cut_anew(spoil):
    """Cut a quantised model that `spoil` has changed."""
    model = training.make_model(STREAMED)
    spoil(model)
    cut_for(Session(), model, training.mesh_of(STREAMED, 2), training.device())


def other_scales_on_rank_1(model):
    if training.place()[0] == 1:
        state = model.base_model.model.model.layers[1].mlp.up_proj.weight.quant_state
        state.absmax = state.absmax + 1


def trained_bias(model):
    layer = model.base_model.model.model.layers[1].mlp.up_proj
    layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features))


@pytest.mark.parametrize(
    "spoil, text",
    [
        (other_scales_on_rank_1, "layers.1.mlp.up_proj.weight` of the quantised base has other values on rank 1"),
        (trained_bias, "layers.1.mlp.up_proj.bias` is trained and belongs to a quantised layer"),
    ],
)
def test_refused_by_name(ranks, spoil, text):
    with pytest.raises(RankError) as caught:
        ranks.of(2).run(cut_anew, spoil)
    assert text in str(caught.value)


@pytest.mark.full
def test_adapters_of_the_main_job_are_saved_and_exported(ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", str(tmp_path / "cache"))
    base, path = tmp_path / "base", str(tmp_path / "last.ckpt")
    make_base(base)
    trained, same = ranks.of(2).run(main_job, base, tmp_path / "adapter", 2, save=path)
    assert len(trained) == 2 * 7 * 3 and all(torch.equal(each, same[name]) for name, each in trained.items())
    assert all(each.any() for each in trained.values())
    export_checkpoint(Path(path), tmp_path / "of the checkpoint", only_adapter=True)
    for exported in ("adapter", "of the checkpoint"):
        adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / exported)
        found = adapted.state_dict()
        assert all(torch.equal(each, found[name]) for name, each in trained.items()), exported
