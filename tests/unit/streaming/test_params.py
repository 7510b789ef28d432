"""Streamed weights: the same results, few slots, and nothing stale or lost, whoever writes through ``.data``."""

import contextlib
import copy
import gc
import signal
import threading
import weakref
from concurrent.futures import Future
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_cxl.devices import FinishedTransfer, HostEngine
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.gradients.guard import GradientMeter
from lightning_cxl.gradients.offload import GradientOffload
from lightning_cxl.memory.resource import Buffer, Span
from lightning_cxl.optim.masters import WeightPair
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.quantised import prepare_layers
from lightning_cxl.streaming.unit_weights import InMemory, ParamStreamer, Slot, UnitWeights
from lightning_cxl.streaming.units import streamable
from tests import training_device
from tests.apart.test_fork import in_child
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


def allocate(nbytes, parameters):
    pinned = training_device.current.type != "cpu"
    memory = torch.empty(nbytes + 64, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    start = memory.data_ptr()
    return InMemory(Buffer(start + -start % 64, nbytes, (Span("dram", 0, 0, nbytes),), None, memory))


def make(depth=5):
    torch.manual_seed(0)
    with torch.device("cpu"):
        return Net(depth)


def batch(step, like):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator, device="cpu").to(like.weight.device)


def named_blocks(model):
    return [(f"blocks.{index}", block) for index, block in enumerate(model.blocks)]


def units_of(model):
    return [UnitWeights(name, module, [own], allocate) for name, module, own in streamable(model, named_blocks(model))]


class Streamed:
    def __init__(self, engine, model, num_slots=3):
        self.model = model
        for stays in (model.first, model.last):
            stays.to(engine.device)
        self.offload = ActivationOffload(engine, RecyclingMemory().allocate, min_bytes=1)
        self.units = units_of(model)
        self.streamer = ParamStreamer(engine, self.units, lambda: self.offload.phase, num_slots=num_slots)
        self.streamer.attach()
        self.offload.attach(named_blocks(model))
        self.places = [place for unit in self.units for place in unit.places]
        parameters = {id(place.parameter): place.parameter for place in self.places}
        self.gradients = GradientOffload(
            engine, self.room, GradientMeter(1), None, self.streamer.release, parameters, reserves_streamed=False
        )
        self.gradients.watch([WeightPair("weight", each, each, torch.float32) for each in parameters.values()])

    def room(self, wanted, role):
        pinned = not self.gradients.engine.computes_on_host
        return [torch.empty(each.shape, dtype=dtype, device="cpu", pin_memory=pinned) for each, dtype in wanted]

    def finish(self):
        self.streamer.release()
        self.gradients.complete()

    def train(self, steps=3, orders=(None,)):
        return train(self.model, steps, orders, self.finish)

    def assert_at_home(self):
        assert all(place.parameter.data_ptr() == place.host.data_ptr() for place in self.places)

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


def train(model, steps=3, orders=(None,), finish=lambda: None):
    losses = []
    for step in range(steps):
        loss = model(batch(step, model.first), orders[step % len(orders)])
        loss.backward()
        finish()
        losses.append(loss.item())
        descend(model)
    return losses


def assert_same_weights(ours, theirs):
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.cpu(), other.cpu()), name


@pytest.fixture
def stream():
    with contextlib.ExitStack() as ends:

        def stream(engine, model, num_slots=3):
            streamed = Streamed(engine, model, num_slots)
            ends.callback(streamed.close)
            return streamed

        yield stream


ORDERS = {"all": (None,), "some": ([0, 2, 4], [4, 3, 1, 0]), "twice": ([0, 1, 0, 1], None), "few": ([3], [2, 2])}


@pytest.mark.parametrize(("num_slots", "order"), every_value([2, 3, 7], ORDERS))
def test_losses_and_weights_are_those_of_the_plain_run(engine, stream, num_slots, order):
    ours, theirs = make(), make().to(engine.device)
    assert stream(engine, ours, num_slots).train(5, ORDERS[order]) == train(theirs, 5, ORDERS[order])
    assert_same_weights(ours, theirs)


