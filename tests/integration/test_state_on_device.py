"""Weights that stay on the device and are updated there: nothing of them on the host, the same bits, also resumed."""

import gc
import math
import pickle
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback

import lightning_cxl
from lightning_cxl.errors import ConfigError, GradientOverflowError
from lightning_cxl.optim import cpu_adam
from tests import training_device
from tests.cases import others_full
from tests.integration.training import assert_equal, run, weights_of
from tests.models import InStep, Task, TinyTransformer

pytestmark = pytest.mark.usefixtures("device_apart")
RESIDENT = {"model.embed.weight", "model.norm.weight", "model.norm.bias", "model.head.weight"}


class Fixed(InStep, Task):
    """Takes the batch of its step, and one group of parameters with names."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.named_parameters(), lr=3e-3)


def fit(steps=4, *, on_device=True, task=Fixed, bf16=True, callbacks=(), **given):
    options = {name: given.pop(name) for name in [*given] if name in lightning_cxl.OffloadConfig.__dataclass_fields__}
    given |= {"precision": "bf16-true" if bf16 else "32-true", "callbacks": list(callbacks)}
    return run({"state_on_device": on_device, **options}, lambda: task(TinyTransformer(dropout=0.0)), steps, **given)


def both(**given):
    """Weights with it and without."""
    return (weights_of(fit(on_device=there, **given)[0]) for there in (True, False))


class Looks(Callback):
    """Keeps where state, masters and gradients are, by name."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.grads = {name: p.grad.device.type for name, p in module.named_parameters() if p.grad is not None}

    def on_train_end(self, trainer, module):
        (group,) = trainer.optimizers[0].param_groups
        state, named = trainer.optimizers[0].state, dict(zip(group["param_names"], group["params"], strict=True))
        self.masters = {name: p.device.type for name, p in named.items()}
        self.state = {name: state[p]["exp_avg"].device.type for name, p in named.items() if p in state}
        self.report = trainer.strategy.report()


@pytest.mark.parametrize(("bf16", "count"), [(True, 0), (False, 1)])
def test_nothing_of_them_is_on_the_host(bf16, count):
    gc.collect()
    held = torch.accelerator.memory_allocated()
    looks, before = Looks(), Looks()
    module, trainer = fit(bf16=bf16, callbacks=[looks], units_on_device=count)
    fit(bf16=bf16, callbacks=[before], units_on_device=count, on_device=False)
    there = {name for name, device in looks.state.items() if device == training_device.current.type}
    of_units = {name.split(".")[2] for name in there if ".blocks." in name}
    assert there >= RESIDENT and len(of_units) == count
    for found in (looks.masters, looks.grads):
        assert {name for name, device in found.items() if device != "cpu"} & looks.state.keys() == there
    assert set(before.state.values()) == {"cpu"}
    numel = sum(p.numel() for name, p in module.named_parameters() if name in there)
    numel += sum(p.numel() for p in module.model.unused.parameters())  # as no gradient comes, nothing of it is made
    planned, without = (sum(each.report["planned_roles"]["momentum"].values()) for each in (looks, before))
    assert without - planned == 4 * numel
    assert f"({len(there) + 2} of them on the device)" in looks.report["optimizers"][0]
    # the run is over: the model is on the host again, and so is all that belongs to it
    assert {value.device.type for entry in trainer.optimizers[0].state.values() for value in entry.values()} == {"cpu"}
    gc.collect()
    held += 2 * 512 * len(module.losses)  # of both runs
    assert torch.accelerator.memory_allocated() <= held
    assert pickle.loads(pickle.dumps(trainer.optimizers[0])).param_groups


