"""What offloaded units keep, for how long, and how they are put on and taken off."""

import copy
import gc
import io
import time
import weakref

import pytest
import torch
from torch import nn

from lightning_cxl.devices.transfer import HostEngine
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.streaming.activations import ActivationOffload, UnitForward
from lightning_cxl.streaming.units import find_units
from tests import training_device
from tests.fakes import LoggingDeviceEngine, RecyclingMemory

FEATURES = 64
INPUT_BYTES = 16 * FEATURES * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.fail = False

    def forward(self, x, *, gain: float = 1.0):
        """Docstring of the block."""
        y = torch.tanh(self.up(x))
        if self.fail:
            raise ArithmeticError("inside")
        return x + gain * self.down(y)


class Net(nn.Module):
    def __init__(self, num_blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x=None):
        x = self.stem(torch.ones(16, FEATURES) if x is None else x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.fixture(autouse=True)
def no_garbage_collector():
    """Everything must go by reference count alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def net(offload):
    net = Net()
    offload.attach(find_units(net))
    yield net
    net.cpu()


def assert_saved(offload, memory, expected):
    """A thread of autograd lets go of what it has run a moment after the backward has returned or failed."""
    deadline_s = time.monotonic() + 5
    while True:
        offload.engine.synchronize()  # holds what it copies
        if memory.num_live == expected:
            return
        assert time.monotonic() < deadline_s, f"{memory.num_live} inputs are saved, expected {expected}"
        time.sleep(0.001)


def test_inputs_are_kept_until_backward(net, offload, memory):
    loss = net()
    assert_saved(offload, memory, 4)
    assert 4 * INPUT_BYTES <= memory.live_bytes < 4 * (INPUT_BYTES + 64)
    loss.backward()
    del loss
    assert_saved(offload, memory, 0)
    assert memory.peak_bytes >= 4 * INPUT_BYTES
    assert {unit for _, unit in memory.requests} == {f"blocks.{i}" for i in range(4)}


def test_device_tensors_are_dropped_after_forward(offload, engine):
    """Only the unit's own input is the source; the graph must not hold it."""
    net = Net()
    sources = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, args: sources.append(weakref.ref(args[0])))
    offload.attach(find_units(net))
    loss = net()
    engine.synchronize()
    assert [source() for source in sources] == [None] * 4
    loss.backward()


def test_a_graph_dropped_without_backward_frees_everything(net, offload, memory, engine):
    for _ in range(3):
        loss = net()
        assert_saved(offload, memory, 4)
        del loss
        assert_saved(offload, memory, 0)


def test_an_exception_in_forward_frees_everything_and_the_next_step_works(net, offload, memory, engine):
    net.blocks[2].fail = True
    with pytest.raises(ArithmeticError, match="inside"):
        net()
    net.blocks[2].fail = False
    assert_saved(offload, memory, 0)
    loss = net()
    loss.backward()
    del loss
    assert_saved(offload, memory, 0)


def test_an_exception_in_recompute_frees_everything(net, offload, memory, engine):
    loss = net()
    up, net.blocks[1].up = net.blocks[1].up, nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        loss.backward()
    net.blocks[1].up = up
    del loss
    assert_saved(offload, memory, 0)


def test_a_full_tier_is_the_callers_error_and_leaves_nothing(engine):
    memory = RecyclingMemory(limit_bytes=2 * INPUT_BYTES + 200)
    offload = ActivationOffload(engine, memory.allocate, min_bytes=1)
    net = Net()
    offload.attach(find_units(net))
    with pytest.raises(MemoryError, match=r"blocks\.2"):
        net()
    assert_saved(offload, memory, 0)
    offload.detach()


def test_no_gradient_no_storage(net, offload, memory):
    with torch.no_grad():
        net()
    with torch.inference_mode():
        net()
    net.eval()
    with torch.no_grad():
        net()
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    net()
    assert memory.requests == []


def test_detach_gives_back_exactly_what_was_there(offload):
    net = Net()
    own = net.blocks[1].forward
    net.blocks[1].forward = own  # an instance's own forward, as wrappers leave it
    before = [dict(block.__dict__) for block in net.blocks]
    offload.attach(find_units(net))
    assert all(isinstance(block.forward, UnitForward) for block in net.blocks)
    offload.detach()
    offload.detach()
    assert [block.__dict__ for block in net.blocks] == before
    assert net.blocks[1].forward is own


def test_detach_under_a_later_wrapper_leaves_it_and_passes_through(net, offload, memory):
    wrapped = net.blocks[0].forward
    net.blocks[0].forward = lambda x: wrapped(x)
    wrapper = net.blocks[0].forward
    offload.detach()
    assert net.blocks[0].forward is wrapper
    net().backward()
    assert memory.requests == []


def test_graphs_outlive_detach(net, offload):
    plain = Net()
    plain().backward()
    loss = net()
    offload.detach()
    loss.backward()
    assert torch.equal(plain.stem.weight.grad, net.stem.weight.grad)


def test_attaching_twice_is_refused_and_changes_nothing(net, offload):
    other = ActivationOffload(HostEngine(), RecyclingMemory().allocate)
    fresh = Block()
    for units in ([("fresh", fresh), *find_units(net)], [("a", fresh), ("b", fresh)]):
        with pytest.raises(ConfigError, match="attached already"):
            other.attach(units)
        assert "forward" not in fresh.__dict__


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_of_an_attached_model_are_plain(net, offload, memory, how):
    if how == "deepcopy":
        twin = copy.deepcopy(net)
    else:
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    twin().backward()
    assert memory.requests == []
    assert not any(isinstance(block.forward, UnitForward) for block in twin.blocks)
    assert net.stem.weight.grad is None  # the copy runs its own modules
    with torch.no_grad():
        twin.blocks[0].up.weight.zero_()
    assert net.blocks[0].up.weight.any()
    net().backward()
    assert len(memory.requests) == 4


