"""Inputs that lie on their tier already: kept by reference once nobody is seen to change them, and never wrong."""

import gc
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.host_tensors import has_own_memory
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.saved_inputs import History, InPlaceInput, SavedBytes, same_bits
from lightning_cxl.transfer.engine import HostEngine
from tests.fakes import LoggingDeviceEngine, RecyclingMemory

WIDTH = 16


class Block(nn.Module):
    """Its graph keeps neither the input nor the output itself, so that torch allows to change them afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y=None):
        return 1.5 * torch.tanh(self.linear(x * 2.0 if y is None else x * 2.0 + y))


class Token:
    """Counts by living."""


class Rig:
    """Blocks whose inputs lie on their tier."""

    def __init__(self, num_blocks=3, *, block=Block, in_place=True):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.memory = RecyclingMemory()
        self.counts: list[tuple[int, str]] = []
        self.live = 0
        self.offload = ActivationOffload(
            HostEngine(), self.memory.allocate, min_bytes=1, keep_in_place=self.count if in_place else None
        )
        self.offload.attach([(str(index), each) for index, each in enumerate(self.blocks)])

    def count(self, tensor, nbytes, unit):
        self.counts.append((nbytes, unit))
        self.live += 1
        token = Token()
        weakref.finalize(token, self._gone)
        return token

    def _gone(self):
        self.live -= 1

    def taken(self):
        """Return how many inputs were copied and how many stayed since the last call."""
        taken = len(self.memory.requests), len(self.counts)
        self.memory.requests.clear()
        self.counts.clear()
        return taken

    def plain(self):
        """Return the same blocks, not offloaded."""
        torch.manual_seed(0)
        return nn.ModuleList(type(each)() for each in self.blocks)


def chain(blocks, x):
    for block in blocks:
        x = block(x)
    return x.square().sum()


def source(seed=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(model, compute, steps=3):
    """Return all gradients of several steps."""
    found = []
    for step in range(steps):
        x = source(step)
        model.zero_grad()
        compute(model, x * 1.0).backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters())]
    return found


def assert_equal(ours, plain):
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))


def test_the_first_step_copies_and_the_next_ones_do_not():
    rig = Rig()
    for expected in [(3, 0), (0, 3), (0, 3)]:
        loss = chain(rig.blocks, source() * 1.0)
        assert rig.taken() == expected
        assert rig.offload.stats()["num_saved"] == 3
        assert rig.offload.stats()["saved_bytes"] == 3 * 4 * WIDTH * 4
        loss.backward()
        del loss
        assert rig.offload.stats()["num_saved"] == 0 and rig.live == 0
    assert_equal(gradients(rig.blocks, chain), gradients(rig.plain(), chain))


def test_several_forwards_before_the_first_backward_all_copy():
    rig = Rig()
    losses = [chain(rig.blocks, source(seed) * 1.0) for seed in range(3)]
    assert rig.taken() == (9, 0)
    sum(losses).backward()
    chain(rig.blocks, source() * 1.0)
    assert rig.taken() == (0, 3)


def test_without_gradients_nothing_is_learned():
    rig = Rig()
    with torch.no_grad():
        chain(rig.blocks, source())
    chain(rig.blocks, source() * 1.0)
    assert rig.taken() == (3, 0)


def test_a_device_apart_copies_always(on_device):
    engine = LoggingDeviceEngine(on_device)
    offload = ActivationOffload(
        engine, RecyclingMemory().allocate, min_bytes=1, keep_in_place=lambda *_: pytest.fail("asked")
    )
    with on_device:
        block = Block()
        offload.attach([("block", block)])
        for _ in range(3):
            block(torch.ones(4, WIDTH, requires_grad=True) * 1.0).sum().backward()
    assert sum(way == "d2h" for way, _ in engine.log) == 3
    offload.detach()
    engine.close()


def overwrites(blocks, x):
    """Change the input of a unit after it."""
    for block in blocks:
        y = block(x)
        x.add_(y)
    return x.square().sum()


def overwrites_a_base(blocks, x):
    """Change the input through the tensor that it is a view of."""
    for block in blocks:
        y = block(x.view(2, 2, WIDTH)).view(4, WIDTH)
        x.mul_(0.5)
        x = x + y
    return x.square().sum()


def overwrites_without_gradient(blocks, x):
    """Zero what is not needed any more."""
    for block in blocks:
        y = block(x)
        with torch.no_grad():
            x.zero_()
        x = y
    return x.square().sum()


@pytest.mark.parametrize("compute", [overwrites, overwrites_a_base, overwrites_without_gradient])
def test_inputs_that_are_changed_after_their_unit_are_copied_for_good(compute):
    rig = Rig()
    assert_equal(gradients(rig.blocks, compute), gradients(rig.plain(), compute))
    assert rig.taken() == (9, 0)


def test_one_change_is_remembered_although_other_calls_change_nothing():
    rig = Rig(1)
    for changes in (False, True, True, False, True):
        x = source()
        middle = x * 1.0
        loss = rig.blocks[0](middle).sum()
        if changes:
            middle.zero_()
        if len(rig.counts) and changes:
            with pytest.raises(RuntimeError, match="an input of unit `0`, shape \\(4, 16\\)"):
                loss.backward()
            rig.taken()
        else:
            loss.backward()
    assert rig.taken() == (3, 0)


def test_a_change_in_one_of_several_forwards_is_remembered():
    rig = Rig(1)
    chain(rig.blocks, source() * 1.0)  # not differentiated: nothing is learned
    middles = [source() * 1.0 for _ in range(2)]
    losses = [rig.blocks[0](middle).sum() for middle in middles]
    middles[0].data.zero_()
    for loss in losses:
        loss.backward()
    rig.taken()
    chain(rig.blocks, source() * 1.0)
    assert rig.taken() == (1, 0)


def test_a_change_by_surprise_is_an_error_and_known_from_then_on():
    rig = Rig()
    gradients(rig.blocks, chain)
    rig.taken()
    cause = r".*unit `2`.* It \(tensor 0 of the call.*kept without a copy .* in 3 calls .*clone instead: `x = x.clone"
    with pytest.raises(RuntimeError, match=f"modified by an inplace operation{cause}"):
        overwrites_without_gradient(rig.blocks, source() * 1.0).backward()
    rig.taken()
    loss = overwrites_without_gradient(rig.blocks, source() * 1.0)
    assert rig.taken() == (1, 2), "the last unit is recomputed first, and ended the backward"
    del loss


class Sometimes(Block):
    changes = False

    def forward(self, x):
        return super().forward(x.mul_(3.0) if self.changes else x * 3.0)


def test_a_unit_that_begins_to_change_its_input_is_refused_and_copies_from_then_on():
    rig = Rig(1, block=Sometimes)
    grads = gradients(rig.blocks, chain)
    rig.blocks[0].changes = True
    cause = r"`0` changed an input in place .* It \(tensor 0 of the call.* without a copy since .* 3 calls .*x.clone"
    with pytest.raises(UnsupportedError, match=cause):
        chain(rig.blocks, source() * 1.0)
    rig.taken()
    assert_equal(gradients(rig.blocks, chain), grads)
    assert rig.taken() == (3, 0)


def test_a_unit_that_changes_its_input_never_keeps_it():
    class Always(Sometimes):
        changes = True

    rig = Rig(2, block=Always)
    assert_equal(gradients(rig.blocks, chain), gradients(rig.plain(), chain))
    assert rig.taken() == (6, 0)


def test_an_input_of_several_units_is_kept_once():
    def cross(blocks, x):
        shared = x * 3.0
        for block in blocks:
            x = block(x, shared)
        return x.square().sum()

    rig = Rig()
    plain = gradients(rig.plain(), cross)
    assert_equal(gradients(rig.blocks, cross), plain)
    rig.taken()
    loss = cross(rig.blocks, source() * 1.0)
    assert rig.taken() == (0, 4)
    loss.backward()
    del loss
    assert rig.live == 0


def test_a_tensor_that_changes_between_two_units_is_kept_with_both_values_apart():
    def twice(blocks, x):
        first = blocks[0](x)
        x.mul_(2.0)
        return (first + blocks[1](x)).square().sum()

    rig = Rig(2)
    assert_equal(gradients(rig.blocks, twice), gradients(rig.plain(), twice))
    assert rig.taken()[1] == 2, "the second unit's input lasts"


def test_a_tensor_that_has_changed_is_another_input():
    rig, plain = Rig(2), None
    gradients(rig.blocks, chain)
    for blocks in (rig.blocks, rig.plain()):
        x = source()
        middle = x * 1.0
        unused = blocks[0](middle)  # keeps the values before, and is not differentiated
        middle.mul_(2.0)
        blocks[1](middle).sum().backward()
        assert plain is None or torch.equal(x.grad, plain)
        plain = x.grad
        del unused


def test_small_views_of_a_large_storage_are_copied():
    def first_rows(blocks, x):
        return chain(blocks[:1], torch.cat([x, x * 2.0])[:4])

    rig = Rig(1)
    assert_equal(gradients(rig.blocks, first_rows), gradients(rig.plain(), first_rows))
    assert rig.taken() == (3, 0)


def test_the_graph_keeps_no_more_than_the_input():
    rig = Rig(1)
    gradients(rig.blocks, chain)
    gc.disable()
    try:
        middle = source() * 1.0
        gone = weakref.ref(middle)
        out = rig.blocks[0](middle)
        del middle
        assert gone() is None, "an alias is kept, not the tensor and its graph"
        del out
        assert rig.live == 0 and rig.offload.stats()["saved_bytes"] == 0
    finally:
        gc.enable()


def test_an_exception_in_a_unit_frees_what_was_kept():
    class Failing(Block):
        fails = False

        def forward(self, x):
            if self.fails:
                raise ArithmeticError("inside")
            return super().forward(x)

    rig = Rig(3, block=Failing)
    gradients(rig.blocks, chain)
    rig.blocks[2].fails = True
    with pytest.raises(ArithmeticError):
        chain(rig.blocks, source() * 1.0)
    rig.blocks[2].fails = False
    assert rig.live == 0
    assert_equal(gradients(rig.blocks, chain), gradients(rig.plain(), chain))


def test_several_backwards_of_one_graph():
    rig = Rig()
    gradients(rig.blocks, chain)
    x, other = source(), source()
    loss = chain(rig.blocks, x * 1.0)
    loss.backward(retain_graph=True)
    loss.backward()
    chain(rig.plain(), other * 1.0).backward()
    assert torch.equal(x.grad, 2 * other.grad)


def zeroes_data(blocks, x):
    """Write to the memory of an input without a version, and drop the input before backward."""
    for block in blocks:
        y = block(x)
        x.data.zero_()
        x = y
    return x.square().sum()


def adds_to_data(blocks, x):
    """Write likewise, to tensors that live until backward."""
    seen = []
    for block in blocks:
        y = block(x)
        x.data.add_(1.0)
        seen.append(x)
        x = y
    return x.square().sum() + 0 * sum(each.detach().sum() for each in seen)


def writes_through_numpy(blocks, x):
    """Write through an array that is made after the unit."""
    for block in blocks:
        y = block(x)
        x.detach().numpy()[...] = 0
        x = y
    return x.square().sum()


def writes_through_dlpack(blocks, x):
    """Write through a tensor that torch takes for another one."""
    for block in blocks:
        alias = torch.from_dlpack(x.detach())
        y = block(x)
        alias.zero_()
        x = y
    return x.square().sum()


def writes_through_a_storage(blocks, x):
    """Use the input's memory as a buffer once more."""
    for block in blocks:
        y = block(x)
        buffer = torch.empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride())
        torch.mul(y.detach(), 3, out=buffer)
        x = y
    return x.square().sum()