def test_outside_of_their_computation_parameters_show_the_host(engine, stream):
    model = make()
    before = {name: (p.clone(), p.stride()) for name, p in model.named_parameters()}
    streamed = stream(engine, model)
    assert len(streamed.places) == 5 * 5
    assert all(offset % 256 == 0 for place in streamed.places for offset in place.offsets.values())
    model(batch(0, model.first)).backward()
    streamed.finish()
    streamed.assert_at_home()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.cpu(), before[name][0]) and parameter.stride() == before[name][1]
    assert all(place.parameter.data_ptr() % 64 == 0 for place in streamed.places)


def test_backward_reuses_the_last_slots_and_between_steps_all_are_filled_for_the_next_forward(engine, stream):
    streamed = stream(engine, make(6))
    streamer = streamed.streamer
    streamed.train(3)
    fetches, late = streamer.num_fetches, streamer.num_late
    streamed.train(1)
    # 6 on the way there; on the way back 3 are still in their slots
    assert streamer.num_fetches - fetches <= 6 + 6 - 3 + 1
    assert streamer.num_late - late <= 1, "after the first step the next unit is known"
    for place in streamed.places:  # as an update does, of whom nobody expects that they look around
        torch.autograd.graph.increment_version(place.parameter)
    fetches, late = streamer.num_fetches, streamer.num_late
    for unit in streamed.units:
        unit.end_access()
    streamer.fetch_ahead()
    assert streamer.num_fetches - fetches == 3
    streamed.train(1)
    assert streamer.num_late == late


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


def test_a_copy_into_a_slot_waits_for_kernels_that_read_it(stream):
    """Seen in what the copy is given: whether a copy that does not wait comes too early depends on the load."""
    engine = Marking()
    units = stream(engine, make(2)).units
    slot = Slot(engine, max(unit.nbytes for unit in units))
    for unit in units:
        used = engine.marks[-1]
        engine.awaited.clear()
        slot.fetch(unit, unit.versions())
        assert engine.awaited and all(any(each is used for each in after) for after in engine.awaited)
        slot.exit()
        assert engine.marks[-1] is not used


def test_weights_that_changed_are_fetched_again(engine, stream):
    model = make(1)
    streamed = stream(engine, model)
    x = batch(0, model.first)
    with torch.no_grad():
        first = model(x)
        fetches = streamed.streamer.num_fetches
        assert torch.equal(model(x), first) and streamed.streamer.num_fetches == fetches, "its slot is still good"
        model.blocks[0].up.weight.mul_(2)
        changed = model(x)
        assert streamed.streamer.num_fetches == fetches + 1
        streamed.close()
        assert torch.equal(model.to(x.device)(x), changed) and not torch.equal(first, changed)


def test_a_model_that_is_evaluated_before_it_is_trained_is_trained(stream):
    model, plain = make(), make()
    stream(HostEngine(), model)
    with torch.inference_mode():
        model(batch(0, model.first))
    for each in (model, plain):
        each(batch(0, each.first)).backward()
    assert torch.equal(model.first.weight.grad, plain.first.weight.grad)


def test_a_forward_may_cast_a_weight_in_its_place(stream):
    """As the 8-bit layers of bitsandbytes do with their bias."""
    model = make(2)
    stream(HostEngine(), model)
    bias = model.blocks[1].norm.bias
    model.blocks[1].norm.register_forward_pre_hook(lambda *_: setattr(bias, "data", bias.data.double().float()))
    model(batch(0, model.first)).backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: torch.no_grad()(weight.mul_)(0.5),
        lambda weight: weight.data.mul_(0.5),
        lambda weight: setattr(weight, "data", weight.data * 0.5),
    ],
)
def test_a_unit_that_writes_to_its_weights_is_refused(stream, write):
    model = make(2)
    stream(HostEngine(), model)
    weight = model.blocks[1].up.weight
    model.blocks[1].norm.register_forward_pre_hook(lambda *_: write(weight) and None)
    with pytest.raises(UnsupportedError, match=r"unit `blocks.1` wrote to its weights"):
        model(torch.randn(4, WIDTH))


def test_a_forward_that_keeps_views_of_the_slot_is_refused(stream):
    model = make(2)
    stream(HostEngine(), model).offload.detach()
    with pytest.raises(UnsupportedError, match="differentiated without a recompute"):
        model(torch.randn(4, WIDTH))
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


