"""Weights that are written through ``.data``, which torch does not count: no copy on the device survives a look."""

import contextlib
import signal
from concurrent.futures import Future

import pytest
import torch

from lightning_cxl.errors import UnsupportedError
from tests.apart.test_fork import in_child
from tests.unit.streaming.test_params import Streamed, batch, descend, make


def in_place(model, sign):
    """As peft merges an adapter."""
    for block in model.blocks:
        block.up.weight.data += sign * 0.25


def to_other_memory(model, sign):
    """As peft merges an adapter with ``safe_merge=True``."""
    for block in model.blocks:
        block.up.weight.data = block.up.weight.data + sign * 0.25


def run(model, write, finish=lambda: None):
    """Two micro-batches a step; writes before an evaluation, and undoes it, after every backward."""
    losses = []
    for step in range(6):
        loss = model(batch(step, model.first))
        loss.backward()
        finish()
        write(model, 1)
        with torch.no_grad():
            losses += [loss.item(), model(batch(100, model.first)).item()]
        write(model, -1)
        if step % 2:
            descend(model)
    return losses


@pytest.mark.parametrize("num_slots", [2, 9])
@pytest.mark.parametrize("write", [in_place, to_other_memory])
def test_writes_that_torch_does_not_count_are_seen(engine, write, num_slots):
    ours, theirs = make(), make().to(engine.device)
    streamed = Streamed(engine, ours, num_slots)
    assert run(ours, write, streamed.finish) == run(theirs, write)
    streamed.close()
    assert all(
        torch.equal(mine.cpu(), other.cpu()) for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def scale(model, factor):
    for block in model.blocks:
        block.up.weight.data.mul_(factor)


def test_a_write_comes_after_what_the_device_has_still_to_compute(engine):
    """The host is ahead: it writes right after a forward, and right after a backward."""
    model = make()
    streamed = Streamed(engine, model)
    with torch.no_grad():
        expected = [model(batch(step, model.first)).item() for step in range(3)]
        for step in range(3):
            found = model(batch(step, model.first))
            scale(model, 2.0)
            assert found.item() == expected[step]
            scale(model, 0.5)
    grads = []
    for factor in (1.0, 2.0):
        grads += torch.autograd.grad(model(batch(0, model.first)), model.first.weight)
        streamed.streamer.release()
        scale(model, factor)
    assert torch.equal(*grads)
    streamed.close()


def test_nothing_is_fetched_while_someone_may_write(engine):
    """The worker fetches when an update is done, perhaps between a look and the write that it is for."""
    model = make()
    streamed = Streamed(engine, model)
    x = batch(0, model.first)
    with torch.no_grad():
        model(x), model(x)
        weight = model.blocks[0].up.weight.data
        streamed.streamer.fetch_ahead()
        weight.mul_(2.0)
        found = model(x)
        streamed.close()
        assert torch.equal(found, model.to(x.device)(x))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_an_update_that_never_ends_there(engine):
    model = make()
    streamed = Streamed(engine, model)
    update = Future()
    streamed.units[1].begin_update(update)

    def look(block):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        with contextlib.suppress(UnsupportedError):
            block.up.weight.tolist()
        return block.up.weight.tolist()  # the second look, too

    found = in_child(lambda: look(model.blocks[1]))
    assert "UnsupportedError: this process was forked" in found
    assert in_child(lambda: look(model.blocks[2])) == ""
    update.set_result(None)
    streamed.close()
