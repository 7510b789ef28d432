"""Accelerate, and loops of the user's own: a step, between steps, once more, without a close."""

import copy
import gc
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import lightning_cxl
from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.checkpoint import entry_of
from tests import training_device
from tests.cases import every_value
from tests.integration.accelerate_loop import (
    EXACT,
    PLAIN,
    adamw,
    assert_close,
    assert_identical,
    loss_of,
    made,
    make_accelerator,
    prepared,
    steps,
    trained,
    warm,
    weights_of,
)
from tests.models import TinyTransformer, no_dropout, token_data

# torch's compiler looks for gradients of what units are called with
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
STREAMED = {"stream_weights": True, **EXACT}
OVERLAPPED = {"stream_weights": True, "overlap_step": True}
OPTIONS = [STREAMED, OVERLAPPED]


def compare(run, *options, **arguments):
    """Run with theirs, and with ours with each of these options, `OPTIONS` if none; `run` returns (losses, weights)."""
    plain = run(make_accelerator(**arguments))
    for each in options or OPTIONS:
        accelerator = make_accelerator(each, **arguments)
        try:
            ours = run(accelerator)
        finally:
            accelerator.free_memory()
        (assert_identical if EXACT.items() <= each.items() else assert_close)(plain, ours)
    return accelerator


@pytest.mark.parametrize("order", ["optimizer first", "one by one"])
def test_objects_prepared_apart(order):
    def run(accelerator):
        model, optimizer = made()
        if order == "optimizer first":
            optimizer, model = accelerator.prepare(optimizer, model)
        else:
            model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
        return trained(accelerator, model, optimizer, accelerator.prepare(token_data(4)))

    compare(run, STREAMED)


@pytest.mark.parametrize(
    ("when", "is_prepared", "options"), every_value(["before", "after"], [True, False], OPTIONS), ids=str
)
def test_a_scheduler(when, is_prepared, options):
    def run(accelerator):
        model, optimizer = made()
        scheduler = warm(optimizer) if when == "before" else None
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(3))
        if when == "after":
            scheduler = warm(optimizer)
        if is_prepared:
            scheduler = accelerator.prepare(scheduler)
        losses, _ = trained(accelerator, model, optimizer, data, scheduler)
        rates = [optimizer.param_groups[0]["lr"]]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # makes new groups
        more, weights = trained(accelerator, model, optimizer, data, scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) == 2
        return losses + more + rates, weights

    compare(run, options)


class Blocks(nn.Module):
    """A generator, or with a head a discriminator."""

    def __init__(self, depth, head=None):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth))
        self.head = head

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def test_weights_that_your_code_holds_are_not_overwritten():
    """An average is put in the place of ``p.data`` for an evaluation, and the tensors of before are put back."""
    accelerator = make_accelerator(STREAMED)
    model, optimizer, data = accelerator.prepare(*narrow(5), token_data(4))
    with pytest.raises(UnsupportedError, match="while your code holds"):
        for batch in data:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            backup = {name: p.data for name, p in model.named_parameters()}
            for _, p in model.named_parameters():
                p.data = (0.5 * p.data).clone()
            with torch.no_grad():
                loss_of(model, batch)
            for name, p in model.named_parameters():
                p.data = backup[name]


def adversaries():
    torch.manual_seed(1)
    generator, critic = Blocks(2), Blocks(3, nn.Linear(16, 1))
    return generator, critic, adamw(generator), adamw(critic)


def test_a_generator_against_a_discriminator():
    """Prepared apart; together: in the test of schedules."""

    def run(accelerator):
        generator, critic, of_generator, of_critic = adversaries()
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

    accelerator = compare(run, STREAMED)
    assert len(accelerator.report()["optimizers"]) == 2


def test_what_is_clipped():
    """Lists, generators, one weight alone and one that is given twice."""

    def run(accelerator):
        model, optimizer, data = accelerator.prepare(*made(), token_data(3))
        torch.manual_seed(6)
        of_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
        found = [1.0]
        for batch, at_once in zip(data, (of_optimizer, model.parameters(), 2 * [model.head.weight]), strict=True):
            accelerator.backward(loss_of(model, batch))
            found.append(accelerator.clip_grad_norm_(at_once, 0.3, norm_type=1).item())
            accelerator.clip_grad_value_((p for p in model.parameters() if p.dim() > 1), 0.002)
            accelerator.clip_grad_value_(model.norm.weight, 0.001)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss_of(model, batch).item())
        return found, weights_of(accelerator, model)

    compare(run, STREAMED)


def test_the_schedule_of_one_optimizer_does_not_wait_for_another():
    """Accelerate leaves a scheduler's step out where its own optimizer's was left out."""
    accelerator = make_accelerator({}, mixed_precision="fp16")
    generator, critic, of_generator, of_critic = adversaries()
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


