"""Checkpoints of Lightning: names, masters of every form, damaged files, without optimizer states, hooks, in memory."""

import copy
from collections import OrderedDict

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_cxl
from tests.integration.training import EXACT, assert_equal, assert_same_weights, run, weights_of
from tests.models import InStep, Task, no_dropout, token_data

BF16 = {"precision": "bf16-true"}


class Sequential(InStep, Task):
    pass


def fit(strategy, steps, *, task=Sequential, **given):
    return run(strategy, lambda: task(no_dropout()), steps, **given)


def read(path):
    return torch.load(path, weights_only=True)


def named_masters(trainer):
    return trainer.strategy._session.trained.masters.named_masters()


def test_checkpoint_has_lightnings_format_and_loads_weights_only(tmp_path):
    module, _ = fit("cxl_offload", 2, save=tmp_path / "two.ckpt")
    saved = read(tmp_path / "two.ckpt")
    fit("auto", 2, save=tmp_path / "plain.ckpt")
    reference = read(tmp_path / "plain.ckpt")
    assert saved.keys() - reference.keys() == {"lightning_cxl"}
    assert saved["state_dict"].keys() == reference["state_dict"].keys()
    ours, torchs = saved["optimizer_states"][0], reference["optimizer_states"][0]
    assert ours["state"].keys() == torchs["state"].keys()
    assert ours["state"][0].keys() == torchs["state"][0].keys()
    names = saved["lightning_cxl"]["optimizer_param_names"][0]
    assert names[0][0] == "model.embed.weight"
    assert (tmp_path / "two.ckpt").stat().st_size < 1.2 * (tmp_path / "plain.ckpt").stat().st_size
    loaded = Task.load_from_checkpoint(tmp_path / "two.ckpt", model=no_dropout(), weights_only=True)
    assert_same_weights(loaded, module)


class InOrder(Sequential):
    def configure_optimizers(self):
        return torch.optim.AdamW(list(self.parameters())[:: self.order], lr=3e-3)

    order = 1


class Reordered(InOrder):
    order = -1


@pytest.mark.parametrize("options", [{}, EXACT], ids=["CPUAdam", "torch AdamW"])
def test_optimizer_state_finds_its_parameter_by_name(tmp_path, options):
    straight, _ = fit(options, 8, task=InOrder)
    fit(options, 5, task=InOrder, save=tmp_path / "five.ckpt")
    resumed, _ = fit(options, 8, task=Reordered, ckpt_path=tmp_path / "five.ckpt")
    assert resumed.losses == straight.losses[5:]


def test_async_checkpoint_io(tmp_path):
    io = AsyncCheckpointIO()
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    module, _ = fit("cxl_offload", 6, callbacks=[callback], plugins=[io], enable_checkpointing=True)
    assert isinstance(io.checkpoint_io, type(lightning_cxl.CXLOffloadStrategy().checkpoint_io))
    first = sorted(tmp_path.glob("*step=2*"))[0]
    resumed, _ = fit("cxl_offload", 6, ckpt_path=first, callbacks=[callback], enable_checkpointing=True)
    assert resumed.losses == module.losses[2:], "the file holds the weights as they were at step 2"


@pytest.mark.parametrize("options", [{"master": "fp32"}, EXACT], ids=["CPUAdam", "torch AdamW"])
def test_bf16_checkpoint_without_masters_takes_the_weights(tmp_path, options):
    fit("auto", 3, save=tmp_path / "plain.ckpt", precision="bf16-true")
    resumed, trainer = fit(options, 3, ckpt_path=tmp_path / "plain.ckpt", precision="bf16-true")
    assert_equal(named_masters(trainer), {name: p.float() for name, p in resumed.state_dict().items()})


def test_state_of_another_number_of_optimizers_is_refused(tmp_path):
    fit("cxl_offload", 2, save=tmp_path / "two.ckpt")
    saved = read(tmp_path / "two.ckpt")
    torch.save({**saved, "optimizer_states": 2 * saved["optimizer_states"]}, tmp_path / "two.ckpt")
    with pytest.raises(lightning_cxl.CheckpointError, match="state of 2 optimizers, this run has 1"):
        fit("cxl_offload", 3, ckpt_path=tmp_path / "two.ckpt")


@pytest.mark.on_cpu
@pytest.mark.parametrize(("states", "options"), [({}, {}), ([], EXACT)], ids=["NeMo's", "no"])
def test_a_checkpoint_without_optimizer_states_gives_its_weights(tmp_path, states, options):
    fit("auto", 3, save=tmp_path / "full.ckpt")
    full = read(tmp_path / "full.ckpt")
    torch.save({**full, "optimizer_states": states}, tmp_path / "bare.ckpt")
    plain, ours = (fit(each, 6, ckpt_path=tmp_path / "bare.ckpt")[0] for each in ("auto", options))
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert len(plain.losses) == 3


