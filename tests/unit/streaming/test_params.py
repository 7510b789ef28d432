"""Streamed weights: the same results, few slots, and nothing stale or lost."""

import copy
import pickle
import threading
import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cxl.devices.transfer import FinishedTransfer, HostEngine
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.guard import GradientHooks
from lightning_cxl.memory.resource import Buffer, Span
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.unit_weights import InMemory, ParamStreamer, Slot, UnitWeights
from lightning_cxl.streaming.units import streamable
from tests import training_device
from tests.cases import every_value
from tests.fakes import RecyclingMemory

WIDTH = 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth=5):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x, order=None):
        x = self.first(x)
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        return self.last(x).square().mean()


class Held:
    """Keeps the memory of a buffer alive and recognisable."""

    def __init__(self, nbytes):
        pinned = training_device.current.type != "cpu"
        self.memory = torch.empty(nbytes + 64, dtype=torch.uint8, device="cpu", pin_memory=pinned)


def allocate(nbytes, parameters):
    held = Held(nbytes)
    start = held.memory.data_ptr()
    return InMemory(Buffer(start + -start % 64, nbytes, (Span("dram", 0, 0, nbytes),), None, held))


def make(depth=5):
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net(depth)


def rest_to(device, model):
    """Move what does not stream."""
    model.first.to(device)
    model.last.to(device)
    return model


def batch(step, like):
    """Eight rows of numbers, on the device of a module."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), device="cpu")
    return x.to(like.weight.device)


class HostGradients:
    """Gathers gradients on the host, where those of streamed weights belong."""

    def __init__(self, engine, parameters):
        self._engine = engine
        self._so_far, self._arrived = {}, []
        self._hooks = [
            GradientHooks(each, partial(self._receive, each), partial(self._take_away, each), stays=False)
            for each in parameters
        ]

    def _take_away(self, parameter):
        if parameter.grad is not None:
            self._so_far[parameter], parameter.grad = parameter.grad, None

    def _receive(self, parameter):
        grad, parameter.grad = parameter.grad, None
        landed = torch.empty(grad.shape, device="cpu", pin_memory=not self._engine.computes_on_host)
        self._arrived.append((parameter, landed, self._engine.d2h(grad, landed)))

    def settle(self):
        """Put them where they are looked for; to be called with all weights at home."""
        for parameter, landed, transfer in self._arrived:
            transfer.wait_host()
            before = self._so_far.get(parameter)
            self._so_far[parameter] = landed if before is None else before.add_(landed)
        for parameter, grad in self._so_far.items():
            parameter.grad = grad
        self._arrived.clear()
        self._so_far.clear()

    def close(self):
        for each in self._hooks:
            each.remove()


class Streamed:
    """A model, made on the host, whose blocks stream and are recomputed."""

    def __init__(self, engine, model, num_slots=3):
        self.model = rest_to(engine.device, model)
        named = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
        self.offload = ActivationOffload(engine, RecyclingMemory().allocate, min_bytes=1)
        self.units = [UnitWeights(name, module, [own], allocate) for name, module, own in streamable(model, named)]
        self.streamer = ParamStreamer(engine, self.units, lambda: self.offload.phase, num_slots=num_slots)
        self.streamer.attach()
        self.offload.attach(named)
        places = [place for unit in self.units for place in unit.places]
        self.gradients = HostGradients(engine, [place.parameter for place in places])

    def finish(self):
        """End a backward."""
        self.streamer.release()
        self.gradients.settle()

    def train(self, steps=3, lr=0.1, orders=(None,)):
        losses = []
        for step in range(steps):
            loss = self.model(batch(step, self.model.first), orders[step % len(orders)])
            loss.backward()
            self.finish()
            losses.append(loss.item())
            descend(self.model, lr)
        return losses

    def close(self):
        self.offload.detach()
        self.streamer.detach()
        self.gradients.close()


def descend(model, lr=0.1):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)
                parameter.grad = None


def plain(engine, model, steps=3, orders=(None,)):
    """Train without streaming, where the engine's device is."""
    model.to(engine.device)
    losses = []
    for step in range(steps):
        loss = model(batch(step, model.first), orders[step % len(orders)])
        loss.backward()
        losses.append(loss.item())
        descend(model)
    return losses


