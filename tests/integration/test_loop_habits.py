"""What loops do around a step, against plain Accelerate: weights and gradients by hand, evaluation, cells run again."""

import pytest
import torch
from torch import nn

from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from tests import training_device
from tests.cases import every_value
from tests.integration.accelerate_loop import (
    adamw,
    assert_close,
    assert_identical,
    loss_of,
    make_accelerator,
    warm,
    weights_of,
)
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True, "cpu_adam": False}
OPTIONS = [STREAMED, {"stream_weights": True, "overlap_step": True}]


def compare(run, **arguments):
    """Run with theirs, and with ours in each of `OPTIONS`; `run` returns (losses, weights)."""
    plain = run(make_accelerator(**arguments))
    for options in OPTIONS:
        accelerator = make_accelerator(options, **arguments)
        try:
            ours = run(accelerator)
        finally:
            accelerator.free_memory()
        (assert_identical if options is STREAMED else assert_close)(plain, ours)


def without_dropout():
    return TinyTransformer(dropout=0.0)


def training(step, make_model=without_dropout, num_batches=4):
    """Return a run for `compare` that makes these steps: `step` gets all there is and returns a loss."""

    def run(accelerator):
        torch.manual_seed(5)
        model = make_model()
        model, optimizer, data = accelerator.prepare(model, adamw(model), token_data(num_batches))
        losses = [step(accelerator, model, optimizer, batch, at).item() for at, batch in enumerate(data)]
        return losses, weights_of(accelerator, model)

    return run


def one_step(accelerator, model, optimizer, batch, at=0):
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def on_device(batch):
    return tuple(part.to(training_device.current) for part in batch)


# -- a step ------------------------------------------------------------------------------------------------------------