def test_a_parameter_changed_before_backward_is_an_error(net):
    loss = net()
    with torch.no_grad():
        net.blocks[2].up.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"`up\.weight` of Block is at version 2, the forward saw version 1"):
        loss.backward()


def test_a_held_input_changed_before_backward_is_an_error(memory):
    class Gated(Block):
        def forward(self, x, gate):
            return super().forward(x * gate)

    offload = ActivationOffload(HostEngine(), memory.allocate, min_bytes=1)
    block, gate = Gated(), torch.ones(FEATURES)
    offload.attach([("gated", block)])
    out = block(torch.ones(16, FEATURES), gate).sum()
    gate.add_(1.0)
    with pytest.raises(RuntimeError, match=r"inplace operation: an input of unit `gated`, shape \(64,\)"):
        out.backward()
    offload.detach()


@pytest.mark.parametrize("is_safe", [True, False])
def test_an_input_changed_in_place_by_surprise_is_an_error_unless_its_values_were_safe(is_safe, request):
    class Sometimes(Block):
        def forward(self, x, scale, now):
            return super().forward((x.mul_(2.0) if now else x * 2.0) + scale)

    engine = HostEngine() if is_safe else request.getfixturevalue("device_engine")
    training_device.make_late("nothing" if is_safe else "to the host")
    offload = ActivationOffload(engine, RecyclingMemory().allocate, min_bytes=1)
    block = Sometimes()
    offload.attach([("sometimes", block)])
    grads = []
    for now in (False, True):
        x = torch.ones(16, FEATURES, requires_grad=True)
        if now and not is_safe:
            with pytest.raises(UnsupportedError, match="`sometimes` changed an input in place"):
                block(x * 1, torch.ones(FEATURES), now)
            training_device.forget_races()  # what the error tells of
        # known from now on
        block(x * 1, torch.ones(FEATURES), now).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    offload.detach()


def test_two_views_of_one_storage_changed_in_place_are_refused(offload):
    class Overlap(Block):
        def forward(self, a, b):
            a.add_(1.0)
            return super().forward(a) + b

    block = Overlap()
    offload.attach([("overlap", block)])
    x = torch.ones(17, FEATURES, requires_grad=True) * 1
    with pytest.raises(UnsupportedError, match="shares memory with another input"):
        block(x[:16], x[1:])


def test_an_input_modified_into_the_graph_of_its_unit_makes_no_cycle(offload, memory, engine):
    class Fills(Block):
        def forward(self, x, out, scratch):
            out.copy_(super().forward(x))  # `out` now belongs to the graph of this unit
            x.mul_(2.0)
            return x + out

    block = Fills()
    offload.attach([("fills", block)])
    for _ in range(2):
        x = torch.ones(16, FEATURES, requires_grad=True) * 1
        y = block(x, torch.zeros(16, FEATURES), scratch=[x])
        assert_saved(offload, memory, 1)
        del x, y
        assert_saved(offload, memory, 0)


def fetches(engine):
    return sum(way == "h2d" for way, _ in engine.log)


def test_the_unit_before_is_prefetched_while_a_unit_is_recomputed(on_device):
    engine = LoggingDeviceEngine(on_device)
    offload = ActivationOffload(engine, RecyclingMemory().allocate, min_bytes=1)
    with on_device:
        net = Net()
        fetched = []
        for block in net.blocks:
            block.up.register_forward_pre_hook(lambda *_: fetched.append(fetches(engine)))
        offload.attach(find_units(net))
        net().backward()
    # forward fetches nothing; the newest input has not left the device; every recompute but the last of four has
    # started one copy ahead of its own
    assert fetched == [0, 0, 0, 0, 1, 2, 3, 3]
    assert [way for way, _ in engine.log].count("d2h") == 4
    offload.detach()
    engine.close()


class Cache:
    def __init__(self):
        self.tokens = []

    def get_seq_length(self):
        return len(self.tokens)

    def update(self, token):
        self.tokens.append(token)
        return self.tokens


class Cached(Block):
    def forward(self, x, past_key_values=None):
        if past_key_values is not None:
            x = x + sum(token.sum() for token in past_key_values.update(x))
        return super().forward(x)


@pytest.mark.parametrize("positional", [True, False])
def test_an_empty_cache_is_left_out_in_training(offload, memory, positional):
    block, cache = Cached(), Cache()
    offload.attach([("cached", block)])
    x = torch.ones(16, FEATURES, requires_grad=True)
    out = block(x * 1, cache) if positional else block(x * 1, past_key_values=cache)
    out.sum().backward()
    assert cache.tokens == [] and len(memory.requests) == 1


@pytest.mark.parametrize("training", [True, False])
def test_a_cache_that_is_in_use_makes_the_unit_run_as_it_is(offload, memory, training):
    block, cache = Cached().train(training), Cache()
    if training:
        cache.update(torch.ones(2, 2))
    offload.attach([("cached", block)])
    num_tokens = len(cache.tokens)
    x = torch.ones(16, FEATURES, requires_grad=True)
    block(x * 1, past_key_values=cache).sum().backward()
    assert len(cache.tokens) == num_tokens + 1 and memory.requests == []
