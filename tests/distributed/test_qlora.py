"""QLoRA in several processes: each has the whole quantised base, and adapters are cut; as FSDP2 alone, as one."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from lightning_cxl.run.session import Session, cut_for
from tests.distributed import lightning_runs, training
from tests.distributed.ranks import RankError, of_rank_0
from tests.distributed.test_ssd import on_ssd
from tests.distributed.training import Job, assert_close, assert_same, trained_as_by_fsdp

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
