import pytest
import torch

from lightning_cxl.run.session import Session, cut_for
from tests.distributed import training
from tests.distributed.ranks import RankError
from tests.distributed.training import Job, trained_as_by_fsdp
from tests.integration.llama import tiny_llama

pytest.importorskip("bitsandbytes")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}
BASE = {"sizes": SIZES, "lora": True, "micro_batches": 2, "clip": 0.05}
STREAMED = Job(**BASE, quantised="4 bit, nested", options={"stream_weights": True})
JOBS = {
    "4 bit": Job(**BASE, quantised="4 bit"),
    "4 bit, streamed": STREAMED,
    "8 bit, streamed": Job(**BASE, quantised="8 bit", options={"stream_weights": True}),
}


# of its kernels for 8 bit, none knows the device
CASES = [("4 bit, streamed", "apart"), ("4 bit", "apart"), ("4 bit", "cpu"), ("8 bit, streamed", "cpu")]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_as_fsdp_alone_and_as_one_process(ranks, name, device):
    for each in trained_as_by_fsdp(ranks, JOBS[name], kind=device):
        assert device == "cpu" or each.report["streamed"]["num_units"] == SIZES["num_hidden_layers"]


def test_every_rank_streams_the_whole_base_ahead_and_trains_as_fsdp_alone_and_as_one_process(ranks):
    alone = training.by_us(STREAMED).report
    for each in trained_as_by_fsdp(ranks, STREAMED):
        streamed = each.report["streamed"]
        assert streamed["num_units"] == SIZES["num_hidden_layers"]
        # those of one process have its adapters besides, which are new after each step
        assert 0.7 * alone["streamed"]["host_bytes"] < streamed["host_bytes"] < alone["streamed"]["host_bytes"]
        assert streamed["num_fetches"] <= alone["streamed"]["num_fetches"]
        assert streamed["num_late"] <= alone["streamed"]["num_late"]
        planned = each.report["planned_roles"]["compute_weights"]["dram"]
        assert streamed["host_bytes"] < planned < alone["planned_roles"]["compute_weights"]["dram"]


@pytest.mark.parametrize("stream", [True, False])
def test_biases_that_loading_has_left_in_files(ranks, tmp_path, stream):
    """They are converted while they load, and belong to layers that are not cut: Qwen2 has them."""
    torch.manual_seed(3)
    tiny_llama(hidden_size=64, vocab_size=64, attention_bias=True).bfloat16().save_pretrained(tmp_path)
    job = Job(folder=str(tmp_path), lora=True, micro_batches=2, clip=0.05, options={"stream_weights": stream})
    ours = ranks.of(2).run(training.by_us, job)
    assert any("q_proj.base_layer.bias" in name for name in ours[0].weights)
    training.assert_near(ours[0], training.by_one(job), weights=5 * training.LIMIT)


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