@pytest.mark.parametrize("on_overflow", ["ignore", "error", "skip"])
@pytest.mark.parametrize("bf16", [True, False])
def test_trains_the_same_bits_and_resumes_with_and_without_it(tmp_path, bf16, on_overflow):
    """Chunks are smaller than the weights; copies and kernels are late."""
    training_device.make_late("copies and kernels")
    given = {"bf16": bf16, "on_overflow": on_overflow}
    whole = {there: fit(6, on_device=there, **given)[0] for there in (True, False)}
    assert whole[True].losses == whole[False].losses
    assert_equal(weights_of(whole[True]), weights_of(whole[False]))
    for first in (True, False):
        fit(3, on_device=first, save=tmp_path / "three.ckpt", **given)
        for second in (True, False):
            resumed, _ = fit(6, on_device=second, ckpt_path=tmp_path / "three.ckpt", **given)
            assert_equal(weights_of(resumed), weights_of(whole[True]))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    """Of no less than a vector, which torch's CPU kernel rounds otherwise."""
    monkeypatch.setattr(cpu_adam, "_DEVICE_CHUNK", 512)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, 0.3), (3, 0.3), (3, None)])
def test_sums_and_norms_of_gradients_on_both(accumulate, clip):
    """The norm is the same but for the order of its sum."""
    ours, plain = both(accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    if clip is None:
        assert_equal(ours, plain)
    else:
        torch.testing.assert_close(ours, plain, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_multiplied_by_the_factor_of_their_step(dtype):
    def stepped(device):
        weight = torch.nn.Parameter(torch.ones(640, device=device))
        adam = lightning_cxl.CPUAdam([weight], lr=0.1)
        for step, factor in enumerate((1.0, 0.1, 0.5)):
            grad = torch.randn(640, generator=torch.Generator().manual_seed(step)).to(dtype)
            weight.grad_dtype = None
            weight.grad, adam.grad_scale = grad.to(device), factor
            adam.step()
            assert torch.equal(weight.grad.cpu(), grad)
        return weight.detach().cpu()

    assert_equal(stepped(training_device.current), stepped("cpu"))


class Overflows(Fixed):
    """The gradient of the head is not finite in its third step."""

    seen = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 2 and not self.seen:
            self.seen = True
            self.model.head.weight.register_hook(lambda grad: torch.full_like(grad, math.inf))
        return loss


def test_an_infinite_gradient_leaves_the_step_out_or_ends_the_run():
    with pytest.warns(lightning_cxl.LightningCXLWarning, match=r"gradient of `model\.head\.weight`"):
        module, _ = fit(3, task=Overflows)
    assert_equal(weights_of(module), weights_of(fit(2)[0]))
    with pytest.raises(GradientOverflowError, match=r"gradient of `model\.head\.weight`"):
        fit(3, task=Overflows, on_overflow="error")


@pytest.mark.parametrize("refused", range(3))
def test_memory_that_is_refused_leaves_nothing_half_updated(monkeypatch, refused):
    """The loop tries the step again, and trains as if nothing had been."""
    asked, failed, apply = [], [], cpu_adam.AdamStep._apply_on_device

    def refusing(take, *arguments, **keywords):
        asked.append(None)
        if len(asked) == refused + 1:
            raise torch.OutOfMemoryError("no memory")
        return take(*arguments, **keywords)

    def applied(*arguments):
        with monkeypatch.context() as patch:
            for name in ("full", "empty"):
                patch.setattr(torch, name, partial(refusing, getattr(torch, name)))
            apply(*arguments)

    class Retries(Fixed):
        def optimizer_step(self, *arguments):
            try:
                super().optimizer_step(*arguments)
            except torch.OutOfMemoryError:
                failed.append(len(asked))
                super().optimizer_step(*arguments)

    given = {"bf16": False, "overlap_step": False}
    plain, _ = fit(2, **given)
    monkeypatch.setattr(cpu_adam.AdamStep, "_apply_on_device", applied)
    module, _ = fit(2, task=Retries, **given)
    assert failed == [refused + 1]
    assert_equal(weights_of(module), weights_of(plain))


def initial():
    seed_everything(5, verbose=False)
    return TinyTransformer(dropout=0.0)


@pytest.mark.parametrize(
    ("what", "tier"), [("optimizer_state", "dram"), ("optimizer_state", "ssd"), ("gradients", "dram")]
)
def test_what_a_tier_is_asked_for_stays_on_the_host(tmp_path, what, tier):
    looks, rule = Looks(), {"model.head": {what: tier}}
    fit(2, callbacks=[looks], tier_rules=rule, tiers={"ssd": {"path": str(tmp_path), "budget": "64MiB"}})
    assert looks.masters["model.head.weight"] == "cpu" != looks.masters["model.embed.weight"]


class Unfreezes(Fixed):
    """Embeds with frozen weights in its first two steps."""

    def __init__(self, model):
        super().__init__(model)
        model.embed.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.model.embed.requires_grad_(self.global_step >= 2)


def test_weights_that_are_unfrozen_later_take_nothing_of_the_device():
    ours, plain = both(task=Unfreezes)
    assert_equal(ours, plain)
    assert not torch.equal(ours["model.embed.weight"], initial().embed.weight.bfloat16())
    looks = Looks()
    fit(2, task=Unfreezes, callbacks=[looks])
    assert looks.masters["model.embed.weight"] == "cpu" and "model.embed.weight" not in looks.state


class Manual(Fixed):
    """Torch's default dtype is bfloat16 in `training_step` of bf16-true."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.optimizers().zero_grad()


class Writes(Fixed):
    """Writes to weights and gradients that it finds in the model and in the optimizer."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer):
        for parameter in (self.model.embed.weight, self.model.blocks[0].out.weight):
            parameter.grad.mul_(2)
        self.model.head.weight.grad = self.model.head.weight.grad * 3

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        self.model.embed.weight.clamp_(-1, 1)
        self.model.head.weight.data.mul_(0.9)
        for group in self.optimizers().param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-2, 2)


LOOPS = [(Manual, True), (Writes, True), (Manual, False), (Writes, False)]


@pytest.mark.every_case
@pytest.mark.parametrize(("task", "bf16"), others_full(LOOPS, LOOPS[:2]))
def test_manual_optimization_and_what_users_write(task, bf16):
    # of split masters, what is written keeps the lower half
    assert_equal(*both(task=task, bf16=bf16, **({"master": "fp32"} if task is Writes else {})))


def test_they_are_new_while_updates_of_the_host_are_held(gate):
    seen = []

    def reads(trainer, module, *_):
        assert not gate.is_open.is_set()
        seen.append(module.model.embed.weight.detach().cpu())
        gate.is_open.set()

    module, _ = fit(1, callbacks=[LambdaCallback(on_train_batch_end=reads)])
    assert gate.num_waiting == 3, "three blocks"
    assert torch.equal(seen[0], module.model.embed.weight)
    assert not torch.equal(seen[0], initial().embed.weight.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_squares_there_is_finite_if_all_elements_are(dtype):
    grads = [torch.randn(300, dtype=dtype), torch.full((3,), 1e30, dtype=dtype), torch.tensor([1.0, math.inf, 0.0])]
    there = [grad.to(training_device.current) for grad in [*grads, torch.tensor([math.nan, 1.0])]]
    first, *others = cpu_adam.sums_of_squares(there, 1, cpu_adam.chosen_isa(None))
    assert first == pytest.approx(grads[0].double().square().sum().item(), rel=1e-6)
    assert [math.isfinite(each) for each in others] == [True, False, False]


def test_an_optimizer_of_users_updates_float32_weights_there_and_refuses_other_halves():
    weights = [torch.nn.Parameter(torch.ones(3, device=training_device.current)) for _ in range(2)]
    half = weights[0].detach().half()
    adam = lightning_cxl.CPUAdam(weights, lr=0.1, compute_weights={weights[0]: half})
    weights[0].grad = torch.ones_like(weights[0])
    with pytest.raises(ConfigError, match="float16 on the host"):
        adam.step()
    weights[0].grad, weights[1].grad = None, torch.ones_like(weights[1])
    adam.step()
    torch.testing.assert_close(weights[1].detach().cpu(), torch.full((3,), 0.9))
    with pytest.raises(ConfigError, match=r"float32 weights, and bfloat16 weights on the host; .* is torch\.bfloat16"):
        lightning_cxl.CPUAdam([torch.nn.Parameter(weights[1].detach().bfloat16())])