ORDERS = {"all": (None,), "some": ([0, 2, 4], [4, 3, 1, 0]), "twice": ([0, 1, 0, 1], None), "few": ([3], [2, 2])}


@pytest.mark.parametrize(("num_slots", "order"), every_value([2, 3, 7], ORDERS))
def test_losses_and_weights_are_those_of_the_plain_run(engine, num_slots, order):
    orders = ORDERS[order]
    ours, theirs = make(), make()
    streamed = Streamed(engine, ours, num_slots)
    assert streamed.train(5, orders=orders) == plain(engine, theirs, 5, orders)
    streamed.close()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu()), name


def test_outside_of_their_computation_parameters_show_the_host(engine):
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    strides = {name: p.stride() for name, p in model.named_parameters()}
    streamed = Streamed(engine, model)
    homes = {id(place.parameter): place.host.data_ptr() for unit in streamed.units for place in unit.places}
    assert len(homes) == 5 * 5
    assert all(
        offset % 256 == 0 for unit in streamed.units for place in unit.places for offset in place.offsets.values()
    )
    model(batch(0, model.first)).backward()
    streamed.finish()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), before[name]) and parameter.stride() == strides[name]
        assert parameter.data_ptr() == homes.get(id(parameter), parameter.data_ptr())
        assert parameter.data_ptr() % 64 == 0 or name.startswith(("first", "last"))
    streamed.close()


def test_slots_hold_as_much_as_the_ring_says_and_backward_reuses_the_last_ones(device_engine):
    streamed = Streamed(device_engine, make(6), num_slots=3)
    for _ in range(3):
        streamed.train(1)
    fetches = streamed.streamer.num_fetches
    late = streamed.streamer.num_late
    streamed.train(1)
    # 6 on the way there; on the way back 3 are still in their slots
    assert streamed.streamer.num_fetches - fetches <= 6 + 6 - 3 + 1
    assert streamed.streamer.num_late - late <= 1, "after the first step the next unit is known"
    streamed.close()


def test_between_steps_every_slot_is_filled_for_the_next_forward(engine):
    streamed = Streamed(engine, make(5), num_slots=3)
    streamed.train(2)
    for unit in streamed.units:  # as an update does, of whom nobody expects that they look around
        for place in unit.places:
            torch.autograd.graph.increment_version(place.parameter)
    fetches, late = streamed.streamer.num_fetches, streamed.streamer.num_late
    for unit in streamed.units:
        unit.end_access()
    streamed.streamer.fetch_ahead()
    assert streamed.streamer.num_fetches - fetches == 3
    streamed.train(1)
    assert streamed.streamer.num_late == late
    streamed.close()


class Marking(HostEngine):
    """Notes what it has marked, and what copies to the device are to wait for."""

    def __init__(self):
        self.marks, self.awaited = [], []

    def mark(self):
        self.marks.append(FinishedTransfer())
        return self.marks[-1]

    def h2d(self, source, destination, *, after=None):
        self.awaited.append(after)
        return super().h2d(source, destination, after=after)


def test_a_copy_into_a_slot_waits_for_kernels_that_read_it():
    """Seen in what the copy is given: whether a copy that does not wait comes too early depends on the load."""
    engine = Marking()
    streamed = Streamed(engine, make(2))
    slot = Slot(engine, max(unit.nbytes for unit in streamed.units))
    for unit in streamed.units:
        used = engine.marks[-1]
        engine.awaited.clear()
        slot.fetch(unit, unit.versions())
        assert engine.awaited and all(any(each is used for each in after) for after in engine.awaited)
        slot.exit()
        assert engine.marks[-1] is not used
    streamed.close()


