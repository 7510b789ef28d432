"""Checkpoints: exact resume, both ways with plain Lightning, names, masters, damaged files."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_cxl
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import InStep, Task, TinyTransformer, token_data


def no_dropout():
    return TinyTransformer(dropout=0.0)  # Lightning does not restore the random state: dropout would differ


class Sequential(InStep, Task):
    pass


def fit(strategy, steps, *, task=None, ckpt_path=None, save=None, **trainer_args):
    seed_everything(5, verbose=False)
    module = (task or Sequential)(no_dropout())
    trainer = make_trainer(strategy, max_steps=steps, **trainer_args)
    trainer.fit(module, token_data(), ckpt_path=ckpt_path)
    if save:
        trainer.save_checkpoint(save)
    return module, trainer


def weights(module):
    return {name: value.cpu().clone() for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_checkpoint_during_the_run_by_callback(tmp_path):
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    module, _ = fit("cxl_offload", 6, callbacks=[callback], enable_checkpointing=True)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    path = sorted(tmp_path.glob("*step=3*"))[0]
    again, _ = fit("cxl_offload", 6, ckpt_path=path, callbacks=[callback], enable_checkpointing=True)
    assert again.losses == module.losses[3:]
    assert not list(tmp_path.glob(".*")), "no partial file is left"


def test_checkpoint_has_lightnings_format_and_loads_weights_only(tmp_path):
    module, _ = fit("cxl_offload", 2, save=tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    fit("auto", 2, save=tmp_path / "plain.ckpt")
    reference = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert saved.keys() - reference.keys() == {"lightning_cxl"}
    assert saved["state_dict"].keys() == reference["state_dict"].keys()
    ours, torchs = saved["optimizer_states"][0], reference["optimizer_states"][0]
    assert ours["state"].keys() == torchs["state"].keys()
    assert ours["state"][0].keys() == torchs["state"][0].keys()
    names = saved["lightning_cxl"]["optimizer_param_names"][0]
    assert names[0][0] == "model.embed.weight"
    assert (tmp_path / "two.ckpt").stat().st_size < 1.2 * (tmp_path / "plain.ckpt").stat().st_size
    loaded = Task.load_from_checkpoint(tmp_path / "two.ckpt", model=no_dropout(), weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


class Reordered(Sequential):
    def configure_optimizers(self):
        return torch.optim.AdamW(reversed(list(self.parameters())), lr=3e-3)


class InOrder(Sequential):
    def configure_optimizers(self):
        return torch.optim.AdamW(list(self.parameters()), lr=3e-3)


@pytest.mark.parametrize("options", [{}, EXACT], ids=["CPUAdam", "torch AdamW"])
def test_optimizer_state_finds_its_parameter_by_name(tmp_path, options):
    straight, _ = fit(offload(**options), 8, task=InOrder)
    fit(offload(**options), 5, task=InOrder, save=tmp_path / "five.ckpt")
    resumed, _ = fit(offload(**options), 8, task=Reordered, ckpt_path=tmp_path / "five.ckpt")
    assert resumed.losses == straight.losses[5:]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")
def test_async_checkpoint_io(tmp_path):
    io = AsyncCheckpointIO()
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    module, _ = fit("cxl_offload", 6, callbacks=[callback], plugins=[io], enable_checkpointing=True)
    assert isinstance(io.checkpoint_io, type(lightning_cxl.CXLOffloadStrategy().checkpoint_io))
    first = sorted(tmp_path.glob("*step=2*"))[0]
    resumed, _ = fit("cxl_offload", 6, ckpt_path=first, callbacks=[callback], enable_checkpointing=True)
    assert resumed.losses == module.losses[2:], "the file holds the weights as they were at step 2"


def test_resumed_state_lies_where_the_policy_wants_it(tmp_path):
    class Adagrad(Sequential):
        def configure_optimizers(self):
            return torch.optim.Adagrad(self.parameters(), lr=1e-2)

        def on_train_end(self):
            self.tiers = self.trainer.strategy.report()["roles"]["momentum"]

    rules = {"tier_rules": {"*": {"optimizer_state": "cxl"}}}
    fit(offload(**rules), 2, task=Adagrad, save=tmp_path / "two.ckpt")
    resumed, _ = fit(offload(**rules), 3, task=Adagrad, ckpt_path=tmp_path / "two.ckpt")
    trained = sum(p.numel() * 4 for p in resumed.parameters())
    assert resumed.tiers.keys() == {"cxl"} and resumed.tiers["cxl"] >= trained


@pytest.mark.parametrize("options", [{"master": "fp32"}, EXACT], ids=["CPUAdam", "torch AdamW"])
def test_bf16_checkpoint_without_masters_takes_the_weights(tmp_path, options):
    fit("auto", 3, save=tmp_path / "plain.ckpt", precision="bf16-true")
    resumed, trainer = fit(offload(**options), 3, ckpt_path=tmp_path / "plain.ckpt", precision="bf16-true")
    masters = trainer.strategy._session.trained.masters.named_masters()
    assert masters.keys() == {name for name, p in resumed.named_parameters()}
    for name, value in masters.items():
        assert torch.equal(value, resumed.state_dict()[name].float())


@pytest.mark.parametrize("damage", ["truncated", "garbage", "not a dict"])
def test_damaged_checkpoint_names_file_and_remedy(tmp_path, damage):
    path = tmp_path / "bad.ckpt"
    fit("cxl_offload", 1, save=path)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "garbage":
        path.write_bytes(b"not a checkpoint at all" * 100)
    else:
        torch.save([1, 2], path)
    with pytest.raises(lightning_cxl.CheckpointError, match=r"bad\.ckpt.*damaged or not a checkpoint"):
        fit("cxl_offload", 2, ckpt_path=path)


def test_missing_checkpoint_and_wrong_optimizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        fit("cxl_offload", 2, ckpt_path=tmp_path / "nowhere.ckpt")

    fit("cxl_offload", 2, save=tmp_path / "two.ckpt")
    with pytest.raises(lightning_cxl.CheckpointError, match="groups of"):
        fit("cxl_offload", 3, task=InOrder, ckpt_path=tmp_path / "two.ckpt")


def test_a_full_disk_leaves_no_partial_file(tmp_path, monkeypatch):
    _, trainer = fit("cxl_offload", 1)

    def no_space(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(lightning_cxl.CheckpointError, match="No space left"):
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert not list(tmp_path.iterdir())
