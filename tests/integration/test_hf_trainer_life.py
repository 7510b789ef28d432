"""Trainers of transformers that come one after the other: for one model, for trials of a search, after an error."""

import contextlib

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import HPSearchBackend

from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.transformers import CXLTrainer, CXLTrainerMixin, offload
from tests import training_device
from tests.cases import every_value
from tests.integration.hf_trainer import (
    EXACT,
    PLAIN,
    assert_close,
    assert_identical,
    finish,
    losses_of,
    make_trainer,
    rows,
    weights_of,
)
from tests.integration.llama import tiny_llama
from tests.integration.test_hf_trainer_arguments import COMPILED

STREAMED = {"stream_weights": True}


@pytest.mark.parametrize(
    ("how", "options"),
    every_value(["cpu", "a part", "meta", "after the trainer"], [STREAMED, {"stream_weights": False}]),
    ids=str,
)
def test_a_model_that_is_moved_away_is_plain(tmp_path, options, how):
    trainer = make_trainer(tmp_path, options)
    trainer.train()
    model, loop = trainer.model, trainer.accelerator.offload
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        expected = model(tokens.to(training_device.current)).logits.cpu()
    if how == "after the trainer":
        del trainer
    is_move = how == "meta" or training_device.current.type != "cpu"
    warns = pytest.warns(LightningCXLWarning, match="ends its run") if is_move else contextlib.nullcontext()
    with warns:
        (model.model.layers[0] if how == "a part" else model).to("meta" if how == "meta" else "cpu")
    assert loop.knows(model) != is_move
    if how == "meta":
        assert all(p.is_meta for p in model.parameters())
    else:
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, expected)
    if is_move:
        assert not any({"forward", "_apply", "zero_grad"} & vars(m).keys() for m in model.modules())
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    loop.close()


# -- several Trainers, one model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "ends"), [(EXACT, True), ({**STREAMED, **EXACT}, False)], ids=str)
def test_the_next_trainer_takes_the_model_over(tmp_path, options, ends):
    """The one before may still hold it, or have let go of it."""

    def both(offload):
        model, losses, trainers = tiny_llama(), [], []
        for _ in range(2):
            trainers.append(make_trainer(tmp_path, offload, model=model))
            trainers[-1].train()
            losses += losses_of(trainers[-1])
            if ends:
                trainers[-1].end()
        result = losses, weights_of(model)
        if offload != PLAIN:
            assert trainers[0].accelerator.offload.session.run is None
        for each in trainers:
            each.end()
        return result

    assert_identical(both(PLAIN), both(options))


