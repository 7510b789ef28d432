"""Checkpoints of bfloat16 training: between split masters, float32 masters, plain Lightning and float32 training."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_cxl.optim.kernels import split
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import InStep, Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu

FORMS = {"split": {}, "fp32": {"master": "fp32"}, "torch": EXACT}


class Ordered(InStep, Task):
    pass


def fit(strategy, steps, *, ckpt_path=None, save=None, precision="bf16-true", model=None, **options):
    seed_everything(5, verbose=False)
    module = Ordered(model or TinyTransformer(dropout=0.0))
    strategy = offload(**strategy, **options) if isinstance(strategy, dict) else strategy
    trainer = make_trainer(strategy, max_steps=steps, precision=precision)
    trainer.fit(module, token_data(), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    if save:
        trainer.save_checkpoint(save)
    return module, trainer


def assert_same_weights(ours, other):
    for name, value in other.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.parametrize(("first", "second"), [("split", "split"), ("split", "fp32"), ("fp32", "split")])
def test_resume_is_exact_from_either_form(tmp_path, first, second):
    straight, _ = fit(FORMS["split"], 10)
    fit(FORMS[first], 6, save=tmp_path / "six.ckpt")
    resumed, trainer = fit(FORMS[second], 10, ckpt_path=tmp_path / "six.ckpt")
    assert len(resumed.losses) == 4 and resumed.losses == straight.losses[6:]
    assert_same_weights(resumed, straight)
    state = trainer.optimizers[0].state_dict()["state"][0]
    assert ("remainder" in state) == (second == "split")


def test_split_masters_are_in_the_optimizers_state_only(tmp_path):
    fit(FORMS["split"], 3, save=tmp_path / "split.ckpt")
    fit(FORMS["fp32"], 3, save=tmp_path / "fp32.ckpt")
    ours = torch.load(tmp_path / "split.ckpt", weights_only=True)
    other = torch.load(tmp_path / "fp32.ckpt", weights_only=True)
    assert ours["lightning_cxl"]["master_weights"] == {}
    names = ours["lightning_cxl"]["optimizer_param_names"][0]
    masters = other["lightning_cxl"]["master_weights"]
    state = ours["optimizer_states"][0]["state"]
    compared = 0
    for index, name in enumerate(n for group in names for n in group):
        if index in state:
            upper, lower = split(masters[name])
            assert torch.equal(upper, ours["state_dict"][name]) and torch.equal(lower, state[index]["remainder"]), name
            compared += 1
    assert compared == len(masters) - 2, "all but the unused ones"
    saved = sum(v.numel() for v in masters.values())
    sizes = [(tmp_path / name).stat().st_size for name in ("split.ckpt", "fp32.ckpt")]
    assert sizes[1] - sizes[0] > 1.9 * saved, "2 bytes each instead of 4"


def test_float32_training_resumed_from_split_masters_starts_from_them(tmp_path):
    """Weights of a bf16-true checkpoint are bfloat16; the remainders complete them."""
    fit(FORMS["split"], 6, save=tmp_path / "split.ckpt")
    _, masters = fit(FORMS["fp32"], 6)
    resumed, _ = fit({}, 6, ckpt_path=tmp_path / "split.ckpt", precision="32-true")
    expected = masters.strategy._session.trained.masters.named_masters()
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter.detach(), expected[name]), name


def test_ours_loads_in_plain_lightning_and_comes_back(tmp_path):
    """torch's AdamW carries the remainders along as numbers; when they come back they are known to be stale."""
    straight, _ = fit(FORMS["split"], 12)
    fit(FORMS["split"], 6, save=tmp_path / "ours.ckpt")
    plain, trainer = fit("auto", 9, ckpt_path=tmp_path / "ours.ckpt")
    assert plain.losses == pytest.approx(straight.losses[6:9], rel=0.02)
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    for form in ("split", "fp32"):
        module, back = fit(FORMS[form], 9, ckpt_path=tmp_path / "plain.ckpt")
        assert_same_weights(module, plain)
        masters = back.strategy._session.trained.masters.named_masters()
        for entry in back.optimizers[0].state_dict()["state"].values():
            assert "remainder" not in entry or not entry["remainder"].any()
        assert all(torch.equal(m, m.bfloat16().float()) for m in masters.values())
    again, _ = fit(FORMS["split"], 12, ckpt_path=tmp_path / "plain.ckpt")
    assert again.losses == pytest.approx(straight.losses[9:], rel=0.02)


def test_masters_of_a_torch_optimizer_become_split_ones(tmp_path):
    fit(FORMS["torch"], 6, save=tmp_path / "torch.ckpt")
    module, trainer = fit(FORMS["split"], 6, ckpt_path=tmp_path / "torch.ckpt")
    masters = torch.load(tmp_path / "torch.ckpt", weights_only=True)["lightning_cxl"]["master_weights"]
    for name, parameter in module.named_parameters():
        state = trainer.optimizers[0].state.get(parameter)
        if state:
            upper, lower = split(masters[name])
            assert torch.equal(parameter.detach(), upper) and torch.equal(state["remainder"], lower)


def test_a_checkpoint_between_a_change_and_the_next_step(tmp_path):
    module, trainer = fit(FORMS["split"], 3)
    with torch.no_grad():
        module.model.head.weight.clamp_(-0.01, 0.01)
    trainer.save_checkpoint(tmp_path / "clamped.ckpt")
    for form in ("split", "fp32"):
        resumed, _ = fit(FORMS[form], 3, ckpt_path=tmp_path / "clamped.ckpt")
        assert_same_weights(resumed, module)