def test_an_exception_in_a_forward_brings_the_weights_home(engine, stream):
    model = make(3)
    streamed = stream(engine, model)
    handle = model.blocks[1].up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, WIDTH))
    streamed.assert_at_home()
    handle.remove()
    assert streamed.train(2) == train(make(3).to(engine.device), 2)


def test_what_cannot_stream_stays(stream):
    model = make(4)
    model.blocks[1].up.weight = model.blocks[0].up.weight  # tied across units
    model.blocks[3].up = model.blocks[0].up  # a module of two units
    model.outside = nn.ModuleDict({"too": model.blocks[1].norm})
    base = torch.randn(2, WIDTH)
    model.blocks[2].norm.weight.data = base[0]  # two views of one storage
    model.blocks[2].norm.bias.data = base[1]
    chosen = {name: len(parameters) for name, _, parameters in streamable(model, named_blocks(model))}
    assert chosen == {"blocks.0": 3, "blocks.1": 2, "blocks.2": 3, "blocks.3": 3}
    theirs = copy.deepcopy(model)
    assert stream(HostEngine(), model).train(3) == train(theirs, 3)


class CountsCasts(TorchDispatchMode):
    def __init__(self, shape):
        super().__init__()
        self.shape, self.num_casts = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_casts += function is torch.ops.aten._to_copy.default and args[0].shape == self.shape
        return function(*args, **(kwargs or {}))


def test_no_cast_of_a_weight_outlives_the_forward_of_its_unit(engine, stream):
    model = make(2)
    streamed = stream(engine, model)
    x, weight = batch(0, model.first), model.blocks[0].up.weight
    with torch.autocast(engine.device.type, torch.bfloat16):
        first = model(x)
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


class Compilable(Block):
    """What a compiler would find when it looks at the weights: whether they have gradients."""

    seen: ClassVar[list[bool]] = []  # of the class: a recompute takes back what it does to the module

    def forward(self, x):
        self.seen.extend(parameter.grad is not None for parameter in self.parameters())
        return super().forward(x)


def test_a_forward_does_not_see_gradients_that_are_on_another_device(engine, stream):
    model = make(3)
    with torch.device("cpu"):
        model.blocks[1] = Compilable()
    streamed = stream(engine, model)
    model(batch(0, model.first)).backward()
    streamed.finish()
    before = [(each, each.grad, each.data_ptr()) for each in model.blocks[1].parameters()]
    Compilable.seen.clear()
    loss = model(batch(1, model.first))
    assert all(each.grad is grad and each.data_ptr() == home for each, grad, home in before)
    loss.backward()
    assert Compilable.seen == [False] * 2 * 5, "in the forward and in the recompute"
    streamed.finish()
    assert all(each.grad is grad and each.data_ptr() == home for each, grad, home in before)


def test_slots_are_let_go_and_weights_stay(device_engine, stream):
    model = make(3)
    streamed = stream(device_engine, model)
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
    streamer = ParamStreamer(HostEngine(), units_of(model), lambda: None)
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


def penalty(model, x, order=2):
    """WGAN-GP, R1, forces: the loss has a gradient in it."""
    x.requires_grad_()
    loss = model(x)
    for _ in range(1, order):
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = slope.square().sum()
    return loss * 10


def gradients_of_weights(model, x):
    inner = torch.autograd.grad(model(x), list(model.parameters()), create_graph=True)
    return sum(each.square().sum() for each in inner)


@pytest.mark.parametrize("loss_of", [penalty, lambda *args: penalty(*args, order=3), gradients_of_weights])
def test_second_derivatives_with_more_units_than_slots(engine, stream, loss_of):
    if loss_of is gradients_of_weights and not engine.computes_on_host:
        pytest.skip("`torch.autograd.grad` finds no parameter that is on another device than its gradient")
    ours, theirs = make(6), make(6).to(engine.device)
    streamed, losses = stream(engine, ours), []
    for model in (ours, theirs):
        for step in range(2):
            loss = loss_of(model, batch(step, model.first))
            loss.backward()
            streamed.finish()
            losses.append(loss.item())
            descend(model, 0.01)
    assert losses[:2] == losses[2:]
    assert_same_weights(ours, theirs)