@pytest.mark.on_cpu
@pytest.mark.parametrize(("options", "trainer_args"), [({"state": "8bit"}, {}), ({}, BF16)], ids=["8bit", "bf16"])
def test_everything_is_restored_after_a_run_has_ended(tmp_path, options, trainer_args):
    module, trainer = fit(options, 4, save=tmp_path / "four.ckpt", **trainer_args)
    at_four = weights_of(module), copy.deepcopy(trainer.optimizers[0].state_dict()["state"])
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(module, token_data())
    assert not torch.equal(module.model.head.weight, at_four[0]["model.head.weight"])
    trainer._checkpoint_connector.restore(tmp_path / "four.ckpt")
    assert_equal((weights_of(module), trainer.optimizers[0].state_dict()["state"]), at_four)
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    first, again = (read(tmp_path / f"{name}.ckpt") for name in ("four", "again"))
    assert first["lightning_cxl"]["num_gradients"] == again["lightning_cxl"]["num_gradients"] > 0


class Looks(Sequential):
    def on_save_checkpoint(self, checkpoint):
        self.saved = sorted(checkpoint)

    def on_load_checkpoint(self, checkpoint):
        self.loaded, self.keys = checkpoint, sorted(checkpoint)
        checkpoint["mine"] = 1


@pytest.mark.on_cpu
@pytest.mark.parametrize(("options", "trainer_args"), [({}, {}), (EXACT, BF16)], ids=["CPUAdam", "separate masters"])
def test_hooks_see_what_plain_lightning_hands_over(tmp_path, options, trainer_args):
    first, _ = fit(options, 4, task=Looks, save=tmp_path / "four.ckpt", **trainer_args)
    resumed, _ = fit(options, 7, task=Looks, ckpt_path=tmp_path / "four.ckpt", **trainer_args)
    assert isinstance(resumed.loaded, dict) and resumed.keys == first.saved
    assert "lightning_cxl" in read(tmp_path / "four.ckpt"), "the file has it"
    straight, _ = fit(options, 7, **trainer_args)
    assert first.losses + resumed.losses == straight.losses, "and the run uses it"
    copied = copy.deepcopy(resumed.loaded)
    assert type(copied) is OrderedDict and copied["mine"] == 1
    torch.save(resumed.loaded, tmp_path / "kept.ckpt")  # torch trusts no other kind of dict of ours
    assert "lightning_cxl" not in read(tmp_path / "kept.ckpt")


# -- masters of bfloat16 weights: split, float32, torch's optimizer's, and plain Lightning -----------------------------

FORMS = {"split": {}, "fp32": {"master": "fp32"}, "torch": EXACT}


def bf16(form, steps, **given):
    return fit(FORMS.get(form, form), steps, **{**BF16, **given})


@pytest.mark.on_cpu
@pytest.mark.parametrize(("first", "second"), [("split", "split"), ("split", "fp32"), ("fp32", "split")])
def test_resume_is_exact_from_either_form(tmp_path, first, second):
    straight, _ = bf16("split", 10)
    bf16(first, 6, save=tmp_path / "six.ckpt")
    resumed, trainer = bf16(second, 10, ckpt_path=tmp_path / "six.ckpt")
    assert len(resumed.losses) == 4 and resumed.losses == straight.losses[6:]
    assert_same_weights(resumed, straight)
    assert ("remainder" in trainer.optimizers[0].state_dict()["state"][0]) == (second == "split")


@pytest.mark.on_cpu
def test_ours_loads_in_plain_lightning_and_comes_back(tmp_path):
    """torch's AdamW carries the remainders along as numbers; when they come back they are known to be stale."""
    straight, _ = bf16("split", 12)
    bf16("split", 6, save=tmp_path / "ours.ckpt")
    plain, trainer = bf16("auto", 9, ckpt_path=tmp_path / "ours.ckpt", save=tmp_path / "plain.ckpt")
    assert plain.losses == pytest.approx(straight.losses[6:9], rel=0.02)
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    for form in ("split", "fp32"):
        module, back = bf16(form, 9, ckpt_path=tmp_path / "plain.ckpt")
        assert_same_weights(module, plain)
        for entry in back.optimizers[0].state_dict()["state"].values():
            assert "remainder" not in entry or not entry["remainder"].any()
        assert all(torch.equal(master, master.bfloat16().float()) for master in named_masters(back).values())
    again, _ = bf16("split", 12, ckpt_path=tmp_path / "plain.ckpt")
    assert again.losses == pytest.approx(straight.losses[9:], rel=0.02)


@pytest.mark.on_cpu
@pytest.mark.every_case
@pytest.mark.parametrize("saved", FORMS)
def test_a_checkpoint_between_a_change_and_the_next_step(tmp_path, saved):
    module, trainer = bf16(saved, 3)
    with torch.no_grad():
        module.model.head.weight.clamp_(-0.01, 0.01)
    trainer.save_checkpoint(tmp_path / "clamped.ckpt")
    if saved != "split":
        masters = read(tmp_path / "clamped.ckpt")["lightning_cxl"]["master_weights"]
        assert masters["model.head.weight"].abs().max() <= 0.0101
    for form in ("split", "fp32") if saved == "split" else [saved]:
        assert_same_weights(bf16(form, 3, ckpt_path=tmp_path / "clamped.ckpt")[0], module)
