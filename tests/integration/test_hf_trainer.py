"""The Trainer of transformers: what it has of its own, beside the contract of front ends."""

import contextlib

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import lightning_cxl.transformers
from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.transformers import CXLTrainer, CXLTrainerMixin
from tests import training_device
from tests.cases import every_value
from tests.integration.hf_trainer import EXACT, PLAIN, assert_close, assert_identical, finish, make_trainer, rows, train
from tests.integration.llama import tiny_llama

STREAMED = {"stream_weights": True}

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
NOT_COMPARED = ("runtime", "per_second", "preparation_time")
CASES = {
    "accumulation with a rest": {"gradient_accumulation_steps": 3},
    "neftune": {"neftune_noise_alpha": 5.0},
    "own checkpointing": {"activation_checkpointing": True},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "adagrad": {"optim": "adagrad"},  # makes its state when it is constructed
    "fused": {"optim": "adamw_torch_fused"},
    "polynomial": {"lr_scheduler_type": "polynomial", "warmup_steps": 2},  # reads the optimizer's defaults
    "plateau": {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0}, **EVALUATED},
    "an evaluation first": {"eval_on_start": True, **EVALUATED},
    "compiled": {"gradient_accumulation_steps": 2, **COMPILED},
}


def run(folder, offload=PLAIN, *, parts=None, **given):
    torch._dynamo.reset()
    trainer = make_trainer(folder, offload, parts={"eval_dataset": rows(6, seed=5), **(parts or {})}, **given)
    trainer.train()
    logged = [
        {key: value for key, value in entry.items() if not any(word in key for word in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]
    return logged, finish(trainer)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's compiler
@pytest.mark.parametrize(("case", "streams"), every_value(CASES, [True, False]))
def test_logs_and_trains_what_the_plain_trainer_does(tmp_path, case, streams):
    plain, ours = (run(tmp_path, each, **CASES[case]) for each in (PLAIN, {"stream_weights": streams, **EXACT}))
    assert len(plain[0]) > 2 and ours[0] == plain[0]
    assert_identical(plain[1], ours[1])


@pytest.mark.on_cpu  # where bitsandbytes has kernels for plain transformers, too
def test_an_optimizer_of_bitsandbytes_steps_on_the_host(tmp_path):
    def run(offload=PLAIN):
        large = tiny_llama(hidden_size=64, intermediate_size=128)  # bitsandbytes keeps small state in float32
        return train(tmp_path, offload, model=large, optim="adamw_bnb_8bit")

    assert_identical(run(), run({"stream_weights": True}))


class Averages(torch.optim.SGD):
    """Evaluates with other weights than it trains, as optimizers without a schedule do."""

    factor = 1.0

    def train(self):
        self._scale(1.0)

    def eval(self):
        self._scale(0.5)

    @torch.no_grad()
    def _scale(self, factor):
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(factor / self.factor)
        self.factor = factor


def test_optimizers_without_a_schedule_evaluate_with_other_weights(tmp_path):
    found = []
    for offload in (PLAIN, {"stream_weights": False}):
        model = tiny_llama()
        averages = Averages(model.parameters(), lr=0.1)
        parts = {"optimizers": (averages, torch.optim.lr_scheduler.ConstantLR(averages, 1.0))}
        found.append(run(tmp_path, offload, model=model, parts=parts, **EVALUATED))
    (plain, trained), (ours, same) = found
    assert ours == plain
    assert_identical(trained, same)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.filterwarnings("ignore:the gradient of:lightning_cxl.errors.LightningCXLWarning")  # its first scale
@pytest.mark.parametrize(("options", "given"), [(EXACT, {}), (STREAMED, {"gradient_accumulation_steps": 2})], ids=str)
def test_a_loss_scaler(tmp_path, options, given):
    """Neither transformers nor Accelerate makes one without a GPU, so both get it here.

    CPUAdam leaves a step out as torch's AdamW does that is not fused: the scheduler waits. A fused one counts it.
    """
    optim = "adamw_torch_fused" if options == EXACT else "adamw_torch"
    found = []
    for offload in (PLAIN, options):
        trainer = make_trainer(tmp_path, offload, optim=optim, **given)
        accelerator = trainer.accelerator
        accelerator.scaler = torch.amp.GradScaler(training_device.current.type, init_scale=2.0**16, growth_interval=3)
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        if offload != PLAIN:
            accelerator.offload.attach_scaler(accelerator.scaler)
        trainer.train()
        found.append((*finish(trainer), accelerator.scaler.get_scale()))
    assert found[0][2] == found[1][2] != 2.0**16
    if options == EXACT:
        assert_identical(found[0][:2], found[1][:2])
    else:
        assert_close(found[0][:2], found[1][:2], atol=1e-4)  # last bits of weights decide how some are rounded to fp16


@pytest.mark.parametrize("options", [STREAMED, {"stream_weights": False}], ids=str)
def test_evaluates_and_predicts_without_training(tmp_path, options):
    found = []
    for offload in (PLAIN, options):
        trainer = make_trainer(tmp_path, offload, parts={"eval_dataset": rows(6, seed=5)})
        assert offload == PLAIN or {p.device.type for p in trainer.model.parameters()} == {"cpu"}, "until it is used"
        found.append((trainer.evaluate()["eval_loss"], trainer.predict(rows(3)).predictions.tolist()))
        finish(trainer)
    assert found[0] == found[1]


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


def test_a_trainer_that_has_trained_is_refused(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.train()
    with pytest.raises(ConfigError, match="has prepared 1 models and 1 optimizers"):
        lightning_cxl.transformers.offload(trainer)
    finish(trainer)


class Looks(TrainerCallback):
    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.stack([g.double().norm() for g in grads]).norm()))


def test_who_looks_before_the_step_sees_clipped_gradients(tmp_path):
    plain, ours = Looks(), Looks()
    for looks, offload in ((plain, PLAIN), (ours, STREAMED)):
        train(tmp_path, offload, parts={"callbacks": [looks]}, max_grad_norm=0.5)
    assert max(plain.norms) == pytest.approx(0.5, rel=1e-5)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-5)


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


