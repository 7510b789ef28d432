"""Accelerate loops of many shapes: several models, optimizers prepared apart, errors, gradients that are read."""

import copy

import pytest
import torch
from accelerate.utils import find_executable_batch_size
from torch import nn

from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from tests.cases import every_pair, every_value
from tests.integration.accelerate_loop import (
    EXACT,
    PLAIN,
    adamw,
    assert_close,
    assert_identical,
    loss_of,
    make_accelerator,
    warm,
    weights_of,
)
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True, **EXACT}


def compare(run, **options):
    """Run with theirs and with ours; `run` returns (losses, weights)."""
    plain = run(make_accelerator())
    accelerator = make_accelerator({**STREAMED, **options})
    ours = run(accelerator)
    accelerator.free_memory()
    assert_identical(plain, ours)
    return accelerator


def made(make=TinyTransformer, seed=5):
    torch.manual_seed(seed)
    model = make()
    return model, adamw(model)


def plain_steps(accelerator, model, optimizer, data, *, scheduler=None):
    torch.manual_seed(6)
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, weights_of(accelerator, model)


@pytest.mark.parametrize("order", ["model first", "one by one", "optimizer first"])
def test_objects_prepared_apart(order):
    def run(accelerator):
        model, optimizer = made()
        data = accelerator.prepare(token_data(4))
        if order == "model first":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        elif order == "one by one":
            model = accelerator.prepare_model(model)
            optimizer = accelerator.prepare_optimizer(optimizer)
        else:
            optimizer, model = accelerator.prepare(optimizer, model)
        return plain_steps(accelerator, model, optimizer, data)

    compare(run)


@pytest.mark.parametrize(
    ("when", "is_prepared", "options"),
    every_pair(["before", "after"], [True, False], [{}, {"cpu_adam": True}]),
    ids=str,
)
def test_a_scheduler(when, is_prepared, options, tmp_path):
    def run(accelerator):
        model, optimizer = made()
        scheduler = warm(optimizer) if when == "before" else None
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(3))
        if when == "after":
            scheduler = warm(optimizer)
        if is_prepared:
            scheduler = accelerator.prepare(scheduler)
        losses, _ = plain_steps(accelerator, model, optimizer, data, scheduler=scheduler)
        rates = [optimizer.param_groups[0]["lr"]]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # makes new groups
        more, weights = plain_steps(accelerator, model, optimizer, data, scheduler=scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) == 2
        return losses + more + rates, weights

    plain = run(make_accelerator())
    accelerator = make_accelerator({**STREAMED, **options})
    ours = run(accelerator)
    accelerator.free_memory()
    assert_close(plain, ours)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


OWN_GRADIENTS = [{}, {"stream_weights": False}, {"cpu_adam": True}]


@pytest.mark.parametrize("options", OWN_GRADIENTS, ids=str)
def test_a_loop_that_works_on_the_models_own_gradients(options):
    """Norms, clipping by torch's function, adversarial weights for one backward, noise, and gradients put together."""

    def run(accelerator):
        model, optimizer = made(lambda: TinyTransformer(depth=5, dropout=0.0))
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(6))
        kept, losses = list(model.parameters()), []
        for step, batch in enumerate(data):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            losses.append(loss.item())
            losses.append(torch.stack([p.grad.norm().cpu() for p in kept if p.grad is not None]).norm().item())
            weight = model.embed.weight
            before = weight.data.clone()
            weight.data.add_(0.1 * weight.grad.to(weight.device) / weight.grad.norm().to(weight.device))
            accelerator.backward(loss_of(model, batch))
            weight.data = before
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            for p in kept:
                if p.grad is not None:
                    p.grad = p.grad + 0.01 * step
            optimizer.step()
            for p in kept if step % 2 else ():
                p.grad = None
            if step % 2 == 0:
                model.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        return losses, weights_of(accelerator, model)

    plain = run(make_accelerator())
    accelerator = make_accelerator({**STREAMED, **options})
    ours = run(accelerator)
    accelerator.free_memory()
    (losses, weights), (own_losses, own_weights) = plain, ours
    assert own_losses == pytest.approx(losses, rel=1e-4)
    for name, value in weights.items():
        assert torch.allclose(own_weights[name].cpu(), value.cpu(), atol=2e-4), name