def test_weights_that_changed_are_fetched_again(engine):
    model = make(1)
    streamed = Streamed(engine, model)
    x = batch(0, model.first)
    with torch.no_grad():
        first = model(x)
        fetches = streamed.streamer.num_fetches
        assert torch.equal(model(x), first) and streamed.streamer.num_fetches == fetches, "its slot is still good"
        model.blocks[0].up.weight.mul_(2)
        changed = model(x)
    assert streamed.streamer.num_fetches == fetches + 1
    streamed.close()
    with torch.no_grad():
        assert torch.equal(model.to(x.device)(x), changed) and not torch.equal(first, changed)


def test_a_unit_that_writes_to_its_weights_is_refused():
    model = make(2)
    streamed = Streamed(HostEngine(), model)

    def write(module, _):
        with torch.no_grad():
            module.up.weight.mul_(0.5)

    model.blocks[1].norm.register_forward_pre_hook(lambda *_: write(model.blocks[1], None))
    with pytest.raises(UnsupportedError, match=r"unit `blocks.1` wrote to its weights"):
        model(torch.randn(4, WIDTH))
    streamed.close()


def test_a_forward_that_keeps_views_of_the_slot_is_refused():
    model = make(2)
    streamed = Streamed(HostEngine(), model)
    streamed.offload.detach()
    with pytest.raises(UnsupportedError, match="differentiated without a recompute"):
        model(torch.randn(4, WIDTH))
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    streamed.close()


def test_an_exception_in_a_forward_brings_the_weights_home(engine):
    model = make(3)
    streamed = Streamed(engine, model)
    handle = model.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, WIDTH))
    for unit in streamed.units:
        assert all(place.parameter.data_ptr() == place.host.data_ptr() for place in unit.places)
    handle.remove()
    assert streamed.train(2) == plain(engine, make(3), 2)
    streamed.close()


def test_what_cannot_stream_stays():
    model = make(3)
    model.blocks[1].up.weight = model.blocks[0].up.weight  # tied across units
    base = torch.randn(2, WIDTH)
    model.blocks[2].norm.weight.data = base[0]  # two views of one storage
    model.blocks[2].norm.bias.data = base[1]
    named = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    chosen = {name: len(parameters) for name, _, parameters in streamable(model, named)}
    assert chosen == {"blocks.0": 4, "blocks.1": 4, "blocks.2": 3}
    theirs = copy.deepcopy(model)
    streamed = Streamed(HostEngine(), model)
    assert streamed.train(3) == plain(HostEngine(), theirs, 3)
    streamed.close()