def one_optimizer_of_two_models(accelerator):
    generator, critic, *_ = adversaries()
    accelerator.prepare(generator, critic, torch.optim.AdamW([*generator.parameters(), *critic.parameters()]))


def a_new_one_for_a_model_in_training(accelerator):
    model, _ = accelerator.prepare(*narrow())
    accelerator.prepare(model, adamw(model))


def a_part_of_a_model(accelerator):
    """Both would move it and receive its gradients."""
    _, critic, _, of_critic = adversaries()
    accelerator.prepare(critic, of_critic)
    accelerator.prepare(critic.blocks)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("prepare", "options", "text"),
    [
        (one_optimizer_of_two_models, {}, "must become one for each model"),
        (lambda accelerator: accelerator.prepare(made()[1]), {}, "the model of this AdamW was not prepared"),
        (a_new_one_for_a_model_in_training, STREAMED, "end that training first"),
        (a_part_of_a_model, STREAMED, r"shares 6 parameters, such as `\S+`, with Blocks"),
    ],
)
def test_models_and_optimizers_that_are_refused(prepare, options, text):
    accelerator = make_accelerator(options)
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        prepare(accelerator)
    accelerator.free_memory()


def test_loaded_state_lies_on_its_tier(tmp_path):
    """Torch's own optimizers make new tensors when they load."""
    accelerator = make_accelerator(STREAMED)
    list(steps(accelerator, *prepared(accelerator, data=lambda: token_data(1))))
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator = make_accelerator(STREAMED)
    _, optimizer, *_ = prepared(accelerator)
    accelerator.load_state(str(tmp_path))
    averages = [state["exp_avg"] for state in optimizer.state.values()]
    assert sum(average.nbytes for average in averages) > 0
    assert all(lightning_cxl.residency(average) == {"dram": average.nbytes} for average in averages)
    assert sum(accelerator.report()["roles"]["momentum"].values()) > 0


def test_a_file_of_options_that_is_no_good(tmp_path):
    path = tmp_path / "options.yaml"
    for text, message in {"- a list": "must map names of options", "tiers: {": "cannot read the options"}.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            make_accelerator(path)


@pytest.mark.parametrize(
    ("is_dropped", "options"), [(True, {}), (False, {"stream_weights": True}), (False, {"master": "fp32"})], ids=str
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


def narrow(depth=3):
    return made(partial(TinyTransformer, depth=depth, dropout=0.0))


def one_step(accelerator, model, optimizer, batch, *, backward=None, zero=None):
    """A step; `backward` takes the accelerator and the loss, `zero` model and optimizer."""
    loss = loss_of(model, batch)
    (backward or (lambda accelerator, loss: accelerator.backward(loss)))(accelerator, loss)
    optimizer.step()
    (zero or (lambda model, optimizer: optimizer.zero_grad()))(model, optimizer)
    return loss


def batches():
    return [tuple(part.to(training_device.current) for part in batch) for batch in token_data(4)]


def an_error_in_the_backward(accelerator, model, optimizer, batch, *, direct=False):
    """As where the user catches that memory of the device is full, and takes the batch again."""
    hook = model.blocks[1].out.weight.register_hook(lambda _: 1 / 0)
    loss = loss_of(model, batch)
    with pytest.raises(ZeroDivisionError):
        loss.backward() if direct else accelerator.backward(loss)
    hook.remove()
    optimizer.zero_grad()
    return one_step(accelerator, model, optimizer, batch)


def gradients_of_a_part_dropped(accelerator, model, *rest):
    def dropped(accelerator, loss):
        accelerator.backward(loss)
        model.blocks[0].zero_grad()

    return one_step(accelerator, model, *rest, backward=dropped)


def gradients_that_are_kept(accelerator, model, optimizer, batch):
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


def a_block_that_is_frozen_for_a_while(accelerator, model, *rest):
    model.blocks[0].requires_grad_(False)
    loss = one_step(accelerator, model, *rest)
    model.blocks[0].requires_grad_(True)
    return loss


STEPS = [
    one_step,
    an_error_in_the_backward,
    partial(an_error_in_the_backward, direct=True),
    partial(one_step, backward=lambda accelerator, loss: loss.backward()),
    partial(one_step, zero=lambda model, optimizer: optimizer.zero_grad(set_to_none=False)),
    partial(one_step, zero=lambda model, optimizer: model.zero_grad()),
    gradients_of_a_part_dropped,
    gradients_that_are_kept,
    a_block_that_is_frozen_for_a_while,
    one_step,
]


def test_steps_of_every_kind_follow_each_other():
    def run(accelerator):
        model, optimizer, data = accelerator.prepare(*narrow(), token_data(len(STEPS)))
        losses = [step(accelerator, model, optimizer, batch).item() for step, batch in zip(STEPS, data, strict=True)]
        return losses, weights_of(accelerator, model)

    compare(run)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_with_a_graph_that_leaves_its_parameter_is_refused(options):
    """Whoever adds its norm to the loss would get a loss without it."""
    accelerator = make_accelerator(options)
    model, _ = accelerator.prepare(*narrow(6))
    with pytest.raises(UnsupportedError, match=r"a gradient that is part of a graph .*torch.autograd.grad"):
        loss_of(model, batches()[0]).backward(create_graph=True)


behind = pytest.mark.skipif(training_device.chosen.type == "cpu", reason="no update runs behind")


CLEARS = [
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: optimizer.zero_grad(),
]


@behind
@pytest.mark.usefixtures("slow_updates", "late_copies")
def test_gradients_that_are_cleared_while_updates_run():
    def run(options):
        accelerator = make_accelerator(options)
        model, optimizer = accelerator.prepare(*narrow())
        losses = []
        for clear, batch in zip(CLEARS, batches(), strict=True):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            clear(model, optimizer)
            losses.append(loss.item())
            held = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert all(grad is None or (clear is not CLEARS[-1] and not grad.any()) for grad in held)
        accelerator.free_memory()
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_identical(run({**OVERLAPPED, "overlap_step": False}), run(OVERLAPPED))


@behind
@pytest.mark.usefixtures("late_copies")
def test_gradients_on_their_way_are_cleared_too():
    """Nobody has said that they are read between micro-batches, so they may be on their way."""
    training_device.make_late("to the host, much")

    def run(discards):
        accelerator = make_accelerator({"stream_weights": True})
        accelerator.offload.loop = Loop(accumulates=True, reads_gradients=False, edits_gradients=False)
        model, optimizer = accelerator.prepare(*narrow())
        first, second, *_ = batches()
        if discards:
            accelerator.gradient_state._set_sync_gradients(False)
            accelerator.backward(loss_of(model, first))
            accelerator.gradient_state._set_sync_gradients(True)
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, second))
        optimizer.step()
        accelerator.free_memory()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(discards=False), run(discards=True)))


