"""Updates that run behind the device: never a stale weight, whoever looks, and really behind."""

import copy
import time

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_cxl.errors import ConfigError
from lightning_cxl.gradients import step as updates
from lightning_cxl.optim.cpu_adam import AdamStep
from tests import training_device
from tests.integration.gate import Gate
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

IGNORE = {"on_overflow": "ignore"}


pytestmark = pytest.mark.usefixtures("late_copies")


def fit(options, *, make_model=TinyTransformer, task=Task, steps=6, **trainer_args):
    seed_everything(5, verbose=False)
    module = task(make_model())
    trainer = make_trainer(offload(**options), max_steps=steps, **trainer_args)
    trainer.fit(module, token_data())
    state = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    moments = {
        (index, key): value.clone()
        for index, entry in trainer.optimizers[0].state_dict()["state"].items()
        for key, value in entry.items()
    }
    return module, trainer, state, moments


def assert_same(one, other):
    assert one[0].losses == other[0].losses and len(set(one[0].losses)) > 1
    for mine, theirs in zip(one[2:], other[2:], strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(mine[key], value), key


MODELS = {
    "plain": TinyTransformer,
    "block twice": lambda: TinyTransformer(twice=True),
}
FORMS = {
    "fp32": {},
    "split": {"precision": "bf16-true"},
    "separate": {"precision": "bf16-true", "master": "fp32"},
    "8bit": {"precision": "bf16-true", "state": "8bit"},
}


KINDS = [
    ("plain", "fp32", 1),
    ("block twice", "fp32", 1),
    ("plain", "split", 3),
    ("plain", "separate", 1),
    ("plain", "8bit", 3),
]
"""Other models are in the table of parity."""


def assert_is_the_plain_schedule(model, form, accumulate):
    """With updates behind the next forward, and with updates behind the backward."""
    options = {**FORMS[form]}
    trainer_args = {"accumulate_grad_batches": accumulate, "precision": options.pop("precision", "32-true")}
    arguments = {"make_model": MODELS[model], **trainer_args}
    plain = fit({**options, "overlap_step": False}, **arguments)
    assert_same(fit(options, **arguments), plain)
    assert_same(fit({**options, **IGNORE}, **arguments), plain)


@pytest.mark.usefixtures("slow_updates")
@pytest.mark.parametrize(("model", "form", "accumulate"), KINDS)
def test_is_the_plain_schedule(model, form, accumulate):
    assert_is_the_plain_schedule(model, form, accumulate)


@pytest.fixture
def _the_cpu_is_asked_for_both(monkeypatch):
    monkeypatch.setattr(training_device, "current", training_device.CPU)
    monkeypatch.setenv("LIGHTNING_CXL_STREAM_WEIGHTS", "true")
    monkeypatch.setenv("LIGHTNING_CXL_OVERLAP_STEP", "true")


@pytest.mark.usefixtures("slow_updates", "_the_cpu_is_asked_for_both")
@pytest.mark.parametrize(("model", "form", "accumulate"), [("plain", "fp32", 1), ("plain", "split", 3)])
def test_is_the_plain_schedule_on_the_cpu_too(model, form, accumulate):
    assert_is_the_plain_schedule(model, form, accumulate)


def test_an_update_does_not_write_what_was_fetched_when_the_one_before_ended(monkeypatch):
    """The step is slow to start updates: the end of one fetches units ahead, whose own updates start then."""
    training_device.make_late("to the device, much")
    start = updates.Updates.start

    def slow(*arguments):
        time.sleep(0.004)
        start(*arguments)

    monkeypatch.setattr(updates.Updates, "start", slow)
    assert_same(fit({}), fit({"overlap_step": False}))


@pytest.mark.usefixtures("slow_updates")
def test_clipping_and_schedulers_are_those_of_the_plain_schedule():
    arguments = {"gradient_clip_val": 0.3, "steps": 8}
    assert_same(fit({}, **arguments), fit({"overlap_step": False}, **arguments))


class Looks(Callback):
    """Reads the model in every way, between the steps."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, *_):
        way = len(self.seen) % 6
        block = module.model.blocks[1]
        if way == 0:
            value = block.mlp[0].weight.norm().item()
        elif way == 1:
            value = sum(p.double().sum().item() for p in module.parameters())
        elif way == 2:
            value = module.state_dict()["model.blocks.2.qkv.weight"].sum().item()
        elif way == 3:
            value = copy.deepcopy(module.model).blocks[0].out.weight.sum().item()
        elif way == 4:
            value = dict(block.norm1._parameters)["weight"].sum().item()
        else:
            optimizer = trainer.optimizers[0]
            value = sum(entry["exp_avg"].sum().item() for entry in optimizer.state.values())
        self.seen.append(value)


@pytest.mark.usefixtures("slow_updates")
def test_whoever_looks_between_steps_sees_the_new_weights():
    ours, plain = Looks(), Looks()
    fit(IGNORE, callbacks=[ours], steps=12)
    fit({"overlap_step": False}, callbacks=[plain], steps=12)
    assert ours.seen == plain.seen and len(set(plain.seen)) == 12


@pytest.mark.usefixtures("slow_updates")
def test_validation_and_checkpoints_in_the_middle(tmp_path):
    class Saves(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / name / f"{trainer.global_step}.ckpt")

    results = {}
    for name, options in {"ours": IGNORE, "plain": {"overlap_step": False}}.items():
        module, trainer, *_ = fit(options, callbacks=[Saves()], steps=4)
        results[name] = trainer.validate(module, token_data(4), verbose=False)
    assert results["ours"] == results["plain"]
    for step in range(1, 5):
        ours, plain = (torch.load(tmp_path / who / f"{step}.ckpt", weights_only=True) for who in results)
        for key, value in plain["state_dict"].items():
            assert torch.equal(ours["state_dict"][key], value)
        for index, entry in plain["optimizer_states"][0]["state"].items():
            for key, value in entry.items():
                assert torch.equal(ours["optimizer_states"][0]["state"][index][key], value)


# -- really behind -----------------------------------------------------------------------------------------------------


def test_a_step_returns_while_its_updates_run(monkeypatch):
    gate = Gate(monkeypatch)

    class Opens(Callback):
        def on_train_batch_end(self, *_):
            self.was_open = gate.is_open.is_set()
            gate.is_open.set()

    opens = Opens()
    fit({}, callbacks=[opens], steps=1)
    assert not opens.was_open and gate.num_waiting == 3


def test_updates_run_behind_the_backward(monkeypatch):
    gate = Gate(monkeypatch)

    class Opens(TinyTransformer):
        def forward(self, tokens):
            x = super().forward(tokens)
            self.embed.weight.register_hook(self.at_the_end) if self.training else None
            return x

        def at_the_end(self, grad):
            """Runs when the gradient of the embedding is there, the last of all."""
            deadline = time.monotonic() + 30
            while not gate.num_waiting and time.monotonic() < deadline:
                time.sleep(0.001)
            gate.is_open.set()

    fit(IGNORE, make_model=Opens, steps=1)
    assert gate.is_open.is_set() and gate.num_waiting >= 3


def test_gradients_of_a_few_units_exist_at_a_time():
    def deep():
        return TinyTransformer(depth=12)

    def peak(options):
        _, trainer, *_ = fit(options, make_model=deep, steps=4)
        report = trainer.strategy.report()
        role = "compute_grads"
        return sum(report["peak_roles"][role].values()), sum(report["planned_roles"][role].values())

    (all_peak, all_planned), (few_peak, few_planned) = peak({}), peak(IGNORE)
    assert all_planned > 2.5 * few_planned
    assert all_peak > 1.5 * few_peak


def test_an_error_in_an_update_while_another_one_ends_the_run(monkeypatch, caplog):
    """The first error is raised, the others are logged: raised, they would keep the Trainer from its own teardown."""

    def fails(step, work, scale):
        raise MemoryError("no memory for an update")

    class Breaks(Task):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                monkeypatch.setattr(AdamStep, "apply", fails)
            return super().training_step(batch, batch_idx)

    with caplog.at_level("WARNING"), pytest.raises(MemoryError, match="no memory for an update"):
        fit(IGNORE, task=Breaks, steps=4)
    assert "was not the only one" in caplog.text


# -- which schedule ----------------------------------------------------------------------------------------------------


def test_hooks_around_the_step_get_the_plain_schedule(monkeypatch):
    seen = []

    class Hooked(Task):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer["optimizer"].register_step_post_hook(
                lambda opt, *_: seen.append(opt.param_groups[0]["params"][3].sum().item())
            )
            return optimizer

    monkeypatch.setattr(updates.Updates, "start", lambda *_: pytest.fail("an update ran behind"))
    ours = fit(IGNORE, task=Hooked)
    assert len(set(seen)) == 6
    assert_same(ours, fit({"overlap_step": False}))


def test_hooks_around_every_optimizers_step_run_too():
    seen = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][3].sum().item())
    )
    try:
        ours = fit({})
    finally:
        handle.remove()
    assert len(set(seen)) == 6
    assert_same(ours, fit({"overlap_step": False}))


def test_an_overlap_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="overlap_step=True needs stream_weights"):
        offload(overlap_step=True, stream_weights=False)