def plain_backward(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def the_same_graph_twice(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(loss * 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def two_losses(accelerator, model, optimizer, batch, at):
    first, second = loss_of(model, batch), loss_of(model, batch).square()
    accelerator.backward(first)
    accelerator.backward(second)
    optimizer.step()
    optimizer.zero_grad()
    return first + second


def penalty_on_gradients(accelerator, model, optimizer, batch, at):
    embedded = []
    hook = model.embed.register_forward_hook(lambda *args: embedded.append(args[-1]))
    loss = loss_of(model, batch)
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, embedded[0], create_graph=True)
    loss = loss + gradient.square().sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def an_error_in_the_forward(accelerator, model, optimizer, batch, at):
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch[0])
    hook.remove()
    return one_step(accelerator, model, optimizer, batch)


def an_error_in_the_backward(accelerator, model, optimizer, batch, at):
    hook = model.blocks[1].out.weight.register_hook(lambda _: 1 / 0)
    loss = loss_of(model, batch)
    with pytest.raises(ZeroDivisionError):
        accelerator.backward(loss)
    hook.remove()
    optimizer.zero_grad()
    return one_step(accelerator, model, optimizer, batch)


def gradients_that_are_zeroed(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def gradients_of_a_part_dropped(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    model.blocks[0].zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gradients_that_are_kept(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before = [grad.clone() for grad in held]
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.zero_grad()
    assert len(held) > 30 and all(map(torch.equal, held, before))
    return loss


def a_block_that_is_frozen_for_a_while(accelerator, model, optimizer, batch, at):
    model.blocks[0].requires_grad_(at not in (1, 2))
    return one_step(accelerator, model, optimizer, batch)


STEPS = [
    plain_backward,
    the_same_graph_twice,
    two_losses,
    penalty_on_gradients,
    an_error_in_the_forward,
    an_error_in_the_backward,
    gradients_that_are_zeroed,
    gradients_of_a_part_dropped,
    gradients_that_are_kept,
    a_block_that_is_frozen_for_a_while,
]


@pytest.mark.parametrize("step", STEPS)
def test_a_step(step):
    compare(training(step))


def accumulated_penalties(accelerator, model, optimizer, batch, at):
    for scale in (1.0, 0.5):
        embedded = []
        hook = model.embed.register_forward_hook(lambda *args, to=embedded: to.append(args[-1]))
        loss = loss_of(model, batch) * scale
        hook.remove()
        (gradient,) = torch.autograd.grad(loss, embedded[0], create_graph=True)
        accelerator.backward(loss + (gradient.norm() - 1).square())
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(
    ("step", "arguments"), [(penalty_on_gradients, {"mixed_precision": "bf16"}), (accumulated_penalties, {})]
)
def test_penalties_on_gradients_with_more_blocks_than_slots(step, arguments):
    compare(training(step, lambda: TinyTransformer(depth=6, dropout=0.0)), **arguments)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_with_a_graph_that_leaves_its_parameter_is_refused(options):
    """Whoever adds its norm to the loss would get a loss without it."""
    accelerator = make_accelerator(options)
    model = TinyTransformer(depth=6, dropout=0.0)
    model, _, data = accelerator.prepare(model, adamw(model), token_data(1))
    with pytest.raises(UnsupportedError, match=r"a gradient that is part of a graph .*torch.autograd.grad"):
        loss_of(model, next(iter(data))).backward(create_graph=True)
    accelerator.free_memory()


def test_a_loss_scaler_and_accumulation_by_hand():
    def step(accelerator, model, optimizer, batch, at):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        if at % 2:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    compare(training(step, num_batches=6), mixed_precision="fp16")


def test_two_optimizers_that_step_at_different_times():
    def run(accelerator):
        torch.manual_seed(5)
        model = without_dropout()
        rest = [*model.embed.parameters(), *model.norm.parameters(), *model.head.parameters()]
        optimizers = torch.optim.AdamW(model.blocks.parameters(), lr=1e-3), torch.optim.AdamW(rest, lr=2e-3)
        model, *optimizers, data = accelerator.prepare(model, *optimizers, token_data(6))
        losses = []
        for at, batch in enumerate(data):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            for optimizer, period in zip(optimizers, (2, 1), strict=True):
                if at % period == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
        return losses, weights_of(accelerator, model)

    compare(run)


# -- between steps -----------------------------------------------------------------------------------------------------


def smaller(parameters):
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.9)


def smaller_unseen(parameters):
    for parameter in parameters:
        parameter.data.mul_(0.9)


@pytest.mark.parametrize(("change", "keeps"), every_value([smaller_unseen, smaller], [True, False]))
def test_weights_changed_between_evaluations(change, keeps):
    """As where an average of weights takes their place for an evaluation; the loop may keep a list of them."""

    def run(accelerator):
        torch.manual_seed(5)
        model = without_dropout().requires_grad_(False).eval()
        held = list(model.parameters())
        model = accelerator.prepare(model)
        losses = []
        for batch in map(on_device, token_data(3)):
            losses.append(loss_of(model, batch).item())
            change(held if keeps else model.parameters())
        return losses, weights_of(accelerator, model)

    compare(run)


# -- prepared again ----------------------------------------------------------------------------------------------------


def test_a_second_training_beside_the_first():
    """As where the cell of a notebook runs again."""

    def run(accelerator):
        results = [training(one_step)(accelerator) for _ in range(2)]
        return [*results[0][0], *results[1][0]], results[1][1]

    compare(run)


def test_what_prepare_has_returned_is_prepared_again():
    def run(accelerator):
        torch.manual_seed(5)
        model = without_dropout()
        optimizer = adamw(model)
        parts = accelerator.prepare(model, optimizer, token_data(2), warm(optimizer))
        losses = []
        for _ in range(2):
            losses += [one_step(accelerator, *parts[:2], batch).item() for batch in parts[2]]
            parts = accelerator.prepare(*parts)
        return losses, weights_of(accelerator, parts[0])

    compare(run)


def test_a_new_optimizer_for_a_model_that_is_trained_already():
    accelerator = make_accelerator(STREAMED)
    model = without_dropout()
    model, _ = accelerator.prepare(model, adamw(model))
    with pytest.raises(UnsupportedError, match="end that training first"):
        accelerator.prepare(model, adamw(model))
    accelerator.free_memory()
    model, optimizer = accelerator.prepare(model, adamw(model))
    before = model.head.weight.cpu().clone()
    one_step(accelerator, model, optimizer, on_device(next(iter(token_data(1)))))
    accelerator.free_memory()
    assert not torch.equal(before, model.head.weight)


class Headed(nn.Module):
    """A trunk that others may have, too, and a head of its own."""

    def __init__(self, trunk):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(16, 2)


@pytest.mark.parametrize(("kind", "options"), [("a part", STREAMED), ("a sibling", {"stream_weights": False})], ids=str)
def test_models_that_share_parameters_are_refused(kind, options):
    """Each would move them and receive their gradients."""
    accelerator = make_accelerator(options)
    trunk = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)])
    actor = Headed(trunk)
    accelerator.prepare(actor, adamw(actor))
    with pytest.raises(UnsupportedError, match=r"shares 6 parameters, such as `\S+`, with Headed"):
        accelerator.prepare(trunk if kind == "a part" else Headed(trunk))
    accelerator.free_memory()


def test_a_training_without_us_is_said():
    accelerator = make_accelerator({"stream_weights": False})
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="no model has been prepared"):
        accelerator.backward(model(torch.ones(2, 4)).sum())
    model.zero_grad()
    accelerator.prepare(model)
    with pytest.warns(LightningCXLWarning, match="Linear gets gradients and was prepared without an optimizer"):
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
    accelerator.free_memory()