class Pair(Block):
    """Two inputs that meet nowhere, so that each has a backward of its own."""

    def forward(self, pair):
        return [super(Pair, self).forward(x) for x in pair]


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "GraphExecGroup"), reason="this torch has no such group")
def test_a_recompute_that_serves_several_backwards_has_weights_of_its_own(engine, stream):
    """The second backward finds what the first one's recomputes have saved, and the slots filled again."""
    model = make()
    with torch.device("cpu"):
        model.blocks = nn.ModuleList(Pair() for _ in range(6))
    theirs, found = copy.deepcopy(model).to(engine.device), []
    streamed = stream(engine, model)
    for each in (model, theirs):
        inputs = [batch(step, model.first).requires_grad_() for step in range(2)]
        hidden = [each.first(x) for x in inputs]
        for block in each.blocks:
            hidden = block(hidden)
        with torch.utils.checkpoint.GraphExecGroup():
            for last in hidden:
                each.last(last).square().mean().backward()
        streamed.finish()
        found += [x.grad.cpu() for x in inputs]
    assert all(map(torch.equal, found[:2], found[2:]))


def test_a_graph_of_gradients_is_older_than_an_update(engine, stream):
    model = make(6)
    streamed = stream(engine, model)
    x = batch(0, model.first).requires_grad_()
    (slope,) = torch.autograd.grad(model(x), x, create_graph=True)
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


def test_weights_exchanged_for_one_forward(engine, stream):
    ours, theirs, found = make(6), make(6).to(engine.device), []
    streamed = stream(engine, ours)
    for model in (ours, theirs):
        loss, new = exchanged(model, batch(0, model.first))
        other = model(batch(1, model.first))  # with its own weights, before the backward
        (loss + other).backward()
        streamed.finish()
        found.append([loss, other, *(each.grad for each in new), *(each.grad for each in model.parameters())])
    assert all(torch.equal(mine.cpu(), other.cpu()) for mine, other in zip(*found, strict=True))
    streamed.assert_at_home()


def test_what_keeps_weights_beyond_a_call_is_refused(engine, stream):
    """Transforms of torch.func, and parametrizations that are kept for several uses."""
    model = make(6)
    stream(engine, model)
    x = batch(0, model.first)
    for transformed in (torch.func.grad(model), torch.func.vmap(torch.func.grad(lambda row: model(row[None])))):
        with pytest.raises(UnsupportedError, match=r"unit `blocks.0` runs in a transform of torch.func"):
            transformed(x)
    for block in model.blocks:
        nn.utils.parametrize.register_parametrization(block.down, "weight", nn.Tanh())
    with nn.utils.parametrize.cached(), pytest.raises(UnsupportedError, match=r"`parametrize.cached\(\)`"):
        model(x)


@pytest.mark.parametrize("num_slots", [2, 9])
@pytest.mark.parametrize("write", [lambda it: it.data.add_(0.25), lambda it: setattr(it, "data", it.data + 0.25)])
def test_writes_that_torch_does_not_count_are_seen(engine, stream, write, num_slots):
    """As peft merges an adapter, also with ``safe_merge=True``."""
    ours, theirs, found = make(), make().to(engine.device), []
    streamed = stream(engine, ours, num_slots)
    for model in (ours, theirs):
        for step in range(3):
            found += train(model, 2, finish=streamed.finish)
            with torch.no_grad():
                found.append(model(batch(100 + step, model.first)).item())  # slots have copies of these weights now
                for block in model.blocks:
                    write(block.up.weight)
                found.append(model(batch(100 + step, model.first)).item())
    assert found[:12] == found[12:]
    assert_same_weights(ours, theirs)


def scale(model, factor):
    for block in model.blocks:
        block.up.weight.data.mul_(factor)


def test_a_write_comes_after_what_the_device_has_still_to_compute(engine, stream):
    """The host is ahead: it writes right after a forward, and right after a backward."""
    model = make()
    streamed = stream(engine, model)
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


def test_nothing_is_fetched_while_someone_may_write(engine, stream):
    """The worker fetches when an update is done, perhaps between a look and the write that it is for."""
    model = make()
    streamed = stream(engine, model)
    x = batch(0, model.first)
    with torch.no_grad():
        model(x), model(x)
        weight = model.blocks[0].up.weight.data
        streamed.streamer.fetch_ahead()
        weight.mul_(2.0)
        found = model(x)
        streamed.close()
        assert torch.equal(found, model.to(x.device)(x))