@pytest.mark.usefixtures("device_apart")
def test_a_plain_trainer_is_told_that_the_model_is_held(tmp_path):
    model = tiny_llama()
    trainer = make_trainer(tmp_path, STREAMED, model=model)
    trainer.train()
    with pytest.raises(UnsupportedError, match=r"trainer\.end\(\)"):
        make_trainer(tmp_path, model=model).train()
    with pytest.warns(LightningCXLWarning, match="ends its run") as told:
        model.cpu()
    assert told[0].filename == __file__
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


def test_a_smaller_batch_goes_on_in_the_middle(tmp_path):
    found = []
    for options in (PLAIN, {**STREAMED, **EXACT}):
        model, calls = tiny_llama(), []

        def exhausted(*_, calls=calls):
            calls.append(1)
            if len(calls) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

        model.register_forward_pre_hook(exhausted)
        given = {"auto_find_batch_size": True, "gradient_accumulation_steps": 2}
        trainer = make_trainer(tmp_path, options, model=model, **given)
        trainer.train()
        assert trainer.state.train_batch_size == 1
        found.append(finish(trainer))
    assert_identical(*found)


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


def test_a_mixin_behind_the_trainer_is_refused_when_the_class_is_made():
    with pytest.raises(ConfigError, match=r"Write `class Mine\(CXLTrainerMixin, Trainer\)`"):
        type("Mine", (Trainer, CXLTrainerMixin), {})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"bf16_full_eval": True}, "cast the model"),
        ({"optim": "galore_adamw_layerwise"}, "inside the backward"),
        ({"_n_gpu": 2}, "CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path, given, why):
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    for name, value in given.items():
        setattr(args, name, value)
    with pytest.raises(UnsupportedError, match=why):
        CXLTrainer(tiny_llama(), args)


def test_gradients_outside_of_the_optimizer_count_for_the_norm(tmp_path):
    found = []
    for offload in (PLAIN, {"stream_weights": False}):
        model = tiny_llama()
        part = torch.optim.AdamW(model.model.layers[1].parameters(), lr=1e-3)
        found.append(train(tmp_path, offload, model=model, parts={"optimizers": (part, None)}))
    assert_close(*found)
