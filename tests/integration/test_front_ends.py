"""The contract of front ends: what holds with Lightning, Fabric, Accelerate and transformers' Trainer alike.

Features of the engine are tested once, with one of them; what a front end has of its own is in the file of its name.
"""

import gc
from functools import partial

import pytest
import torch

from lightning_cxl import ConfigError, TierFullError
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.memory.hook import active
from tests import training_device
from tests.cases import others_full
from tests.integration.front_end_runs import FRONT_ENDS, HALF, PLAIN, STEPS, Job, assert_close, assert_identical, train
from tests.integration.front_ends import bench, job_here
from tests.integration.llama import tiny_llama, with_lora
from tests.integration.training import EXACT

pytestmark = pytest.mark.every_case
STREAMED, STAYS = {"stream_weights": True, **EXACT}, {"stream_weights": False, **EXACT}
every_front_end = pytest.mark.parametrize("front_end", FRONT_ENDS)


def bfloat16():
    return tiny_llama(hidden_size=64, intermediate_size=128).bfloat16()


def adapted():
    pytest.importorskip("peft")
    return with_lora(tiny_llama(), ["q_proj"])


CASES = {
    "streamed": (STREAMED, {}),
    "weights stay, accumulated": (STAYS, {"accumulate": 2}),
    "not clipped, tied": (STREAMED, {"clip": 0.0, "make_model": partial(tiny_llama, tie_word_embeddings=True)}),
    "bf16-mixed, evaluated": (STREAMED, {"precision": "bf16-mixed", "evaluates": True}),
    "adapters, accumulated": (STREAMED, {"make_model": adapted, "accumulate": 3}),
}


@every_front_end
@pytest.mark.parametrize("case", others_full(CASES, [case for case in CASES if case != "streamed"]))
def test_with_the_users_optimizer_a_run_is_the_plain_one_bit_for_bit(tmp_path, front_end, case):
    options, given = CASES[case]
    assert_identical(train(front_end, tmp_path, options, **given), train(front_end, tmp_path, **given))


@every_front_end
def test_cpu_adam_follows_the_plain_run(tmp_path, front_end):
    plain = train(front_end, tmp_path, accumulate=2)
    for stream in (True, False):
        ours = train(front_end, tmp_path, {"stream_weights": stream}, accumulate=2)
        assert_close(ours, plain)
        assert "CPUAdam" in ours.report["optimizers"][0]


@every_front_end
def test_a_bfloat16_model_with_float32_masters_follows_a_float32_run(tmp_path, front_end):
    wide = train(front_end, tmp_path, make_model=lambda: bfloat16().float())
    ours = train(front_end, tmp_path, {"master": "fp32"}, make_model=bfloat16)
    assert_close(ours, wide, atol=0.05)
    assert len(set(ours.losses)) >= STEPS


SAVED = {
    "8 bit, split masters": ({"state": "8bit"}, {"make_model": bfloat16}),
    "separate masters": ({"stream_weights": False, "master": "fp32"}, {"make_model": bfloat16}),
    "rounded sums": ({"accumulate": "bf16"}, {"make_model": bfloat16, "accumulate": 2}),
}


@every_front_end
@pytest.mark.parametrize("case", SAVED)
def test_a_run_resumes_exactly(tmp_path, front_end, case):
    options, given = SAVED[case]
    whole = train(front_end, tmp_path, options, saves=True, **given)
    assert_identical(train(front_end, tmp_path, options, resumes=True, **given), whole)


@every_front_end
def test_a_run_with_state_on_ssd_resumes_exactly_and_so_does_one_in_memory_from_its_files(tmp_path, front_end):
    ssd = {
        "tiers": {"ssd": {"path": str(tmp_path / "ssd"), "budget": "64MiB"}},
        "tier_rules": {"*": {"optimizer_state": "ssd"}},
    }
    whole = train(front_end, tmp_path, ssd, saves=True)
    assert whole.report["tiers"]["ssd"]["peak_bytes"] > 0
    for options in (ssd, {}):
        assert_identical(train(front_end, tmp_path, options, resumes=True), whole)


@every_front_end
@pytest.mark.parametrize("saved, resumed", [(PLAIN, STREAMED), (STREAMED, PLAIN), ({}, PLAIN)], ids=str)
def test_files_load_with_and_without_us(tmp_path, front_end, saved, resumed):
    whole = train(front_end, tmp_path, saved, saves=True)
    other = train(front_end, tmp_path, resumed, resumes=True)
    (assert_close if saved == {} else assert_identical)(other, whole)


