"""Optimizers as users have them: what `step` takes and returns, names and copies of adopted ones, later parameters,
objects that are used again, and those of others."""

import copy
import pickle
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LambdaCallback, ModelCheckpoint
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, StepLR

import lightning_cxl
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.optim.parameter_state import AwaitedParams
from tests import training_device
from tests.cases import every_value, others_full
from tests.integration.training import EXACT, run, weights_of
from tests.models import Task, TinyConvNet, TinyTransformer, image_data, no_dropout, token_data

on_cpu = pytest.mark.on_cpu


class Scaled(torch.optim.SGD):
    """A user's optimizer with a keyword of its own, which returns more than the loss."""

    def step(self, closure=None, *, factor=1.0):
        return super().step(closure), factor


class Manual(Task):
    automatic_optimization = False

    def __init__(self):
        super().__init__(no_dropout())
        self.returned = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()

        def closure():
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            return loss

        self.returned.append(STEPS[batch_idx](optimizer, closure))

    def configure_optimizers(self):
        return Scaled(self.parameters(), lr=0.1)


STEPS = [
    lambda optimizer, closure: optimizer.step(closure=closure, factor=0.5),
    lambda optimizer, closure: optimizer.step(closure),
    lambda optimizer, closure: (closure(), optimizer.step(factor=0.5))[1],
]


def test_keywords_arrive_and_what_is_returned_comes_back():
    plain, ours = (run(each, Manual, len(STEPS))[0] for each in ("auto", {}))
    for (loss, factor), (reference, expected) in zip(ours.returned, plain.returned, strict=True):
        assert factor == expected
        assert loss is reference is None or loss.item() == pytest.approx(reference.item())
    assert [factor for _, factor in ours.returned] == [0.5, 1.0, 0.5]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)


class ByMuon(Task):
    """As recipes do: Muon for the matrices of blocks, and AdamW for the rest."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.record(loss)
        self.manual_backward(loss / 2)
        for optimizer in self.optimizers() if batch_idx % 2 else ():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        return torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3)


@pytest.mark.parametrize("options", [{}, {"stream_weights": False}])
def test_muon_orthogonalises_on_the_device_and_changes_no_bit(options, monkeypatch):
    def train(strategy):
        module, trainer = run(strategy, lambda: ByMuon(no_dropout()), 8)
        return module.losses, weights_of(module), trainer

    losses, weights, _ = train("auto")
    devices, orthogonalise = [], torch.optim._muon._zeropower_via_newtonschulz

    def seen(matrix, *given):
        devices.append(matrix.device)
        return orthogonalise(matrix, *given)

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", seen)  # it stays, as a compiled one does
    training_device.make_late("copies and kernels")
    found, new, trainer = train({**EXACT, **options})
    assert torch.optim._muon._zeropower_via_newtonschulz is seen
    assert len(losses) >= 8 and devices and set(devices) == {training_device.current}
    assert found == losses and all(torch.equal(new[name], value) for name, value in weights.items())
    planned = trainer.strategy.report()["planned_roles"]
    held = trainer.strategy.report()["peak_roles"]
    assert planned["momentum"] == pytest.approx(held["momentum"], rel=0.01)
    assert planned["staging"]["dram"] >= 2 * max(p.numel() for p in trainer.optimizers[0].param_groups[0]["params"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_an_adopted_optimizer_is_the_users_class_and_cpu_adam(kind):
    name = kind.__name__
    _, trainer = run({}, Task(TinyTransformer(), name.lower()), 1)
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, kind) and isinstance(optimizer, lightning_cxl.CPUAdam)
    assert isinstance(optimizer, torch.optim.AdamW) == (name == "AdamW")
    assert type(optimizer).__name__ == type(optimizer).__qualname__ == name
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is type(optimizer)


SCHEDULERS = {
    "step": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer, 0.5), StepLR(optimizer, 1, 0.5)]),
}


class Once(Task):
    def __init__(self, scheduler, optimizer=torch.optim.AdamW):
        super().__init__(no_dropout())
        self.own = optimizer(self.parameters(), lr=1e-2)
        self.own_scheduler = SCHEDULERS[scheduler](self.own)

    def configure_optimizers(self):
        return [self.own], [{"scheduler": self.own_scheduler, "interval": "step"}]

    def on_train_batch_end(self, *_):
        self.lrs.append(self.own.param_groups[0]["lr"])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("optimizer", "scheduler", "options", "precision"),
    [
        (torch.optim.AdamW, "step", {}, "32-true"),
        (torch.optim.AdamW, "chained", EXACT, "32-true"),
        (torch.optim.AdamW, "chained", {"master": "fp32"}, "bf16-true"),
        (partial(torch.optim.SGD, momentum=0.9), "step", {}, "bf16-true"),
    ],
)
def test_the_second_fit_goes_on_with_the_same_optimizer_and_scheduler(optimizer, scheduler, options, precision):
    def twice(strategy):
        module, _ = run(strategy, lambda: Once(scheduler, optimizer), 3, precision=precision)
        return run(strategy, module, 3, precision=precision)[0]

    plain, ours = twice("auto"), twice(options)
    assert ours.lrs == plain.lrs and len(set(plain.lrs)) > 4
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "32-true" else 0.03)
    steps = [[float(state.get("step", 0)) for state in module.own.state.values()] for module in (plain, ours)]
    assert steps[1] == steps[0]
    held = {id(p) for group in ours.own.param_groups for p in group["params"]}
    assert held == {id(p) for p in ours.parameters()}, "the user's object holds the model's own parameters again"


class OneMoreBlock(BaseFinetuning):
    """Thaws one block in every epoch after the first."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch >= 1:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[-epoch], optimizer)