@behind
@pytest.mark.usefixtures("slow_updates", "late_copies")
def test_a_file_is_made_when_updates_are_done(monkeypatch):
    accelerator = make_accelerator(OVERLAPPED)
    model, optimizer = accelerator.prepare(*narrow())
    accelerator.backward(loss_of(model, batches()[0]))
    optimizer.step()
    units, found = accelerator.offload.session.runs[0]._streamer._units, []
    assert any(unit.is_updating() for unit in units)

    def noting(*args):
        found.extend(unit.is_updating() for unit in units)
        return entry_of(*args)

    monkeypatch.setattr("lightning_cxl.run.user_loop.entry_of", noting)
    optimizer.state_dict()
    assert found == [False] * 3


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["the model", "a module around it"])
def test_a_new_training_ends_the_one_that_had_the_model(wrap, caplog):
    def train(accelerator, model):
        optimizer = adamw(model)
        list(steps(accelerator, *accelerator.prepare(model, optimizer, token_data(2), warm(optimizer))))

    held, ours = training_device.held(), no_dropout()
    plain = copy.deepcopy(ours)
    first, second = make_accelerator(STREAMED), make_accelerator(STREAMED)
    train(first, ours)
    with caplog.at_level("INFO"):
        assert second.prepare(ours) is ours, "it may compute there"
        assert not caplog.records
        train(second, wrap(ours))
    assert "the training that TinyTransformer was part of has ended" in caplog.text
    with pytest.raises(ConfigError, match="no model has been prepared"):
        first.backward(torch.ones(1, requires_grad=True).sum())
    second.free_memory()
    for _ in range(2):
        train(make_accelerator(), plain)
    assert all(map(torch.equal, ours.cpu().parameters(), plain.cpu().parameters()))
    del first, second, ours
    gc.collect()
    assert all(nbytes <= held[where] for where, nbytes in training_device.held().items())


UNCLOSED = """
import os, sys
import torch
from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.run.user_loop import UserLoop
ssd = {"tiers": {"ssd": {"path": sys.argv[1], "budget": "64MiB"}}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}
accelerator = CXLAccelerator(offload=ssd)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
if os.fork() == 0:
    UserLoop.close = lambda loop: os._exit(3)  # it would wait for threads of its parent
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.on_cpu
def test_a_program_and_its_forked_child_end_without_close(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"] and not done.stderr
