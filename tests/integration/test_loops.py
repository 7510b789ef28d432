"""Loops of the user's own, against plain Accelerate: a step, between steps, once more, without a close."""

import copy
import gc
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.checkpoint import entry_of
from tests import training_device
from tests.cases import every_value
from tests.integration import accelerate_loop
from tests.integration.accelerate_loop import (
    adamw,
    assert_close,
    assert_identical,
    loss_of,
    make_accelerator,
    steps,
    warm,
    weights_of,
)
from tests.models import TinyTransformer, token_data

STREAMED = {"stream_weights": True, "cpu_adam": False}
OVERLAPPED = {"stream_weights": True, "overlap_step": True}
OPTIONS = [STREAMED, OVERLAPPED]


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


def without_dropout(depth=3):
    return TinyTransformer(depth=depth, dropout=0.0)


def made(depth=3):
    return accelerate_loop.made(partial(without_dropout, depth))


def training(step, depth=3, num_batches=4):
    """Return a run for `compare` that makes these steps: `step` gets all there is and returns a loss."""

    def run(accelerator):
        model, optimizer, data = accelerator.prepare(*made(depth), token_data(num_batches))
        losses = [step(accelerator, model, optimizer, batch, at).item() for at, batch in enumerate(data)]
        return losses, weights_of(accelerator, model)

    return run


def one_step(accelerator, model, optimizer, batch, at=0, *, backward=None, **zero):
    """A step; `backward` takes the accelerator and the loss."""
    loss = loss_of(model, batch)
    (backward or (lambda accelerator, loss: accelerator.backward(loss)))(accelerator, loss)
    optimizer.step()
    optimizer.zero_grad(**zero)
    return loss


def batches():
    return [tuple(part.to(training_device.current) for part in batch) for batch in token_data(4)]


# -- a step ------------------------------------------------------------------------------------------------------------


def plain_backward(*parts):
    return one_step(*parts, backward=lambda accelerator, loss: loss.backward())


def the_same_graph_twice(*parts):
    def twice(accelerator, loss):
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss * 0.5)

    return one_step(*parts, backward=twice)


def penalty_on_gradients(accelerator, model, optimizer, batch, at):
    """Of the embedded tokens, as a part of the graph."""
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


def gradients_that_are_zeroed(*parts):
    return one_step(*parts, set_to_none=False)


def gradients_of_a_part_dropped(accelerator, model, *rest):
    def dropped(accelerator, loss):
        accelerator.backward(loss)
        model.blocks[0].zero_grad()

    return one_step(accelerator, model, *rest, backward=dropped)


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


def accumulated_by_hand(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    if at % 2:
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return loss


STEPS = [
    an_error_in_the_backward,
    plain_backward,
    the_same_graph_twice,
    penalty_on_gradients,
    an_error_in_the_forward,
    gradients_that_are_zeroed,
    gradients_of_a_part_dropped,
    gradients_that_are_kept,
    a_block_that_is_frozen_for_a_while,
]


@pytest.mark.parametrize("step", STEPS)
def test_a_step(step):
    compare(training(step))


def test_a_loss_scaler_and_accumulation_by_hand():
    compare(training(accumulated_by_hand, num_batches=6), mixed_precision="fp16")


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_with_a_graph_that_leaves_its_parameter_is_refused(options):
    """Whoever adds its norm to the loss would get a loss without it."""
    accelerator = make_accelerator(options)
    model, _ = accelerator.prepare(*made(6))
    with pytest.raises(UnsupportedError, match=r"a gradient that is part of a graph .*torch.autograd.grad"):
        loss_of(model, batches()[0]).backward(create_graph=True)


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


@pytest.mark.parametrize(("is_seen", "keeps"), every_value([False, True], [True, False]))
def test_weights_changed_between_evaluations(is_seen, keeps):
    """As where an average of weights takes their place for an evaluation; the loop may keep a list of them."""

    def run(accelerator):
        torch.manual_seed(5)
        model = without_dropout().requires_grad_(False).eval()
        held = list(model.parameters())
        model = accelerator.prepare(model)
        losses = []
        for batch in batches()[:3]:
            losses.append(loss_of(model, batch).item())
            for parameter in held if keeps else model.parameters():
                (parameter if is_seen else parameter.data).mul_(0.9)
        return losses, weights_of(accelerator, model)

    compare(run)


behind = pytest.mark.skipif(training_device.chosen.type == "cpu", reason="no update runs behind")


@behind
@pytest.mark.usefixtures("late_copies")
def test_a_loop_waits_for_no_update_before_the_next_forward(gate):
    accelerator = make_accelerator(OVERLAPPED)
    model, optimizer = made()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, LinearLR(optimizer, total_iters=3))
    accelerator.backward(loss_of(model, batches()[0]))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    begun = []

    def opens(*_):
        gate.open_when_one_waits()
        begun.append(gate.num_waiting)

    model.embed.register_forward_pre_hook(opens)
    model(batches()[0][0])
    assert len(begun) == 1 and begun[0] >= 1, "the forward began while the first update waited"


@behind
@pytest.mark.usefixtures("slow_updates", "late_copies")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_while_updates_run(set_to_none):
    def run(options):
        accelerator = make_accelerator(options)
        model, optimizer = accelerator.prepare(*made())
        losses = []
        for batch in batches():
            losses.append(one_step(accelerator, model, optimizer, batch, set_to_none=set_to_none).item())
            held = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert all(grad is None if set_to_none else grad is None or not grad.any() for grad in held)
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
        model, optimizer = accelerator.prepare(*made())
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
    model, optimizer = accelerator.prepare(*made())
    accelerator.backward(loss_of(model, batches()[0]))
    optimizer.step()
    units = accelerator.offload.session.runs[0]._streamer._units
    assert any(unit.is_updating() for unit in units)
    found = []

    def noting(*args):
        found.append([unit.is_updating() for unit in units])
        return entry_of(*args)

    monkeypatch.setattr("lightning_cxl.run.user_loop.entry_of", noting)
    optimizer.state_dict()
    assert found == [[False] * 3]


# -- prepared again, and not closed ------------------------------------------------------------------------------------


def test_a_second_training_beside_the_first():
    """As where the cell of a notebook runs again."""

    def run(accelerator):
        results = [training(one_step)(accelerator) for _ in range(2)]
        return [*results[0][0], *results[1][0]], results[1][1]

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
    one_step(accelerator, model, optimizer, batches()[0])
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


def test_a_training_without_us_is_said():
    accelerator = make_accelerator({"stream_weights": False})
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="no model has been prepared"):
        accelerator.backward(model(torch.ones(2, 4)).sum())
    model.zero_grad()
    accelerator.prepare(model)
    with pytest.warns(LightningCXLWarning, match="Linear gets gradients and was prepared without an optimizer"):
        accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["the model", "a module around it"])
def test_a_new_training_ends_the_one_that_had_the_model(wrap, caplog):
    def train(accelerator, model):
        optimizer = adamw(model)
        list(steps(accelerator, *accelerator.prepare(model, optimizer, token_data(2), warm(optimizer))))

    held = training_device.held()
    ours = without_dropout()
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