class Trainable(Task):
    def configure_optimizers(self):
        own = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(own, lr=0.1) if self.optimizer == "sgd" else torch.optim.AdamW(own, lr=3e-3)


def epochs(strategy, callbacks, count, *, optimizer="adamw", task=Trainable, **given):
    given |= {"max_epochs": count, "callbacks": callbacks, "enable_checkpointing": True, "data": token_data(4)}
    return run(strategy, lambda: task(no_dropout(), optimizer), -1, **given)


JOINING = [
    ("adamw", EXACT, "bf16-true"),
    ("adamw", "on ssd", "bf16-true"),
    ("adamw", {}, "32-true"),
    ("adamw", EXACT, "32-true"),
    ("sgd", {}, "32-true"),
    ("adamw", {}, "bf16-true"),
]


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")  # it compares values, not objects
@pytest.mark.every_case
@pytest.mark.parametrize(("optimizer", "options", "precision"), others_full(JOINING, JOINING[:2]))
def test_a_finetuning_callback_resumes_in_the_middle(tmp_path, optimizer, options, precision):
    """Its restart replaces the groups of the optimizer, before the optimizer's state is loaded."""
    if options == "on ssd":  # each block gets a record of its own when it joins
        ssd = {"path": str(tmp_path / "ssd"), "budget": "64MiB", "checkpoint": "reference"}
        options = {"tiers": {"ssd": ssd}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}

    def resumed(strategy, folder, precision):
        checkpoint = ModelCheckpoint(folder, save_last=True)
        arguments = {"optimizer": optimizer, "precision": precision}
        epochs(strategy, [OneMoreBlock(), checkpoint], 2, **arguments)
        arguments["ckpt_path"] = checkpoint.last_model_path
        module, trainer = epochs(strategy, [OneMoreBlock(), ModelCheckpoint(folder)], 4, **arguments)
        assert len(trainer.optimizers[0].param_groups) == 4
        return module.losses

    ours = resumed(options, tmp_path / "ours", precision)
    assert len(ours) == 8
    plain = resumed("auto", tmp_path / "plain", "32-true")
    assert ours == pytest.approx(plain, rel=1e-5 if precision == "32-true" else 2e-3)


JOIN = {
    "add_param_group": lambda optimizer, first, joining: optimizer.add_param_group({"params": joining}),
    "into a group": lambda optimizer, first, joining: first["params"].extend(joining),
    "a new group": lambda optimizer, first, joining: optimizer.param_groups.append({**first, "params": joining}),
    "new groups": lambda optimizer, first, joining: setattr(
        optimizer, "param_groups", [{**first, "params": [*first["params"], *joining]}]
    ),
}