@pytest.mark.parametrize(("keeps", "options"), every_value(["clone", "alias"], OWN_GRADIENTS[:2]), ids=str)
def test_averaged_weights_take_turns_with_those_that_train(options, keeps):
    """An average is put in the place of ``p.data`` for an evaluation, and the tensors of before are put back."""

    def run(accelerator):
        model, optimizer = made(lambda: TinyTransformer(depth=5, dropout=0.0))
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(4))
        average, losses = {name: p.data.clone() for name, p in model.named_parameters()}, []
        for batch in data:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                average[name] = (0.5 * p.data + 0.5 * average[name]).clone()
            backup = {}
            for name, p in model.named_parameters():
                backup[name], p.data = p.data if keeps == "alias" else p.data.clone(), average[name]
            with torch.no_grad():
                losses += [loss.item(), loss_of(model, batch).item()]
            for name, p in model.named_parameters():
                p.data = backup[name]
        return losses, weights_of(accelerator, model)

    plain = run(make_accelerator())
    accelerator = make_accelerator({**STREAMED, **options})
    if keeps == "alias" and not options:
        with pytest.raises(UnsupportedError, match="while your code holds"):
            run(accelerator)
        accelerator.free_memory()
    else:
        ours = run(accelerator)
        accelerator.free_memory()
        assert_close(plain, ours)


@pytest.mark.parametrize("together", [True, False])
def test_a_generator_against_a_discriminator(together):
    def run(accelerator):
        torch.manual_seed(1)
        generator, critic = Generator(), Discriminator()
        of_generator, of_critic = adamw(generator), adamw(critic)
        if together:
            generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, of_generator, of_critic)
        else:
            generator, of_generator = accelerator.prepare(generator, of_generator)
            critic, of_critic = accelerator.prepare(critic, of_critic)
        losses = []
        for seed in range(4):
            noise = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(accelerator.device)
            of_critic.zero_grad()
            fake = generator(noise)
            loss = nn.functional.softplus(critic(fake.detach())).mean() + nn.functional.softplus(-critic(noise)).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(critic.parameters(), 0.5)
            of_critic.step()
            of_generator.zero_grad()
            loss = nn.functional.softplus(-critic(fake)).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_value_(generator.parameters(), 0.01)
            of_generator.step()
            losses.append(loss.item())
        of = {f"critic.{name}": value for name, value in weights_of(accelerator, critic).items()}
        return losses, weights_of(accelerator, generator) | of

    accelerator = compare(run)
    assert len(accelerator.report()["optimizers"]) == 2


def test_a_frozen_model_beside_one_that_is_trained():
    """As in DPO, or in distillation."""

    def run(accelerator):
        model, optimizer = made()
        torch.manual_seed(9)
        frozen = TinyTransformer(dropout=0.0).requires_grad_(False).eval()
        model, optimizer, data, frozen = accelerator.prepare(model, optimizer, token_data(3), frozen)
        torch.manual_seed(6)
        losses = []
        for tokens, _ in data:
            with torch.no_grad():
                target = frozen(tokens).softmax(-1)
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), target.flatten(0, 1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights_of(accelerator, model)

    accelerator = compare(run)
    assert accelerator.report()["num_parameters"] == 2 * accelerator.report()["num_trainable"]


def test_gradients_pass_through_a_frozen_model():
    """As a critic that is not trained: its weights stream in the backward, too."""

    def run(accelerator):
        torch.manual_seed(1)
        generator, critic = Generator(), Discriminator().requires_grad_(False)
        generator, critic, optimizer = accelerator.prepare(generator, critic, adamw(generator))
        losses = []
        for seed in range(3):
            noise = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(accelerator.device)
            loss = critic(generator(noise)).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights_of(accelerator, generator)

    compare(run)


@pytest.mark.parametrize("options", [{}, {"cpu_adam": True}], ids=["torch", "CPUAdam"])
def test_the_same_objects_again_after_free_memory(options):
    def run(accelerator):
        model, optimizer = made()
        scheduler = warm(optimizer)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, token_data(2), scheduler)
        losses, _ = plain_steps(accelerator, model, optimizer, data, scheduler=scheduler)
        accelerator.free_memory()
        given = optimizer
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        assert optimizer is given, "who keeps it steps the optimizer that is in use"
        more, weights = plain_steps(accelerator, model, optimizer, data, scheduler=scheduler)
        return [*losses, *more, scheduler.get_last_lr()[0]], weights

    plain = run(make_accelerator())
    accelerator = make_accelerator({**STREAMED, **options})
    ours = run(accelerator)
    accelerator.free_memory()
    assert_close(plain, ours)


def test_the_batch_size_that_fits():
    def run(accelerator):
        tried, result = [], []

        @find_executable_batch_size(starting_batch_size=4, reduce_batch_size_fn=lambda: sizes.pop(0))
        def inner(batch_size):
            tried.append(batch_size)
            accelerator.free_memory()
            model, optimizer = made()
            model, optimizer, data = accelerator.prepare(model, optimizer, token_data(3, batch_size))
            if batch_size > 2:
                for batch in data:
                    loss = loss_of(model, batch)
                    loss.register_hook(out_of_memory)
                    accelerator.backward(loss)
            result[:] = plain_steps(accelerator, model, optimizer, data)

        sizes = [3, 2]
        inner()
        assert tried == [4, 3, 2]
        return tuple(result)

    compare(run)