def test_a_second_trainer_evaluates_in_the_middle_of_a_training(tmp_path):
    found = []

    class Evaluates(TrainerCallback):
        def __init__(self, offload):
            self.offload = offload

        def on_step_end(self, *_, model, **__):
            other = make_trainer(tmp_path, self.offload, model=model, parts={"eval_dataset": rows(6, seed=5)})
            found.append(other.evaluate()["eval_loss"])
            model.train()

    results = []
    for options in (PLAIN, {**STREAMED, **EXACT}):
        trainer = make_trainer(tmp_path, options, parts={"callbacks": [Evaluates(options)]})
        trainer.train()
        results.append(finish(trainer))
    assert_identical(*results)
    assert found[: len(found) // 2] == found[len(found) // 2 :]


@pytest.mark.skipif(training_device.chosen.type == "cpu", reason="moves where the device is apart")
def test_a_plain_trainer_is_told_that_the_model_is_held(tmp_path):
    model = tiny_llama()
    trainer = make_trainer(tmp_path, STREAMED, model=model)
    trainer.train()
    with pytest.raises(UnsupportedError, match=r"trainer\.end\(\)"):
        make_trainer(tmp_path, model=model).train()
    with pytest.warns(LightningCXLWarning, match="ends its run"):
        model.cpu()
    trainer.end()


@pytest.mark.parametrize("options", [STREAMED, {"stream_weights": False}], ids=str)
def test_a_backward_after_the_training_is_told_so(tmp_path, options):
    """Its gradients would be swallowed, and whoever steps with them would not learn."""
    trainer = make_trainer(tmp_path, options, parts={"eval_dataset": rows(6, seed=5)})
    trainer.train()
    trainer.evaluate()
    model, batch = trainer.model, torch.tensor([rows(1)[0]["input_ids"]])
    with pytest.raises(UnsupportedError, match=r"trainer\.end\(\)"):
        model(input_ids=batch.to(trainer.args.device), labels=batch.to(trainer.args.device)).loss.backward()
    trainer.evaluate()
    trainer.train()
    trainer.end()
    model(input_ids=batch, labels=batch).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- a search for hyper-parameters -------------------------------------------------------------------------------------


def searched(folder, options, make):
    """Train two trials, as `hyperparameter_search` does with W&B, which gives it dicts."""
    trainer = make(folder, options)
    trainer.hp_search_backend, trainer.hp_name = HPSearchBackend.WANDB, str
    losses, runs = [], []
    for rate in (1e-3, 1e-2):
        trainer.train(trial={"learning_rate": rate})
        losses += losses_of(trainer)
        runs.append(getattr(getattr(trainer.accelerator, "offload", None), "session", None))
    if runs[0] is not None:
        assert runs[0] is not runs[1] and runs[0].run is None, "the trial before has let go of its memory"
    return losses, finish(trainer)[1]


def with_init(folder, options):
    return make_trainer(folder, options, parts={"model_init": lambda: tiny_llama()}, model=False)


def taken_over(folder, options):
    trainer = with_init(folder, PLAIN)
    return trainer if options == PLAIN else offload(trainer, **options)


@pytest.mark.parametrize("make", [with_init, taken_over])
def test_a_search_trains_with_the_same_options(tmp_path, make, monkeypatch):
    monkeypatch.setattr("transformers.integrations.hp_params", dict)  # looks for Ray, Optuna and W&B
    monkeypatch.setattr("transformers.trainer.Trainer._get_output_dir", lambda self, trial: str(tmp_path))
    assert_identical(*(searched(tmp_path, options, make) for options in (PLAIN, {**STREAMED, **EXACT})))


# -- trained again -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize("compiled, resumes", [(COMPILED, False), ({}, True)], ids=str)
def test_train_again(tmp_path, compiled, resumes):
    found = []
    for name, options in (("plain", PLAIN), ("ours", {**STREAMED, **EXACT})):
        torch._dynamo.reset()
        trainer = make_trainer(tmp_path / name, options, save_strategy="steps", save_steps=3, **compiled)
        trainer.train()
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-3") if resumes else None)
        found.append(finish(trainer))
    assert_identical(*found)


class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 2:
            raise RuntimeError("enough")


@pytest.mark.parametrize("options", [STREAMED, pytest.param(EXACT, marks=pytest.mark.full)], ids=str)
def test_a_loss_scaler_after_an_error(tmp_path, options):
    found = []
    for offload_options in (PLAIN, options):
        trainer = make_trainer(tmp_path, offload_options, optim="adamw_torch", parts={"callbacks": [Fails()]})
        accelerator = trainer.accelerator
        accelerator.scaler = torch.amp.GradScaler(training_device.current.type, init_scale=2.0**10)
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        if offload_options != PLAIN:
            accelerator.offload.attach_scaler(accelerator.scaler)
        with pytest.raises(RuntimeError, match="enough"):
            trainer.train()
        trainer.remove_callback(Fails)
        trainer.train()
        found.append(finish(trainer))
    assert_close(*found, atol=1e-4)  # last bits of weights decide how some are rounded to fp16


class Exhausted:
    """Has no memory for its fifth micro-batch."""

    num_calls = 0

    def compute_loss(self, *arguments, **keywords):
        self.num_calls += 1
        if self.num_calls == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return super().compute_loss(*arguments, **keywords)


class Plain(Exhausted, Trainer):
    pass


class Ours(Exhausted, CXLTrainer):
    pass


def test_a_smaller_batch_goes_on_in_the_middle(tmp_path):
    given = {"auto_find_batch_size": True, "gradient_accumulation_steps": 2, "cls": Plain, "ours": Ours}
    found = []
    for options in (PLAIN, {**STREAMED, **EXACT}):
        trainer = make_trainer(tmp_path, options, **given)
        trainer.train()
        assert trainer.state.train_batch_size == 1
        found.append(finish(trainer))
    assert_identical(*found)


# -- code of others ----------------------------------------------------------------------------------------------------


def test_a_patched_method_may_edit_gradients(tmp_path, monkeypatch):
    step = Trainer.training_step

    def tripled(self, *arguments):
        loss = step(self, *arguments)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.data.mul_(3.0)
        return loss

    def norms(**given):
        trainer = make_trainer(tmp_path, STREAMED, max_grad_norm=1e9, **given)
        trainer.train()
        return finish(trainer)[0][0][1]

    expected = norms()
    monkeypatch.setattr(Trainer, "training_step", tripled)
    assert norms() == pytest.approx(3 * expected, rel=1e-5)
    assert norms(ours=type("Mixed", (CXLTrainerMixin, Trainer), {})) == pytest.approx(3 * expected, rel=1e-5)


# -- Trainers that would train without us ------------------------------------------------------------------------------


def test_a_mixin_behind_the_trainer_is_refused_when_the_class_is_made():
    with pytest.raises(ConfigError, match=r"Write `class Mine\(CXLTrainerMixin, Trainer\)`"):
        type("Mine", (Trainer, CXLTrainerMixin), {})


def test_an_accelerator_in_the_place_of_ours_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, STREAMED)
    ours, trainer.accelerator = trainer.accelerator, Accelerator()
    with pytest.raises(ConfigError, match="a plain Accelerator"):
        trainer.train()
    trainer.accelerator = ours
    trainer.end()
