"""What offloaded units keep, for how long and how exactly, and how they are put on and taken off."""

import gc
import time
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_cxl.devices import HostEngine
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.streaming.activations import ActivationOffload, StoredInput, UnitForward, UnitInput, can_store
from lightning_cxl.streaming.units import find_units
from tests import training_device
from tests.fakes import LoggingDeviceEngine, RecyclingMemory

FEATURES = 64
INPUT_BYTES = 16 * FEATURES * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.fail, self.num_calls = False, 0

    def forward(self, x, *, gain: float = 1.0):
        self.num_calls += 1
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


def test_inputs_are_kept_until_backward_or_until_the_graph_is_dropped(net, offload, memory):
    for _ in range(3):
        loss = net()
        assert_saved(offload, memory, 4)
        del loss
        assert_saved(offload, memory, 0)
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


def test_an_exception_in_forward_or_recompute_frees_everything_and_the_next_step_works(net, offload, memory):
    net.blocks[2].fail = True
    with pytest.raises(ArithmeticError, match="inside"):
        net()
    net.blocks[2].fail = False
    assert_saved(offload, memory, 0)
    loss = net()
    for block in net.blocks:
        block.num_calls = 10
    up, net.blocks[1].up = net.blocks[1].up, nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        loss.backward()
    net.blocks[1].up = up
    assert {block.num_calls for block in net.blocks} == {10}, "recomputes change nothing"
    del loss
    assert_saved(offload, memory, 0)
    net().backward()
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
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            net()
    net.requires_grad_(False)
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


def test_detach_leaves_graphs_and_a_later_wrapper_which_passes_through(net, offload, memory):
    plain = Net()
    plain().backward()
    wrapped = net.blocks[0].forward
    net.blocks[0].forward = wrapper = lambda x: wrapped(x)
    loss = net()
    offload.detach()
    loss.backward()
    assert torch.equal(plain.stem.weight.grad, net.stem.weight.grad)
    assert net.blocks[0].forward is wrapper
    memory.requests.clear()
    net().backward()
    assert memory.requests == []


def test_attaching_twice_is_refused_and_changes_nothing(net, offload):
    other = ActivationOffload(HostEngine(), RecyclingMemory().allocate)
    fresh = Block()
    for units in ([("fresh", fresh), *find_units(net)], [("a", fresh), ("b", fresh)]):
        with pytest.raises(ConfigError, match="attached already"):
            other.attach(units)
        assert "forward" not in fresh.__dict__


@pytest.mark.parametrize("is_safe", [True, False])
def test_an_input_changed_in_place_by_surprise_is_an_error_unless_its_values_were_safe(is_safe, request):
    class Sometimes(Block):
        def forward(self, x, scale, now):
            return super().forward((x.mul_(2.0) if now else x * 2.0) + scale)

    engine = HostEngine() if is_safe else request.getfixturevalue("device_engine")
    training_device.needs_late(not is_safe)
    training_device.make_late("nothing" if is_safe else "to the host, much")
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


def test_the_unit_before_is_prefetched_while_a_unit_is_recomputed(on_device):
    engine = LoggingDeviceEngine(on_device)
    offload = ActivationOffload(engine, RecyclingMemory().allocate, min_bytes=1)
    with on_device:
        net = Net()
        fetched = []
        for block in net.blocks:
            block.up.register_forward_pre_hook(lambda *_: fetched.append([way for way, _ in engine.log].count("h2d")))
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


