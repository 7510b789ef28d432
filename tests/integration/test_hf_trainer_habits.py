"""What users of transformers' Trainer do around a training, and what they may look at."""

import warnings

import numpy as np
import pytest
import torch
from torch.nn.utils import clip_grad
from transformers import Trainer, TrainerCallback, TrainingArguments

import lightning_cxl.transformers
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.transformers import CXLTrainer, CXLTrainerMixin
from tests import training_device
from tests.integration.hf_trainer import (
    EXACT,
    PLAIN,
    assert_close,
    assert_identical,
    finish,
    make_trainer,
    rows,
    train,
)
from tests.integration.llama import tiny_llama

STREAMED = {"stream_weights": True}
EVALUATED = {"eval_dataset": rows(6, seed=5)}


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [STREAMED, {"stream_weights": False}], ids=str)
def test_evaluates_and_predicts_without_training(tmp_path, options):
    found = {}
    for name, offload in (("plain", PLAIN), ("ours", options)):
        trainer = make_trainer(tmp_path, offload, parts=EVALUATED)
        found[name] = trainer.evaluate()["eval_loss"], trainer.predict(rows(3)).predictions
        finish(trainer)
    assert found["ours"][0] == found["plain"][0]
    assert np.array_equal(found["ours"][1], found["plain"][1])


def test_the_model_stays_on_the_host_until_it_is_trained(tmp_path):
    trainer = make_trainer(tmp_path, STREAMED)
    assert {p.device.type for p in trainer.model.parameters()} == {"cpu"}


def test_a_model_besides_the_trained_one_stays_prepared(tmp_path):
    other, tokens = tiny_llama(), torch.zeros(1, 8, dtype=torch.long)
    expected = other(tokens).logits.detach()
    trainer = make_trainer(tmp_path, STREAMED)
    trainer.accelerator.prepare_model(other, evaluation_mode=True)
    for _ in range(2):
        trainer.train()
        with torch.no_grad():
            found = other(tokens.to(training_device.current)).logits.cpu()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert len(trainer.accelerator.offload.session.runs) == 2
    finish(trainer)


# -- several trainings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [STREAMED, {**STREAMED, **EXACT}], ids=str)
def test_train_twice_goes_on_with_the_same_optimizer(tmp_path, options):
    found = []
    for offload in (PLAIN, options):
        trainer = make_trainer(tmp_path, offload)
        trainer.train()
        trainer.train()
        found.append(finish(trainer))
    (assert_close if options == STREAMED else assert_identical)(*found)


def test_a_model_is_made_for_each_training(tmp_path):
    found = []
    for offload in (PLAIN, EXACT):
        trainer = make_trainer(tmp_path, offload, parts={"model_init": lambda: tiny_llama()}, model=False)
        trainer.train()
        trainer.train()
        if offload != PLAIN:
            assert len(trainer.accelerator.offload.session.runs) == 1, "the model before is let go of"
        found.append(finish(trainer))
    assert_identical(*found)


def test_finds_a_batch_size(tmp_path):
    class Full(CXLTrainerMixin, Trainer):
        def compute_loss(self, model, inputs, **keywords):
            if self.is_in_train and inputs["input_ids"].shape[0] > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
            return super().compute_loss(model, inputs, **keywords)

    trainer = make_trainer(
        tmp_path, STREAMED, ours=Full, per_device_train_batch_size=5, auto_find_batch_size=True, max_steps=4
    )
    trainer.train()
    assert trainer.state.train_batch_size <= 2
    losses, _ = finish(trainer)
    assert len(losses) == 4


# -- the user's own objects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [STREAMED, EXACT], ids=str)
def test_the_users_optimizer_and_scheduler_are_used_without_a_warning(tmp_path, options):
    found = []
    for offload in (PLAIN, options):
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3) for _ in range(2)],
            milestones=[4],
        )
        trainer = make_trainer(tmp_path, offload, model=model, parts={"optimizers": (optimizer, scheduler)})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
            trainer.train()
        assert not [each for each in caught if "lr_scheduler" in str(each.message)]
        found.append(finish(trainer))
    (assert_close if options == STREAMED else assert_identical)(*found)


def test_an_existing_trainer(tmp_path):
    plain = train(tmp_path)
    trainer = make_trainer(tmp_path)
    assert lightning_cxl.transformers.offload(trainer, **STREAMED) is trainer
    assert isinstance(trainer, CXLTrainerMixin) and type(trainer).__name__ == "Trainer"
    trainer.train()
    assert "AdamW by CPUAdam" in trainer.report()["optimizers"][0]
    assert_close(plain, finish(trainer))
    with pytest.raises(ConfigError, match="offloads already"):
        lightning_cxl.transformers.offload(trainer)


