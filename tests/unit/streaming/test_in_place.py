"""Inputs that lie on their tier already: kept by reference once nobody is seen to change them, and never wrong."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.in_place import may_stay
from lightning_cxl.streaming.versions import version_of, version_only
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


def test_a_change_by_surprise_is_an_error_and_known_from_then_on():
    rig = Rig()
    gradients(rig.blocks, chain)
    rig.taken()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
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
    with pytest.raises(UnsupportedError, match="`0` changed an input in place"):
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


def test_a_version_alone_follows_the_tensor_and_keeps_no_memory():
    base = source() * 1.0
    view = base[1:]
    watch = version_only(view)
    assert watch.untyped_storage().nbytes() == 0
    base.add_(1)
    assert version_of(watch) == version_of(view) == 1
    view.mul_(2)
    view.detach().zero_()
    assert version_of(watch) == version_of(base) == 3
    gone = weakref.ref(base)
    del base, view
    assert gone() is None


def test_what_may_stay():
    whole = source() * 1.0
    assert may_stay(whole) and may_stay(whole.t()) and may_stay(whole.view(-1))
    assert not may_stay(whole[1:]) and not may_stay(whole[:, 1:])
    assert not may_stay(torch.frombuffer(bytearray(64), dtype=torch.float32)), "somebody else's memory"