def writes_once_the_input_is_gone(blocks, x):
    """Write through what outlives the inputs: an array, a storage and a DLPack alias, after all units."""
    arrays, storages, aliases = [], [], []
    for block in blocks:
        match len(arrays) + len(storages) + len(aliases):
            case 0:
                arrays.append(x.detach().numpy())
            case 1:
                storages.append(x.untyped_storage())
            case _:
                aliases.append(torch.from_dlpack(x.detach()))
        x = block(x)
    for array in arrays:
        array[...] = 0
    for storage in storages:
        storage.fill_(0)
    for alias in aliases:
        alias.zero_()
    return x.square().sum()


def replaces_data_between(blocks, x):
    """Give one tensor to two units, with other memory, at the same version."""
    first = blocks[0](x)
    x.data = x.data * 3.0
    return (first + blocks[1](x)).square().sum()


def writes_data_between(blocks, x):
    """Give one tensor to two units, with other values in the same memory, at the same version."""
    first = blocks[0](x)
    x.data.mul_(3.0)
    return (first + blocks[1](x)).square().sum()


def writes_data_between_and_after(blocks, x):
    """Give one tensor to two units, and change it after each."""
    first = blocks[0](x)
    x.data.mul_(3.0)
    second = blocks[1](x)
    x.data.mul_(3.0)
    return (first + second).square().sum()