@pytest.mark.parametrize(("training", "is_used"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("positional", [True, False])
def test_a_cache_is_left_out_where_it_is_empty_in_training_or_else_makes_the_unit_run_as_it_is(
    offload, memory, training, is_used, positional
):
    block, cache = Cached().train(training), Cache()
    if is_used:
        cache.update(torch.ones(2, 2))
    offload.attach([("cached", block)])
    x, num_tokens = torch.ones(16, FEATURES, requires_grad=True) * 1, len(cache.tokens)
    (block(x, cache) if positional else block(x, past_key_values=cache)).sum().backward()
    repeats = training and not is_used
    assert len(cache.tokens) == num_tokens + (not repeats) and len(memory.requests) == repeats


def grown(*shape, dtype=torch.float32):
    return torch.randn(*shape, requires_grad=True).to(dtype).mul(1)


@st.composite
def layouts(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    tensor = grown(*sizes, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
    for _ in range(draw(st.integers(0, 3))):
        axis = draw(st.integers(0, tensor.dim() - 1))
        match draw(st.sampled_from(["permute", "slice", "expand", "step"])):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "slice":
                start = draw(st.integers(0, tensor.size(axis) - 1))
                tensor = tensor.narrow(axis, start, tensor.size(axis) - start)
            case "expand":
                tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
            case "step":
                tensor = tensor[tuple([slice(None)] * axis + [slice(None, None, 2)])]
    return tensor


@given(layouts())
def test_the_image_is_exact(tensor):
    memory, engine = RecyclingMemory(), HostEngine()
    stored = StoredInput(tensor, engine, memory.allocate, "unit")
    image = stored.shape_like_source(stored.on_host())
    assert torch.equal(image, tensor) and image.stride() == tensor.stride() and image.dtype == tensor.dtype
    assert image.data_ptr() % 64 == tensor.data_ptr() % 64
    assert not image.requires_grad
    destination, transfer = stored.fetch(engine)
    transfer.wait()
    assert torch.equal(stored.shape_like_source(destination), tensor)
    del stored, image
    assert memory.live_bytes == 0


def test_an_image_read_back_before_its_copy_is_done_waits_for_it(device_engine):
    training_device.make_late("to the host")
    tensor = grown(100)
    stored = StoredInput(tensor, device_engine, RecyclingMemory().allocate, "unit")
    destination, transfer = stored.fetch(device_engine)
    transfer.wait()
    assert torch.equal(stored.shape_like_source(destination), tensor)


def test_an_image_is_recognised_by_identity_and_version():
    tensor = grown(4)
    stored = StoredInput(tensor, HostEngine(), RecyclingMemory().allocate, "unit")
    assert stored.is_image_of(tensor)
    assert not stored.is_image_of(tensor.view(4))  # same memory, another tensor
    own = tensor.data
    tensor.data = own.clone()
    assert not stored.is_image_of(tensor)  # same version, other memory
    tensor.data = own
    assert stored.is_image_of(tensor)
    with torch.no_grad():
        tensor.add_(1)
    assert not stored.is_image_of(tensor)
    del tensor
    assert stored.source() is None


def test_a_held_input_does_not_hold_the_graph():
    tensor = grown(4)
    held = UnitInput(tensor, None, "unit", cautious=False)
    assert not held.observe()
    held.release(HostEngine())
    assert held.load(HostEngine()).grad_fn is None and torch.equal(held.load(HostEngine()), tensor)
    tensor.mul_(2)
    with pytest.raises(RuntimeError, match="an input of unit `unit`"):
        held.load(HostEngine())


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (grown(4), True), (grown(4, dtype=torch.bfloat16), True),
        (torch.randn(4), False),  # no gradient
        (torch.randn(4, requires_grad=True), False), (nn.Parameter(torch.randn(4)), False),  # a leaf is alive anyway
        (grown(3), False), (grown(0), False),  # too small
        (grown(4, 4)[:, :1], False),  # the image would hold mostly other data
        (grown(4, 4).to(torch.complex64), False), (grown(4, 4).to_sparse(), False), (grown(4).to("meta"), False),
    ],
)  # fmt: skip
def test_what_belongs_on_the_tier(tensor, expected):
    assert can_store(tensor, torch.device("cpu"), min_bytes=8 if tensor.dtype is torch.bfloat16 else 16) is expected
