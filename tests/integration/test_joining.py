"""Parameters that join an optimizer later: `add_param_group`, finetuning callbacks, groups that are replaced."""

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.optim.parameter_state import AwaitedParams
from tests import training_device
from tests.cases import every_value
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists")


class OneMoreBlock(BaseFinetuning):
    """Thaws one block in every epoch after the first."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch >= 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[-epoch], optimizer)


class Trainable(Task):
    """Its optimizer has what is trainable when it is made."""

    def configure_optimizers(self):
        own = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(own, lr=0.1) if self.optimizer == "sgd" else torch.optim.AdamW(own, lr=3e-3)


def fit(strategy, callbacks, *, epochs, optimizer="adamw", ckpt_path=None, task=Trainable, **trainer_args):
    seed_everything(5, verbose=False)
    module = task(TinyTransformer(dropout=0.0), optimizer)
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True, **trainer_args)
    trainer.fit(module, token_data(4), ckpt_path=ckpt_path)
    return module, trainer


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")  # it compares values, not objects
@pytest.mark.parametrize(
    ("optimizer", "options", "precision"),
    [("adamw", {}, "32-true"), ("adamw", EXACT, "32-true"), ("sgd", {}, "32-true"), ("adamw", {}, "bf16-true")],
)
def test_a_finetuning_callback_resumes_in_the_middle(tmp_path, optimizer, options, precision):
    """Its restart replaces the groups of the optimizer, before the optimizer's state is loaded."""

    def run(make_strategy, folder):
        checkpoint = ModelCheckpoint(folder, save_last=True)
        arguments = {"optimizer": optimizer, "precision": precision}
        fit(make_strategy(), [OneMoreBlock(), checkpoint], epochs=2, **arguments)
        callbacks = [OneMoreBlock(), ModelCheckpoint(folder)]
        path = checkpoint.last_model_path
        resumed, trainer = fit(make_strategy(), callbacks, epochs=4, ckpt_path=path, **arguments)
        assert len(trainer.optimizers[0].param_groups) == 4
        return resumed.losses

    ours = run(lambda: offload(**options), tmp_path / "ours")
    assert len(ours) == 8
    if precision == "32-true":
        assert ours == pytest.approx(run(lambda: "auto", tmp_path / "plain"), rel=1e-5)


class Joins(Callback):
    """Puts a block's parameters into the optimizer, one way or another, after the third step."""

    def __init__(self, way):
        self.way = way

    def setup(self, trainer, pl_module, stage):
        pl_module.model.blocks[1].requires_grad_(False)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step != 3:
            return
        (optimizer,) = trainer.optimizers
        block = pl_module.model.blocks[1]
        joining = list(block.requires_grad_(True).parameters())
        first = optimizer.param_groups[0]
        if self.way == "add_param_group":
            optimizer.add_param_group({"params": joining})
        elif self.way == "into a group":
            first["params"] += joining
        elif self.way == "a new group":
            optimizer.param_groups.append({**first, "params": joining})
        else:
            optimizer.param_groups = [{**first, "params": [*first["params"], *joining]}]


class Looks(Trainable):
    def on_train_epoch_end(self):
        self.kinds = {type(group["params"]) for group in self.trainer.optimizers[0].param_groups}


WAYS = ["add_param_group", "into a group", "a new group", "new groups"]


def train_and_save(options, way, folder, **trainer_args):
    callbacks = [Joins(way), ModelCheckpoint(folder)]
    start = Task(TinyTransformer(dropout=0.0)).model.blocks[1].qkv.weight
    module, trainer = fit(offload(**options), callbacks, epochs=2, task=Looks, **trainer_args)
    assert not torch.equal(module.model.blocks[1].qkv.weight.float(), start)
    trainer.save_checkpoint(folder / "end.ckpt")
    own = torch.load(folder / "end.ckpt", weights_only=True)["lightning_cxl"]
    names = {name for group in own["optimizer_param_names"][0] for name in group}
    assert names == dict(module.named_parameters()).keys()
    assert {type(group["params"]) for group in trainer.optimizers[0].param_groups} == {list}
    return module


@pytest.mark.parametrize(("way", "options"), every_value(WAYS, [{}, EXACT]), ids=str)
def test_parameters_that_join_are_trained_and_saved(tmp_path, way, options):
    ours = train_and_save(options, way, tmp_path)
    plain, _ = fit("auto", [Joins(way), ModelCheckpoint(tmp_path)], epochs=2)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    if training_device.current.type != "cpu" and options != EXACT:
        assert ours.kinds == {AwaitedParams}, "whoever reads them waits for updates that run behind"


@pytest.mark.on_cpu
def test_a_finetuning_callback_is_refused_where_it_cannot_find_masters(tmp_path):
    with pytest.raises(UnsupportedError, match="OneMoreBlock looks for the optimizer's parameters in the model"):
        fit(offload(**EXACT), [OneMoreBlock(), ModelCheckpoint(tmp_path)], epochs=1, precision="bf16-true")


@pytest.mark.on_cpu
def test_a_parameter_that_the_model_does_not_have(tmp_path):
    """It is trained, saved in its place, and found by its place again."""

    class Extra(Trainable):
        def __init__(self, *args):
            super().__init__(*args)
            self.extra = [nn.Parameter(torch.zeros(37)), nn.Parameter(torch.zeros(37))]  # a list: not registered

        def loss(self, batch):
            x, y = batch
            logits = self.model(x) + sum(self.extra)
            return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.param_groups[0]["params"] += self.extra
            return optimizer

    path = tmp_path / "end.ckpt"
    module, trainer = fit("cxl_offload", [ModelCheckpoint(tmp_path)], epochs=1, task=Extra)
    assert all(p.abs().sum() > 0 for p in module.extra)
    trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]})
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert saved["lightning_cxl"]["optimizer_param_names"] == [None], "two have no name: their order counts"
    assert len(saved["optimizer_states"][0]["param_groups"]) == 2