UNSEEN_WRITES = [
    zeroes_data,
    adds_to_data,
    writes_through_numpy,
    writes_through_dlpack,
    writes_through_a_storage,
    writes_once_the_input_is_gone,
    replaces_data_between,
    writes_data_between,
    writes_data_between_and_after,
]


@pytest.mark.parametrize("compute", UNSEEN_WRITES)
def test_writes_without_a_version_are_as_without_offloading_in_every_step(compute):
    rig, plain = Rig(), Rig(in_place=False)
    expected = gradients(rig.plain(), compute_kept(compute), steps=4)
    assert_equal(gradients(rig.blocks, compute_kept(compute), steps=4), expected)
    assert_equal(gradients(plain.blocks, compute_kept(compute), steps=4), expected)


def compute_kept(compute):
    """Give plain blocks all of their parameters a gradient, also where `compute` uses only some."""
    return lambda blocks, x: compute(blocks, x) + 0 * sum(p.sum() for p in blocks.parameters())


def test_a_write_between_two_backwards_of_one_graph_is_seen():
    rig = Rig(1)
    for _ in range(3):
        middle = source() * 1.0
        loss = rig.blocks[0](middle).sum()
        loss.backward(retain_graph=True)
        middle.data.zero_()
        loss.backward()
        del loss
    assert rig.taken() == (3, 0)