@pytest.mark.parametrize("front_end", [name for name in FRONT_ENDS if name != "Lightning"])
def test_files_cannot_refer_to_a_drive(tmp_path, front_end):
    ssd = {"path": str(tmp_path), "budget": "64MiB", "checkpoint": "reference"}
    with pytest.raises(ConfigError, match="checkpoint='copy'"):
        train(front_end, tmp_path, {"tiers": {"ssd": ssd}})


@every_front_end
def test_planned_bytes_are_what_a_run_holds(tmp_path, front_end):
    report = train(front_end, tmp_path, {"stream_weights": True}, accumulate=2).report
    model = tiny_llama()
    assert report["num_parameters"] == report["num_trainable"] == sum(p.numel() for p in model.parameters())
    assert report["config"]["stream_weights"] == {"value": True, "origin": "argument"}
    assert report["streamed"]["num_units"] == 3 and report["optimizers"][0].startswith("AdamW by CPUAdam")
    for role in ("compute_weights", "momentum", "variance"):
        assert report["planned_roles"][role] == pytest.approx(report["peak_roles"][role], rel=0.03)


class Poisoned:
    def __init__(self):
        self.weights = []

    def __call__(self, step, model):
        if step == 2:
            weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
            self.hook = weight.register_hook(lambda grad: grad * float("nan"))
        elif step == 3:
            self.hook.remove()
        self.weights.append({name: value.cpu().clone() for name, value in model.state_dict().items()})


@every_front_end
def test_a_step_with_a_bad_gradient_is_left_out_and_its_parameter_is_named(tmp_path, front_end):
    """Although clipping by a norm that is not a number makes all gradients bad."""
    poisoned = Poisoned()
    with pytest.warns(LightningCXLWarning, match=r"gradient of `\S*layers.1.mlp.up_proj.weight`.*left out"):
        ours = train(front_end, tmp_path, {}, before_step=poisoned)
    before, after = poisoned.weights[2:4]
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert any(not torch.equal(value, ours.weights[name]) for name, value in after.items()), "it trains on"


def fails(step, model):
    if step == HALF:
        raise RuntimeError("out of luck")


@every_front_end
@pytest.mark.parametrize("ends", [None, "out of luck"])
def test_nothing_is_left_and_the_model_trains_on_by_hand(tmp_path, front_end, ends):
    model = tiny_llama()
    job = Job(
        tmp_path, {"stream_weights": True}, make_model=lambda: model, before_step=fails if ends else Job.before_step
    )
    run = FRONT_ENDS[front_end](job)
    if ends:
        with pytest.raises(RuntimeError, match=ends):
            run.run()
    else:
        run.run()
    run.end()
    del run, job
    gc.collect()
    assert active() is None
    assert not training_device.held().get("bytes on the device"), "weights may still be in memory that is page-locked"
    assert all(type(p) is torch.nn.Parameter and p.device.type == "cpu" for p in model.parameters())
    assert not any({"forward", "zero_grad"} & vars(module).keys() for module in model.modules())
    weight = model.lm_head.weight.clone()
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(weight, model.lm_head.weight)


@every_front_end
def test_a_second_training_of_the_same_model_goes_on(tmp_path, front_end):
    def twice(options):
        model = tiny_llama()
        first, second = (train(front_end, tmp_path, options, make_model=lambda: model) for _ in range(2))
        second.losses[:0] = first.losses
        return second

    assert_identical(twice(STREAMED), twice(PLAIN))


@every_front_end
def test_what_does_not_fit_is_refused_and_leaves_the_model_alone(tmp_path, front_end):
    model = tiny_llama()
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(TierFullError, match="cannot place"):
        train(front_end, tmp_path, {"tiers": {"dram": "64KiB"}, "on_tier_full": "error"}, make_model=lambda: model)
    for name, p in model.named_parameters():
        assert p.data_ptr() == before[name][0] and torch.equal(p, before[name][1]), name


# -- one job, as `examples/bench/front_ends.py` compares it ------------------------------------------------------------


def test_all_front_ends_train_the_same_job(tmp_path):
    """Else the comparison would be of five jobs."""
    names = [name for name in bench.there_are() if name in FRONT_ENDS]
    job = job_here(tmp_path, layers=2, hidden=32, sequence=32)
    losses = [bench.FRONT_ENDS[name](bench.replaced(job, tmp_path / name), ours=True).losses for name in names]
    for other in losses[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses[0]), rtol=1e-6, atol=0)
