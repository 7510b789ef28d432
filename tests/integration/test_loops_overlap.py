"""Loops of the user's own: updates run behind the next forward, with the calls that loops make between steps."""

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR

from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.checkpoint import entry_of
from tests import training_device
from tests.integration.accelerate_loop import adamw, loss_of, make_accelerator
from tests.integration.gate import Gate
from tests.models import TinyTransformer, token_data

pytestmark = [
    pytest.mark.usefixtures("late_copies"),
    pytest.mark.skipif(training_device.chosen.type == "cpu", reason="no update runs behind"),
]
STREAMED = {"stream_weights": True}
OVERLAPPED = {**STREAMED, "overlap_step": True}


def batches():
    return [tuple(part.to(training_device.current) for part in batch) for batch in token_data(4)]


def made():
    torch.manual_seed(5)
    model = TinyTransformer(dropout=0.0)
    return model, adamw(model)


def prepared(options):
    accelerator = make_accelerator(options)
    model, optimizer = made()
    return accelerator, *accelerator.prepare(model, optimizer, LinearLR(optimizer, total_iters=3))


def test_a_loop_waits_for_no_update_before_the_next_forward(monkeypatch):
    gate = Gate(monkeypatch)
    accelerator, model, optimizer, scheduler = prepared(OVERLAPPED)
    tokens, _ = batches()[0]
    accelerator.backward(loss_of(model, batches()[0]))
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    begun = []

    def opens(*_):
        gate.open_when_one_waits()
        begun.append(gate.num_waiting)

    model.embed.register_forward_hook(opens)
    model(tokens)
    assert len(begun) == 1 and begun[0] >= 1, "the forward began while the first update waited"
    accelerator.free_memory()


@pytest.mark.usefixtures("slow_updates")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_cleared_while_updates_run(set_to_none):
    def run(options):
        accelerator, model, optimizer, scheduler = prepared(options)
        losses = []
        for batch in batches():
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            held = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert all(grad is None if set_to_none else grad is None or not grad.any() for grad in held)
            losses.append(loss.item())
        accelerator.free_memory()
        return losses, [p.detach().clone() for p in model.parameters()]

    losses, weights = run({**STREAMED, "overlap_step": False})
    again = run(OVERLAPPED)
    assert again[0] == losses
    assert all(map(torch.equal, again[1], weights))


def test_gradients_on_their_way_are_cleared_too():
    """Nobody has said that they are read between micro-batches, so they may be on their way."""
    training_device.make_late("to the host, much")

    def run(discards):
        accelerator = make_accelerator(STREAMED)
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


@pytest.mark.usefixtures("slow_updates")
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
    accelerator.free_memory()