class CountsCasts(TorchDispatchMode):
    """Counts how often each weight of a shape is cast."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.num_casts = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_casts += function is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return function(*args, **(kwargs or {}))


def test_no_cast_of_a_weight_outlives_the_forward_of_its_unit(engine):
    model = make(2)
    streamed = Streamed(engine, model)
    x = batch(0, model.first)
    with torch.autocast(engine.device.type, torch.bfloat16):
        first, weight = model(x), model.blocks[0].up.weight
        with CountsCasts(weight.shape) as casts:
            assert torch.equal(model(x), first)
        assert casts.num_casts == 2, "both units cast again: their casts have not piled up on the device"
        engine.synchronize()  # whoever holds a reference has to see to it that nothing is under way
        with torch.no_grad():
            weight.mul_(2)
        changed = model(x)
        changed.backward()
    streamed.finish()
    gradient, weight.grad = weight.grad, None
    with torch.autocast(engine.device.type, torch.bfloat16):
        again = model(x)
        again.backward()
    assert torch.equal(changed, again) and not torch.equal(first, again)
    streamed.finish()
    assert torch.equal(gradient, weight.grad)
    streamed.close()


class Compilable(Block):
    """What a compiler would find when it looks at the weights: whether they have gradients."""

    seen: ClassVar[list[bool]] = []  # of the class: a recompute takes back what it does to the module

    def forward(self, x):
        self.seen.extend(parameter.grad is not None for parameter in self.parameters())
        return super().forward(x)


def test_a_forward_does_not_see_gradients_that_are_on_another_device(engine):
    model = make(3)
    with torch.device("cpu"):
        model.blocks[1] = Compilable()
    streamed = Streamed(engine, model)
    streamed.model(batch(0, model.first)).backward()
    streamed.finish()
    before = [(each, each.grad, each.data_ptr()) for each in model.blocks[1].parameters()]
    Compilable.seen.clear()
    loss = model(batch(1, model.first))
    assert all(each.grad is grad and each.data_ptr() == home for each, grad, home in before)
    loss.backward()
    assert Compilable.seen == [False] * 2 * 5, "in the forward and in the recompute"
    streamed.finish()
    assert all(each.grad is grad and each.data_ptr() == home for each, grad, home in before)
    streamed.close()


def test_copies_of_the_model_run_on_their_own(engine):
    model = make(2)
    x = torch.randn(4, WIDTH, device="cpu")
    expected = model(x).item()
    streamed = Streamed(engine, model)
    twin, pickled = copy.deepcopy(model).cpu(), pickle.loads(pickle.dumps(model)).cpu()
    streamed.close()
    assert twin(x).item() == pickled(x).item() == expected


def test_slots_are_let_go_and_weights_stay(device_engine):
    model = make(3)
    streamed = Streamed(device_engine, model)
    streamed.train(2)
    x = batch(0, model.first)
    expected = model(x).item()
    slots = [weakref.ref(slot.memory) for slot in streamed.streamer._slots]
    streamed.close()
    device_engine.synchronize()  # holds what it copies into
    assert [slot() for slot in slots] == [None] * 3
    assert model.to(x.device)(x).item() == expected


def test_a_slot_that_is_filled_anew_at_once_is_no_sign_of_a_write(monkeypatch):
    """The worker fetches ahead whenever an update is done, also while another thread leaves a unit."""
    model = make(6)
    names = [(f"blocks.{index}", block) for index, block in enumerate(model.blocks)]
    units = [UnitWeights(name, module, [own], allocate) for name, module, own in streamable(model, names)]
    streamer = ParamStreamer(HostEngine(), units, lambda: None)
    streamer.attach()
    leave = UnitWeights.exit

    def leave_and_let_the_worker_fetch(unit):
        leave(unit)
        worker = threading.Thread(target=streamer.fetch_ahead)
        worker.start()
        worker.join()

    with torch.no_grad():
        for _ in range(2):
            expected = model(torch.ones(2, WIDTH))
        monkeypatch.setattr(UnitWeights, "exit", leave_and_let_the_worker_fetch)
        assert torch.equal(model(torch.ones(2, WIDTH)), expected)
    streamer.detach()


def penalty(streamed, x):
    """WGAN-GP, R1, forces: the loss has a gradient in it."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(streamed(x), x, create_graph=True)
    return slope.square().sum() * 10


def third_derivative(streamed, x):
    x.requires_grad_()
    (slope,) = torch.autograd.grad(streamed(x), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    return curve.square().sum() * 10


def gradients_of_weights(streamed, x):
    inner = torch.autograd.grad(streamed(x), list(streamed.parameters()), create_graph=True)
    return sum(each.square().sum() for each in inner)


SECOND_ORDER = [penalty, third_derivative, gradients_of_weights]


@pytest.mark.parametrize("loss_of", SECOND_ORDER, ids=lambda each: each.__name__)
def test_second_derivatives_with_more_units_than_slots(engine, loss_of):
    if loss_of is gradients_of_weights and not engine.computes_on_host:
        pytest.skip("`torch.autograd.grad` finds no parameter that is on another device than its gradient")
    losses, models = [], [make(6), make(6)]
    for model in models:
        streamed = Streamed(engine, model) if model is models[0] else None
        model.to(engine.device) if streamed is None else None
        so_far = []
        for step in range(3):
            loss = loss_of(model, batch(step, model.first))
            loss.backward()
            if streamed is not None:
                streamed.finish()
            so_far.append(loss.item())
            descend(model, 0.01)
        losses.append(so_far)
    assert losses[0] == losses[1]
    for (name, mine), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu()), name