def test_options_come_from_a_file(tmp_path):
    path = tmp_path / "offload.yaml"
    path.write_text("state: bf16\n")
    trainer = make_trainer(tmp_path, str(path))
    trainer.train()
    assert "bf16 state" in trainer.report()["optimizers"][0]
    finish(trainer)
    existing = make_trainer(tmp_path)
    with pytest.raises(ConfigError, match="give one of them"):
        lightning_cxl.transformers.offload(existing, str(path), state="bf16")
    lightning_cxl.transformers.offload(existing, str(path))
    assert existing.accelerator.offload.session.config.state == "bf16"
    finish(existing)


def test_a_trainer_that_has_trained_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    with pytest.raises(ConfigError, match="has prepared 1 models and 1 optimizers"):
        lightning_cxl.transformers.offload(trainer)
    finish(trainer)


@pytest.mark.parametrize(
    "given, why",
    [({"bf16_full_eval": True}, "cast the model"), ({"optim": "galore_adamw_layerwise"}, "inside the backward")],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, given, why):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **{**given, "bf16_full_eval": False})
    for name, value in given.items():
        setattr(args, name, value)
    with pytest.raises(UnsupportedError, match=why):
        CXLTrainer(tiny_llama(), args)


def test_several_devices_are_refused(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    args._n_gpu = 2
    with pytest.raises(UnsupportedError, match="CUDA_VISIBLE_DEVICES=0"):
        CXLTrainer(tiny_llama(), args)


# -- gradients ---------------------------------------------------------------------------------------------------------


class Looks(TrainerCallback):
    """Reads gradients before the step, as loggers of gradient norms do."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.stack([g.double().norm() for g in grads]).norm()))


@pytest.fixture
def num_clipped_in_place(monkeypatch):
    """Counts passes of torch over gradients that clip them."""
    counted = []
    scale = clip_grad.clip_grad_norm_

    def counting(*arguments, **keywords):
        counted.append(1)
        return scale(*arguments, **keywords)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", counting)
    return counted


def test_clipping_needs_no_pass_of_its_own(tmp_path, num_clipped_in_place):
    train(tmp_path, STREAMED, gradient_accumulation_steps=2)
    assert not num_clipped_in_place
    train(tmp_path, {**STREAMED, **EXACT})
    assert len(num_clipped_in_place) == 8


def test_who_looks_before_the_step_sees_clipped_gradients(tmp_path, num_clipped_in_place):
    found = {}
    for name, offload in (("plain", PLAIN), ("ours", STREAMED)):
        looks = Looks()
        train(tmp_path, offload, parts={"callbacks": [looks]}, max_grad_norm=0.5)
        found[name] = looks.norms
    assert max(found["plain"]) == pytest.approx(0.5, rel=1e-5)
    assert found["ours"] == pytest.approx(found["plain"], rel=1e-5)


def test_gradients_outside_of_the_optimizer_count_for_the_norm(tmp_path):
    found = []
    for offload in (PLAIN, {"stream_weights": False}):
        model = tiny_llama()
        part = torch.optim.AdamW(model.model.layers[1].parameters(), lr=1e-3)
        found.append(train(tmp_path, offload, model=model, parts={"optimizers": (part, None)}))
    assert_close(*found)


def frozen_blocks():
    model = tiny_llama()
    model.model.layers.requires_grad_(False)
    return model


@pytest.mark.skipif(training_device.chosen.type == "cpu", reason="copies are made where the device is apart")
def test_clipping_keeps_the_copies_on_the_device(tmp_path):
    fetches = []
    for clips in (CXLTrainer._clip_grad_norm, Trainer._clip_grad_norm):  # the second looks at the parameters
        cls = type("Clips", (CXLTrainer,), {"_clip_grad_norm": clips, "__module__": "lightning_cxl"})
        trainer = make_trainer(tmp_path, STREAMED, ours=cls, model=frozen_blocks())
        trainer.train()
        fetches.append(trainer.report()["streamed"]["num_fetches"])
        finish(trainer)
    assert fetches[0] < fetches[1]


@pytest.mark.skipif(training_device.chosen.type == "cpu", reason="updates overlap where the device is apart")
def test_the_step_returns_before_units_are_updated(tmp_path, slow_updates):
    under_way = []

    class Watches(CXLTrainerMixin, Trainer):
        def compute_loss(self, *arguments, **keywords):
            run = self.accelerator.offload.session.run
            under_way.append(any(unit.is_updating() for unit in run._residence.units))
            return super().compute_loss(*arguments, **keywords)

    plain = train(tmp_path)
    ours = train(tmp_path, STREAMED, ours=Watches)
    assert under_way[0] is False and all(under_way[1:])
    assert_close(plain, ours)


def test_counting_operations_does_not_look_at_parameters(tmp_path):
    plain, ours = make_trainer(tmp_path), make_trainer(tmp_path, STREAMED)
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long)}
    assert ours.floating_point_ops(batch) == plain.floating_point_ops(batch) > 0
    ours.model = None  # is not asked again
    assert ours.floating_point_ops({"input_ids": torch.zeros(4, 8)}) == 2 * plain.floating_point_ops(batch)