def test_nan_and_minus_zero_are_values_like_others():
    rig = Rig(1)
    x = torch.tensor([float("nan"), -0.0, 1.0, float("inf")] * 4, requires_grad=True)
    for expected in [(1, 0), (0, 1)]:
        rig.blocks[0](x.reshape(1, WIDTH) * 1.0).sum().backward()
        assert rig.taken() == expected
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bits_are_compared_of_every_dtype_and_layout(dtype):
    tensor = torch.arange(12.0).reshape(3, 4).to(dtype).t()
    other = tensor.clone()
    assert same_bits(tensor, other)
    other[1, 2] = 0
    assert not same_bits(tensor, other)


def test_the_first_step_keeps_one_input_longer_than_the_model_does():
    """What is compared later must not lie in memory twice."""
    rig, live = Rig(4), []

    def spy(number):
        def look(_block, args):
            live.append([each for each in range(number) if storages[each]() is not None])

        return look

    storages = []
    for number, block in enumerate(rig.blocks):
        block.linear.register_forward_pre_hook(spy(number))
    x = source() * 1.0
    for block in rig.blocks:
        storages.append(weakref.ref(x.untyped_storage()))
        x = block(x)
    assert live == [[], [], [], []]
    loss = x.sum()
    del x
    loss.backward()
    assert rig.taken() == (4, 0)


def test_an_input_that_was_never_completed_dies_quietly():
    class Unusable:
        @property
        def _version(self):
            raise ArithmeticError("inside")

        def detach(self):
            return self

        def is_inference(self):
            return False

    errors = []
    before, sys.unraisablehook = sys.unraisablehook, errors.append
    try:
        with pytest.raises(ArithmeticError):
            InPlaceInput(Unusable(), "unit", object(), SavedBytes(), History(0, 1))
        gc.collect()
    finally:
        sys.unraisablehook = before
    assert not errors


@st.composite
def programs(draw):
    """What a model does with two tensors: units of one or both, views, changes in place; the same in every step."""
    length = draw(st.integers(2, 7))
    return [
        draw(st.sampled_from(["unit", "both", "view", "transpose", "add_", "zero_", "swap", "part"]))
        for _ in range(length)
    ]


def run_program(program):
    def compute(blocks, x):
        y, out, index = x * 0.5, [], 0
        for step in program:
            block = blocks[index % len(blocks)]
            match step:
                case "unit" | "both":
                    result = block(x) if step == "unit" else block(x, y)
                    index += 1
                    out.append(result)
                    y = x
                    x = result * 1.0
                case "view":
                    x = x.view(2, 2 * WIDTH).view(4, WIDTH)
                case "transpose":
                    x = (x.t() * 1.0).t()
                case "add_":
                    y.add_(1.0)
                case "zero_":
                    with torch.no_grad():
                        y.zero_()
                case "swap":
                    x, y = y, x
                case "part":
                    x = torch.cat([x, y])[2:6]
        return sum(each.square().sum() for each in out) + x.sum()

    return compute


@settings(max_examples=60, deadline=None)
@given(programs())
def test_programs_have_the_gradients_of_copies_in_every_step(program):
    """Plain torch refuses some of them, or recomputes nothing: what copies give is the measure."""
    compute = run_program(program)
    try:
        expected = gradients(Rig(2, in_place=False).blocks, compute, steps=4)
    except (RuntimeError, UnsupportedError, AttributeError):
        return  # not with copies either
    assert_equal(gradients(Rig(2).blocks, compute, steps=4), expected)


def test_what_has_own_memory():
    whole = source() * 1.0
    assert has_own_memory(whole) and has_own_memory(whole.t()) and has_own_memory(whole.view(-1))
    assert not has_own_memory(whole[1:]) and not has_own_memory(whole[:, 1:])
    assert not has_own_memory(torch.frombuffer(bytearray(64), dtype=torch.float32)), "somebody else's memory"