class Pair(Block):
    """Two inputs that meet nowhere, so that each has a backward of its own."""

    def forward(self, pair):
        return [super(Pair, self).forward(x) for x in pair]


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="this torch has no such group")
def test_a_recompute_that_serves_several_backwards_has_weights_of_its_own(engine):
    """The second backward finds what the first one's recomputes have saved, and the slots filled again."""
    found = []
    for streams in (True, False):
        model = make(6)
        torch.manual_seed(1)
        with torch.device("cpu"):
            model.blocks = nn.ModuleList(Pair() for _ in range(6))
        streamed = Streamed(engine, model) if streams else model.to(engine.device)
        inputs = [batch(step, model.first).requires_grad_() for step in range(2)]
        hidden = [model.first(x) for x in inputs]
        for block in model.blocks:
            hidden = block(hidden)
        with torch.utils.checkpoint.GraphExecGroup():
            for each in hidden:
                model.last(each).square().mean().backward()
        if streams:
            streamed.finish()
        found.append([x.grad.cpu() for x in inputs])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


def test_a_graph_of_gradients_is_older_than_an_update(engine):
    model = make(6)
    streamed = Streamed(engine, model)
    x = batch(0, model.first).requires_grad_()
    loss = model(x)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    streamed.finish()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.add_(1.0)
    model(batch(1, model.first)).backward()
    streamed.finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        slope.square().sum().backward()
    streamed.finish()


def exchanged(model, x):
    """Other weights for one forward: of a hypernetwork, or of the inner loop of MAML."""
    torch.manual_seed(0)
    new = {
        name: (torch.randn(p.shape, device="cpu") * 0.1).to(x.device).requires_grad_()
        for name, p in model.named_parameters()
        if "up" in name or "last" in name
    }
    loss = torch.func.functional_call(model, {name: each * 2 for name, each in new.items()}, (x,))
    return loss, list(new.values())


def test_weights_exchanged_for_one_forward(engine):
    found, models = [], [make(6), make(6)]
    streamed = Streamed(engine, models[0])
    models[1].to(engine.device)
    for model in models:
        loss, new = exchanged(model, batch(0, model.first))
        other = model(batch(1, model.first))  # with its own weights, before the backward
        (loss + other).backward()
        streamed.finish()
        own = [p.grad for _, p in model.named_parameters()]
        found.append([loss, other, *(each.grad for each in new), *own])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine.cpu(), other.cpu())
    for place in [place for unit in streamed.units for place in unit.places]:
        assert place.parameter.data_ptr() == place.host.data_ptr()


def test_transforms_of_torch_func_are_refused(engine):
    model = make(6)
    Streamed(engine, model)
    x = batch(0, model.first)
    for transformed in (torch.func.grad(model), torch.func.vmap(torch.func.grad(lambda row: model(row[None])))):
        with pytest.raises(UnsupportedError, match=r"unit `blocks.0` runs in a transform of torch.func"):
            transformed(x)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def test_parametrizations_that_are_kept_for_several_uses_are_refused(engine):
    model = make(6)
    Streamed(engine, model)
    for block in model.blocks:
        nn.utils.parametrize.register_parametrization(block.down, "weight", Doubled())
    with nn.utils.parametrize.cached(), pytest.raises(UnsupportedError, match=r"`parametrize.cached\(\)`"):
        model(batch(0, model.first))
