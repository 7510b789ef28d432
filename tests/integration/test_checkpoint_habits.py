"""Checkpoints as Lightning's users treat them: without optimizer states, looked at in hooks, restored after a run."""

import copy
from collections import OrderedDict

import pytest
import torch

import lightning_cxl
from tests.integration.test_checkpoint import Sequential, fit, no_dropout, weights
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import token_data

pytestmark = pytest.mark.on_cpu  # as those of test_checkpoint

OPTIONS = [{}, EXACT, {"state": "8bit"}]


@pytest.mark.parametrize(("states", "options"), [({}, {}), ([], EXACT)], ids=["NeMo's", "no"])
def test_a_checkpoint_without_optimizer_states_gives_its_weights(tmp_path, states, options):
    fit("auto", 3, save=tmp_path / "full.ckpt")
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    torch.save({**full, "optimizer_states": states}, tmp_path / "bare.ckpt")
    losses = []
    for strategy in ("auto", offload(**options)):
        resumed, _ = fit(strategy, 6, ckpt_path=tmp_path / "bare.ckpt")
        losses.append(resumed.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 3


def test_states_of_other_optimizers_are_refused(tmp_path):
    fit("auto", 1, save=tmp_path / "full.ckpt")
    full = torch.load(tmp_path / "full.ckpt", weights_only=True)
    torch.save({**full, "optimizer_states": 2 * full["optimizer_states"]}, tmp_path / "two.ckpt")
    with pytest.raises(lightning_cxl.CheckpointError, match="state of 2 optimizers, this run has 1"):
        fit("cxl_offload", 2, ckpt_path=tmp_path / "two.ckpt")


@pytest.mark.parametrize("options", [{"state": "8bit"}, {"precision": "bf16-true"}], ids=str)
def test_everything_is_restored_after_a_run_has_ended(tmp_path, options):
    options = dict(options)
    trainer_args = {"precision": options.pop("precision", "32-true")}
    module, trainer = fit(offload(**options), 4, save=tmp_path / "four.ckpt", **trainer_args)
    at_four = (weights(module), copy.deepcopy(trainer.optimizers[0].state_dict()))
    trainer.fit_loop.epoch_loop.max_steps = 7
    trainer.fit(module, token_data())
    assert not torch.equal(module.model.head.weight, at_four[0]["model.head.weight"])
    trainer._checkpoint_connector.restore(tmp_path / "four.ckpt")
    for name, value in at_four[0].items():
        assert torch.equal(module.state_dict()[name], value), name
    restored = trainer.optimizers[0].state_dict()
    for key, state in at_four[1]["state"].items():
        for name, value in state.items():
            assert torch.equal(restored["state"][key][name], value), name
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    first, again = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("four", "again"))
    assert first["lightning_cxl"]["num_gradients"] == again["lightning_cxl"]["num_gradients"] > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_states_go_into_optimizers_that_no_run_has_adopted(tmp_path, options):
    """As with `trainer.strategy.setup_optimizers`, which some tools call to look at a checkpoint."""
    _, trainer = fit(offload(**options), 4, save=tmp_path / "four.ckpt")
    module = Sequential(no_dropout())
    cold = make_trainer("cxl_offload")
    cold.strategy.connect(module)
    module.trainer = cold
    cold.strategy.setup_optimizers(cold)
    cold.strategy.load_optimizer_state_dict(cold.strategy.load_checkpoint(tmp_path / "four.ckpt"))
    assert type(cold.optimizers[0]) is torch.optim.AdamW
    ours, own = (list(one.optimizers[0].state.values()) for one in (trainer, cold))
    for state, reference in zip(own, ours, strict=True):
        assert state["step"] == 4
        assert state["exp_avg"].dtype is torch.float32 and state["exp_avg"].abs().sum() > 0
        if "exp_avg" in reference:  # else it has 8 bits there, and is decoded
            assert torch.equal(state["exp_avg"], reference["exp_avg"].reshape(state["exp_avg"].shape))


class Looks(Sequential):
    """Keeps what its hooks see, and adds to it."""

    def on_save_checkpoint(self, checkpoint):
        self.saved = sorted(checkpoint)

    def on_load_checkpoint(self, checkpoint):
        self.loaded, self.keys = checkpoint, sorted(checkpoint)
        checkpoint["mine"] = 1


@pytest.mark.parametrize("options", [{}, {**EXACT, "precision": "bf16-true"}], ids=["CPUAdam", "separate masters"])
def test_hooks_see_what_plain_lightning_hands_over(tmp_path, options):
    options = dict(options)
    trainer_args = {"precision": options.pop("precision", "32-true")}
    first, _ = fit(offload(**options), 4, task=Looks, save=tmp_path / "four.ckpt", **trainer_args)
    resumed, _ = fit(offload(**options), 7, task=Looks, ckpt_path=tmp_path / "four.ckpt", **trainer_args)
    assert isinstance(resumed.loaded, dict) and resumed.keys == first.saved
    assert "lightning_cxl" in torch.load(tmp_path / "four.ckpt", weights_only=True), "the file has it"
    straight, _ = fit(offload(**options), 7, **trainer_args)
    assert first.losses + resumed.losses == straight.losses, "and the run uses it"
    for copied in (copy.copy(resumed.loaded), copy.deepcopy(resumed.loaded)):
        assert type(copied) is OrderedDict and copied["mine"] == 1
    torch.save(resumed.loaded, tmp_path / "kept.ckpt")  # torch trusts no other kind of dict of ours
    assert "lightning_cxl" not in torch.load(tmp_path / "kept.ckpt", weights_only=True)


def test_a_checkpoint_in_memory_is_read_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    straight, _ = fit("cxl_offload", 5)
    first, trainer = fit("cxl_offload", 3)
    trainer.save_checkpoint("memory://three.ckpt")
    assert not list(tmp_path.iterdir()), "it is in no file"
    resumed, _ = fit("cxl_offload", 5, ckpt_path="memory://three.ckpt")
    assert first.losses + resumed.losses == straight.losses