@pytest.mark.parametrize(("way", "options"), every_value(JOIN, [{}, EXACT]), ids=str)
def test_parameters_that_join_are_trained_and_saved(tmp_path, way, options):
    """A block's, after the third step."""

    class Joins(Trainable):
        def setup(self, stage):
            self.model.blocks[1].requires_grad_(False)

        def on_train_batch_end(self, *_):
            if self.global_step == 3:
                optimizer = self.trainer.optimizers[0]
                joining = list(self.model.blocks[1].requires_grad_(True).parameters())
                JOIN[way](optimizer, optimizer.param_groups[0], joining)

        def on_train_epoch_end(self):
            self.kinds = {type(group["params"]) for group in self.trainer.optimizers[0].param_groups}

    path, start = tmp_path / "end.ckpt", no_dropout().blocks[1].qkv.weight
    ours, trainer = epochs(options, [ModelCheckpoint(tmp_path)], 2, task=Joins, save=path)
    assert not torch.equal(ours.model.blocks[1].qkv.weight, start)
    own = torch.load(path, weights_only=True)["lightning_cxl"]
    names = {name for group in own["optimizer_param_names"][0] for name in group}
    assert names == dict(ours.named_parameters()).keys()
    assert {type(group["params"]) for group in trainer.optimizers[0].param_groups} == {list}
    plain, _ = epochs("auto", [ModelCheckpoint(tmp_path)], 2, task=Joins)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    if training_device.current.type != "cpu" and options != EXACT:
        assert ours.kinds == {AwaitedParams}, "whoever reads them waits for updates that run behind"


def test_an_optimizer_that_takes_the_place_of_another_in_a_run_is_an_error():
    def replaces(trainer, module):
        if trainer.current_epoch == 1:
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]

    callbacks = [LambdaCallback(on_train_epoch_start=replaces)]
    with pytest.raises(UnsupportedError, match=r"`trainer\.optimizers` has a new optimizer"):
        run({}, lambda: Trainable(no_dropout()), -1, max_epochs=2, callbacks=callbacks)


def with_optimizer(make_model, make):
    task = Task(make_model())
    task.configure_optimizers = lambda: make(task.parameters())
    return task


def assert_weights_as_plain(options, make_model, make, data):
    plain, ours = (run(each, lambda: with_optimizer(make_model, make), 4, data=data)[0] for each in ("auto", options))
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))


@on_cpu
@pytest.mark.parametrize(
    "make",
    [partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True), partial(torch.optim.AdamW, lr=0.01, foreach=True)],
)
def test_state_keeps_its_strides_when_it_moves(make):
    assert_weights_as_plain(EXACT, TinyConvNet, make, image_data())  # its weights are channels-last


class Flat(torch.optim.SGD):
    """Keeps momentum of all parameters in one buffer, which it multiplies as a whole."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        parameters = self.param_groups[0]["params"]
        if not self.state:
            self.flat = torch.zeros(sum(p.numel() for p in parameters))
            for p, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
                self.state[p]["momentum"] = part.view_as(p)
        self.flat.mul_(0.9)
        for p in (p for p in parameters if p.grad is not None):
            p.sub_(self.state[p]["momentum"].add_(p.grad), alpha=0.05)
        return loss


@on_cpu
def test_state_that_shares_its_storage_stays():
    assert_weights_as_plain({}, no_dropout, lambda p: Flat(p, lr=0.05), token_data())


class Sharpness(torch.optim.Optimizer):
    """Climbs, evaluates its closure again, and steps from where it was; writes through ``.data``."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.differences = []

    def step(self, closure):
        first = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        climbs = [(p.grad.float() * 0.5 / (p.grad.float().norm() + 1e-9)).to(p.dtype) for p in parameters]
        for p, climb in zip(parameters, climbs, strict=True):
            p.data.add_(climb)
            p.grad = None
        self.differences.append(float(closure()) - float(first))
        for p, climb in zip(parameters, climbs, strict=True):
            p.data.sub_(climb).add_(p.grad.to(p.dtype), alpha=-0.05)
        return first


@on_cpu
@pytest.mark.filterwarnings("ignore:.*overrides")
def test_a_second_evaluation_sees_what_was_written_through_data():
    plain, ours = (
        run(each, lambda: with_optimizer(no_dropout, Sharpness), 2, precision="bf16-true")[1].optimizers[0].differences
        for each in ("auto", {})
    )
    assert min(plain) > 0.1
    assert ours == pytest.approx(plain, rel=0.1)