def out_of_memory(_):
    raise torch.OutOfMemoryError("The device is out of memory.")


def test_an_optimizer_for_two_models_is_refused():
    accelerator = make_accelerator({})
    generator, critic = Generator(), Discriminator()
    optimizer = torch.optim.AdamW([*generator.parameters(), *critic.parameters()])
    with pytest.raises(ConfigError, match="must become one for each model"):
        accelerator.prepare(generator, critic, optimizer)
    accelerator.free_memory()


@pytest.mark.parametrize("kind", ["generator", "list", "tensor", "of the optimizer", "twice"])
def test_what_is_clipped(kind):
    def run(accelerator):
        model, optimizer = made()
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(3))
        torch.manual_seed(6)
        found = []
        for batch in data:
            accelerator.backward(loss_of(model, batch))
            which = {
                "generator": lambda: (p for p in model.parameters() if p.dim() > 1),
                "list": lambda: list(model.parameters()),
                "tensor": lambda: model.head.weight,
                "of the optimizer": lambda: [p for group in optimizer.param_groups for p in group["params"]],
                "twice": lambda: [model.head.weight, model.head.weight],
            }[kind]
            if kind == "tensor":
                norm = torch.zeros(())
            else:
                norm = accelerator.clip_grad_norm_(which(), 0.3, norm_type=1)
            accelerator.clip_grad_value_(which(), 0.002)
            optimizer.step()
            optimizer.zero_grad()
            found.append(norm.item())
        return [*found, 1.0], weights_of(accelerator, model)

    compare(run)


@pytest.mark.parametrize(
    ("is_dropped", "options"),
    every_value([True, False], [{}, {"stream_weights": True}, {"master": "fp32"}, EXACT]),
    ids=str,
)
def test_gradients_from_before_the_run(options, is_dropped):
    """They can be dropped, and count once: also those of parameters that the step does not use."""
    found, (first, second) = [], token_data(2)
    for offload in (PLAIN, options):
        torch.manual_seed(5)
        model = TinyTransformer(depth=5, dropout=0.0).bfloat16()
        loss_of(model, first).backward()
        model.unused.weight.grad = torch.ones_like(model.unused.weight)
        accelerator = make_accelerator(offload)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if is_dropped:
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, [t.to(accelerator.device) for t in second]))
        found.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in model.parameters()])
        optimizer.step()
        model, optimizer = accelerator.free_memory(model, optimizer)
    assert found[1] == pytest.approx(found[0], rel=0.02, abs=1e-4)


def test_unscaled_gradients():
    def run(accelerator):
        model, optimizer = made()
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(3))
        torch.manual_seed(6)
        losses = []
        for batch in data:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            accelerator.unscale_gradients()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights_of(accelerator, model)

    plain = run(make_accelerator(mixed_precision="fp16"))
    accelerator = make_accelerator(STREAMED, mixed_precision="fp16")
    ours = run(accelerator)
    accelerator.free_memory()
    assert_identical(plain, ours)


def test_the_schedule_of_one_optimizer_does_not_wait_for_another():
    """Accelerate leaves a scheduler's step out where its own optimizer's was left out."""
    accelerator = make_accelerator({}, mixed_precision="fp16")
    torch.manual_seed(1)
    generator, critic = Generator(), Discriminator()
    of_generator, of_critic = adamw(generator), adamw(critic)
    schedules = warm(of_generator), warm(of_critic)
    generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, of_generator, of_critic)
    schedules = accelerator.prepare(*schedules)
    x = torch.ones(2, 16, device=accelerator.device)
    accelerator.backward(generator(x).mean())
    of_generator.step()
    schedules[0].step()
    accelerator.backward(critic(x).mean() * float("inf"))
    with pytest.warns(LightningCXLWarning, match="left out"):
        of_critic.step()
    schedules[1].step()
    assert (of_generator.step_was_skipped, of_critic.step_was_skipped) == (False, True)
    accelerator.backward(generator(x).mean())
    of_generator.step()
    schedules[0].step()
    assert schedules[0].scheduler.last_epoch == 2 and schedules[1].scheduler.last_epoch == 0
    accelerator.free_memory()


def test_prepare_again_after_an_optimizer_was_refused():
    accelerator = make_accelerator({})
    torch.manual_seed(5)
    model = TinyTransformer()
    with pytest.raises(UnsupportedError, match="amsgrad"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters(), amsgrad=True))
    optimizer = adamw(model)
    ours = plain_steps(accelerator, *accelerator.prepare(model, optimizer, token_data(2)))
    accelerator.free_memory()
    assert_close(plain_steps(make_accelerator(), *make_accelerator().prepare(*made(), token_data(2))), ours)