def test_a_forked_child_does_not_wait_for_an_update_that_never_ends_there(engine, stream):
    model, update = make(), Future()
    stream(engine, model).units[1].begin_update(update)

    def look(block):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        with contextlib.suppress(UnsupportedError):
            block.up.weight.tolist()
        return block.up.weight.tolist()  # the second look, too

    assert "UnsupportedError: this process was forked" in in_child(lambda: look(model.blocks[1]))
    assert in_child(lambda: look(model.blocks[2])) == ""
    update.set_result(None)


def overtaken(begin_next):
    """Return an update whose end one thread sees late: another one has seen it, and has begun the next update."""
    update, begins = Future(), [begin_next]
    update.set_result(None)

    def result(timeout=None):
        while begins:
            begins.pop()()

    update.result = result
    return update


def test_who_sees_the_end_of_an_update_late_does_not_end_the_next_one(engine, stream):
    unit, following = stream(engine, make()).units[1], Future()
    unit.begin_update(overtaken(lambda: unit.begin_update(following)))
    unit.wait()
    assert unit.is_updating()
    following.set_result(None)
    unit.wait()
    assert not unit.is_updating()


def test_who_sees_the_end_of_an_update_of_a_weight_late_does_not_end_the_next_one(engine):
    if engine.computes_on_host:
        pytest.skip("weights are their own masters there")
    weight, following = nn.Parameter(torch.zeros(3, device=engine.device)), Future()
    pair = WeightPair("weight", weight, nn.Parameter(torch.zeros(3)), torch.float32)
    pair.begin_update(overtaken(lambda: pair.begin_update(following, engine)), engine)
    pair.settle()
    assert type(weight) is not nn.Parameter, "it is being updated"
    following.set_result(None)
    pair.settle()
    assert type(weight) is nn.Parameter


def test_what_is_quantised_on_its_way_to_the_device_does_not_stream():
    bnb = pytest.importorskip("bitsandbytes")
    model = nn.ModuleDict({name: bnb.nn.Linear4bit(16, 12) for name in ("ready", "later")})
    model["ready"].to("cpu")
    chosen = {name: own for name, _, own in streamable(model, list(model.named_children()))}
    assert any(each is model["ready"].weight for each in chosen["ready"])
    assert not any(each is model["later"].weight for each in chosen["later"])


def in_a_slot():
    """Return a quantised layer, the unit of it, and the memory of the slot that it shows."""
    module = pytest.importorskip("bitsandbytes").nn.Linear4bit(16, 12).to("cpu")
    unit = UnitWeights("block", module, [[*module.parameters()]], allocate)
    slot = torch.empty(unit.nbytes, dtype=torch.uint8)
    slot.copy_(unit.pieces[0].flat)
    unit.enter(slot)
    return module, unit, slot


def test_bytes_that_a_forward_replaces_are_an_error_not_garbage():
    module, unit, _ = in_a_slot()
    module.weight.data = torch.zeros(96, 1, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="replaced the bytes of 1 quantised weights"):
        unit.exit()
    assert unit.pieces[0].flat.data_ptr() in {each.data_ptr() for each in module.parameters()}


def test_a_parameter_that_its_module_has_replaced_by_its_like_is_put_back():
    """As peft's DoRA does on the CPU: the other one would show the slot for ever."""
    module, unit, slot = in_a_slot()
    own, before = unit.parameters[0], module.weight.data.clone()
    module.weight = nn.Parameter(module.weight.data, requires_grad=False)
    unit.exit()
    slot.fill_(0)
    assert module.weight is own
    assert torch.equal(module.weight.data, before)


@pytest.mark.parametrize("training", [True, False], ids=["dequantised", "8-bit product"])
def test_an_8_bit_layer_keeps_no_input(training):
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(16, 8, has_fp16_weights=False).to("cpu").train(training)
    gradients = []
    for prepares in (False, True):
        undo = prepare_layers(layer, ()) if prepares else None
        inputs = torch.arange(32.0).view(2, 16).requires_grad_()
        made = inputs * 2
        kept = weakref.ref(made)
        output = layer(made)
        del made
        gc.collect()
        assert (kept() is None) == prepares
        gradients.append(torch.autograd.grad(output.square().sum(), inputs)[0])
        if undo is not None:
            undo()
    assert torch.equal(*gradients)
