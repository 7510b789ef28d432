"""Offloaded units compute what plain units compute, bit for bit."""

import collections
import copy
import dataclasses
import random
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._pytree import keystr, register_pytree_node, tree_flatten_with_path
from torch.utils.checkpoint import checkpoint

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.streaming.units import find_units


def assert_same(left, right, where="value"):
    ours, theirs = tree_flatten_with_path(left), tree_flatten_with_path(right)
    assert ours[1] == theirs[1], where
    for (path, one), (_, other) in zip(ours[0], theirs[0], strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), f"{where}{keystr(path)}"
        else:
            assert one == other, f"{where}{keystr(path)}"


def state_of(model):
    return {
        "weights": {name: p.detach().clone() for name, p in model.named_parameters()},
        "grads": {name: p.grad for name, p in model.named_parameters()},
        "buffers": {name: (b.clone(), b._version) for name, b in model.named_buffers()},
    }


def compare(model, offload, step):
    """Run `step(model)` (returns anything) a few times plain and offloaded, with an optimizer; all must be equal."""
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    offload.attach(find_units(ours, "blocks.*"))
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, ours)]
    for index in range(3):
        results = []
        for each, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(100 + index)
            results.append((step(each), torch.rand(3), state_of(each)))
            optimizer.step()
        assert_same(results[0], results[1], f"step {index}")
        assert all(p.isfinite().all() for p in plain.parameters()), "the test itself diverges"
    assert offload.memory.peak_bytes > 0
    offload.engine.synchronize()
    assert offload.memory.live_bytes == 0


def one_after_the_other(blocks, x, *args):
    for block in blocks:
        x = block(x, *args)
    return x


class Stack(nn.Module):
    """Blocks behind a stem that makes the first input carry gradient; `run` goes through them."""

    def __init__(self, make_block, num_blocks=3, run=one_after_the_other):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(make_block() for _ in range(num_blocks))
        self.run = run

    def forward(self, x):
        return self.run(self.blocks, self.stem(x))


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8))
        self.function = function

    def forward(self, *args):
        return self.function(self, *args)


def does(function):
    return lambda: Does(function)


class Residual(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


def train(model, *args, **kwargs):
    loss = loss_of(model, *args, **kwargs)
    loss.backward()
    return loss.detach()


def loss_of(model, *args, **kwargs):
    return model(torch.randn(4, 8), *args, **kwargs).square().mean()


class Draws(nn.Module):
    """Multiplies by numbers that do not come from torch's default generators, and leaves one part out by chance."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.rng, self.layers[0].rng = random.Random(3), np.random.default_rng(3)
        self.others = {"torch": [torch.Generator().manual_seed(3)], "numpy": (np.random.RandomState(3),)}

    def forward(self, x, given):
        for layer in self.layers:
            if random.random() < 0.5:
                x = x + torch.tanh(layer(x) * np.random.rand() * self.layers[0].rng.random())
        drawn = torch.rand(8, generator=self.others["torch"][0], device="cpu") + self.others["numpy"][0].normal()
        x = x + torch.sin(x * self.rng.random() * drawn.to(x.device))
        return x * torch.sigmoid(x * torch.rand(8, generator=given["torch"], device=x.device))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_numbers_of_other_generators_are_drawn_again_and_go_on(offload, num_micro_batches):
    def step(model):
        random.seed(1)
        np.random.seed(1)
        generator = torch.Generator(model.stem.weight.device).manual_seed(1)
        for block in model.blocks:
            block.others["torch"][0].manual_seed(4)  # a copy of a model shares it
        outputs = []
        for _ in range(num_micro_batches):
            given = {"torch": generator, "without a state": random.SystemRandom()}
            outputs.append(one_after_the_other(model.blocks, model.stem(torch.randn(4, 8)), given))
        for output in outputs:
            output.square().mean().backward()
        block = model.blocks[-1]
        return [
            random.random(), np.random.rand(), block.rng.random(), block.layers[0].rng.random(),
            block.others["numpy"][0].normal(), torch.rand(1, generator=generator, device=generator.device),
            torch.rand(1, generator=block.others["torch"][0], device="cpu"),
        ]  # fmt: skip

    compare(Stack(Draws, num_blocks=4), offload, step)


def test_numbers_are_drawn_again_where_each_unit_begins_with_the_same_ones(offload):
    def reseeding(blocks, x):
        for block in blocks:
            random.seed(1)
            np.random.seed(1)
            x = block(x)
        return x

    make = does(lambda self, x: x + torch.sin(self.linear(x) * (random.random() + np.random.rand())))
    compare(Stack(make, run=reseeding), offload, train)


Record = namedtuple("Record", ["states", "aux"])


@dataclasses.dataclass(frozen=True)
class Notes:
    aux: list
    seen: dict


class Registered:
    """Refuses to hold what is no tensor, as types that pytree knows may."""

    def __init__(self, x, aux):
        self.x, self.aux = x.contiguous(), aux


register_pytree_node(Registered, lambda each: ([each.x, each.aux], None), lambda parts, _: Registered(*parts))


class Collecting(nn.Module):
    """Writes to what it is given, and computes with what it finds there."""

    def __init__(self):
        super().__init__()
        self.router, self.linear = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x, found):
        aux = found["aux"]
        number = len(aux)
        shares = self.router(x).softmax(-1)
        aux.append(shares.square().mean() * (number + 1))
        assert found["record"].aux is found["notes"].aux is found["registered"].aux is aux
        y = x + self.linear(x) * shares[:, :1] / (number + 1)
        if number:
            y = y + aux[number - 1] * found["states"][-1].sin()  # an earlier block's
        found["states"].append(y.clone())
        found["notes"].seen[number] = x
        found["by name"]["losses"].append(y.mean())
        found["window"].append(y)
        found["set"].add(number)
        return y + sum(found["window"]) + len(found["set"]) + len(found["by name"]["losses"])


def collect(model):
    aux, states, x = [], collections.deque(), model.stem(torch.randn(4, 8))
    found = collections.OrderedDict(aux=aux, states=states, record=Record(states, aux), notes=Notes(aux, {}))
    found["registered"], found["by name"] = Registered(x, aux), collections.defaultdict(list)
    found["window"], found["set"] = collections.deque(maxlen=2), set()
    x = one_after_the_other(model.blocks, x, found)
    assert list(found["notes"].seen) == list(range(len(model.blocks))) == sorted(found["set"])
    losses = [*aux, *found["by name"]["losses"], *[state.square().mean() for state in states]]
    (x.square().mean() + sum(losses)).backward()
    return [[each.detach() for each in losses], len(aux)]


def test_what_a_unit_puts_into_containers_is_the_callers(offload):
    compare(Stack(Collecting, num_blocks=4), offload, collect)


def test_a_cache_in_a_container_grows_once(offload):
    transformers = pytest.importorskip("transformers")

    def attends(block, x, memory):
        keys, values = memory["cache"].update(block.linear(x)[None, None], block.other(x)[None, None], 0)
        return F.scaled_dot_product_attention(x[None, None], keys, values)[0, 0]

    def step(model):
        memory = {"cache": transformers.DynamicCache()}
        loss = one_after_the_other(model.blocks, model.stem(torch.randn(4, 8)), memory).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        assert memory["cache"].get_seq_length() == 4 * len(model.blocks)
        return memory["cache"].layers[0].keys.detach()

    compare(Stack(does(attends)), offload, step)


def several_backwards_over_one_graph(model):
    out = model(torch.randn(4, 8))
    out.square().mean().backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    out.sin().sum().backward(retain_graph=True)
    out.cos().sum().backward()
    return first


def gradients_of_gradients(model):
    x = torch.randn(4, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    grad.square().mean().backward()
    return grad.detach()


def an_inner_step_of_maml(model):
    own = dict(model.named_parameters())
    inner = torch.autograd.grad(loss_of(model), list(own.values()), create_graph=True)
    new = {name: each - 0.5 * grad for (name, each), grad in zip(own.items(), inner, strict=True)}
    loss = torch.func.functional_call(model, new, (torch.randn(4, 8),)).square().mean()
    (loss + model(torch.randn(4, 8)).mean()).backward()
    return loss.detach()


def parametrized():
    block = Residual()
    parametrize.register_parametrization(block.up, "weight", nn.Tanh())
    return block


def parametrizations_that_are_kept_for_several_uses(model):
    train(model)
    with parametrize.cached():
        loss = model(model(torch.randn(4, 8))).square().mean()
    loss.backward()


def autocast(model):
    with torch.autocast(model.stem.weight.device.type, torch.bfloat16):
        out = model(torch.randn(4, 8))
    out.float().square().mean().backward()
    return out.detach()


class Limits(nn.Linear):
    def forward(self, x):
        return torch.max(super().forward(x), torch.full((), -1.0, device=x.device)).sin()


def default_dtype_of_the_forward(model):
    """Lightning sets it in a step and not in its backward, where precision is "bf16-true"."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = loss_of(model)
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    assert torch.get_default_dtype() == torch.float32


def leaving_training_mode_before_backward(model):
    loss = loss_of(model)
    model.eval()
    loss.backward()
    assert not any(module.training for module in model.modules())
    model.train()


def freezing_before_backward(model):
    """As alternating optimizers do."""
    loss = loss_of(model)
    model.blocks[1].requires_grad_(False)
    loss.backward()
    assert not any(p.requires_grad for p in model.blocks[1].parameters())
    model.blocks[1].requires_grad_(True)


def backward_in_another_order_than_forward(model):
    losses = [loss_of(model) for _ in range(3)]
    for index in (1, 2, 0):
        losses[index].backward()


class Plus(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = [delta]

    def forward(self, weight):
        return weight + self.delta[0].sin()


def adapts_itself(block, x):
    """A parametrization sets the weight to itself, which is no write: two forwards come before a backward."""
    parametrize.register_parametrization(block.linear, "weight", Plus(block.other.weight))
    try:
        return block.linear(x)
    finally:
        parametrize.remove_parametrizations(block.linear, "weight", leave_parametrized=False)


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("ema", torch.zeros(8))
        self.register_buffer("big", torch.zeros(200, 200))
        self.mask = torch.ones(8)
        self.num_calls = 0
        self.losses, self.sums = [], {"own": [torch.zeros(8)]}

    def forward(self, x):
        self.num_calls += 1
        self.sums["own"][0].add_(0.1)
        y = torch.tanh(self.linear(x)) / self.num_calls + self.ema.clone() * x + self.mask + self.sums["own"][0]
        self.ema.data.lerp_(y.detach().mean(0), 0.5)
        self.mask *= 0.9
        self.big.data.add_(1.0)
        y = y * self.big[0, 0].clone()
        y = y + getattr(self, "last", 0)
        self.last = y.detach()  # which the first forward makes
        self.losses.append(y.square().mean())
        return y


class Shares(nn.Module):
    """Is given what it has as attributes."""

    def __init__(self):
        super().__init__()
        self.linear, self.mask, self.notes = nn.Linear(8, 8), torch.ones(8), Notes([], {})

    def forward(self, x, notes, seen, mask):
        notes.aux.append(x.mean())
        seen["number"] = len(self.notes.aux)
        mask.mul_(0.9)
        return x + torch.tanh(self.linear(x)) * self.notes.seen["number"] * self.mask


def shares(blocks, x):
    for block in blocks:
        x = block(x, block.notes, block.notes.seen, block.mask)
    return x


def counters_lists_and_other_state_of_modules(model):
    losses, blocks = [loss_of(model) for _ in range(2)], model.blocks
    (sum(losses) + sum(loss for block in blocks for loss in block.losses)).backward()
    state = [(each.num_calls, each.mask.clone(), each.last, [*map(torch.detach, each.losses)]) for each in blocks]
    sums = [each.sums["own"][0].clone() for each in blocks]
    for block in blocks:
        block.losses.clear()
    return state, sums


def two_graphs_and_several_backwards(model):
    losses = [loss_of(model) for _ in range(2)]
    losses[0].backward(retain_graph=True)
    sum(losses).backward()


def test_weights_of_one_forward_that_are_written_to_are_old(offload):
    model = Stack(Residual)
    offload.attach(find_units(model, "blocks.*"))
    new = {name: p * 2 for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, new, (torch.randn(4, 8),)).mean()
    with torch.no_grad():
        new["blocks.1.up.weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: parameter"):
        loss.backward()


def gradient_inside(block, x):
    y = x + torch.tanh(block.linear(x))
    (grad,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    return y + grad


def overwrites(block, x):
    x.mul_(1.5).add_(0.25)
    return torch.tanh(block.linear(x)) + x


def overwrites_without_gradient(block, x, scale, count):
    count += 1
    scale.mul_(1.5)
    return torch.tanh(block.linear(x * scale.clone())) * count.clone()


def is_added_to_afterwards(blocks, x):
    for block in blocks:
        x += block(x)  # legal: no block needs its input for its own gradient
    return x


def with_changing_context(blocks, x):
    context = x * 2
    for block in blocks:
        x = block(x, context)
        with torch.no_grad():
            context.add_(1.0)
    return x


def one_tensor_twice(block, a, b):
    assert a is b
    a.add_(1.0)
    return block.linear(a) * b


def given_twice(blocks, x):
    for block in blocks:
        x = block(x, x)
    return x


def returns_its_input(blocks, x):
    for index, block in enumerate(blocks):
        y = block(x, index == 1)
        assert (y is x) == (index == 1)
        x = y
    return x


def adapters():
    model = Stack(does(lambda block, x: torch.tanh(block.linear(x)) + block.other(x)))
    for frozen in (model.stem, *(block.linear for block in model.blocks)):
        frozen.requires_grad_(False)
    return model


MODELS = {
    several_backwards_over_one_graph: lambda: Stack(partial(Residual, p=0.3)),
    gradients_of_gradients: lambda: Stack(Residual),
    an_inner_step_of_maml: lambda: Stack(Residual),
    parametrizations_that_are_kept_for_several_uses: lambda: Stack(parametrized),
    autocast: lambda: Stack(partial(Residual, p=0.1)),
    default_dtype_of_the_forward: lambda: Stack(lambda: Limits(8, 8)).bfloat16(),
    leaving_training_mode_before_backward: lambda: Stack(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    ),
    freezing_before_backward: lambda: Stack(Residual),
    backward_in_another_order_than_forward: lambda: Stack(partial(Residual, p=0.3)),
    counters_lists_and_other_state_of_modules: lambda: Stack(Stateful),
    (two_graphs_and_several_backwards, "a unit changes its input"): lambda: Stack(does(overwrites)),
    (two_graphs_and_several_backwards, "a unit changes its weights"): lambda: Stack(does(adapts_itself)),
    # what follows: one loss and its backward
    "residual": lambda: Stack(Residual),
    "dropout draws the same numbers": lambda: Stack(lambda: Residual(p=0.5)),
    "a backward inside a unit's forward": lambda: Stack(does(gradient_inside)),
    "a unit changes its input": lambda: Stack(does(overwrites)),
    "and inputs without gradient": lambda: Stack(
        does(overwrites_without_gradient),
        run=lambda blocks, x: one_after_the_other(blocks, x, torch.ones(8), torch.zeros(1, dtype=torch.long)),
    ),
    "an input changes after its unit": lambda: Stack(
        does(lambda block, x: torch.cat([x, x]).sum(0, keepdim=True).add(0.5) * block.scale.sin()),
        run=is_added_to_afterwards,
    ),
    "a tensor changes between two units": lambda: Stack(
        does(lambda block, x, context: x * block.scale + context.sin().detach() + context.sum()),
        run=with_changing_context,
    ),
    "one tensor twice in a call": lambda: Stack(does(one_tensor_twice), run=given_twice),
    "inside a checkpoint of the user": lambda: Stack(
        lambda: Residual(p=0.3),
        run=lambda blocks, x: checkpoint(nn.Sequential(*blocks).forward, x, use_reentrant=False).sin(),
    ),
    "a unit returns its input": lambda: Stack(
        does(lambda block, x, skip: x if skip else x + torch.tanh(block.linear(x))), run=returns_its_input
    ),
    "frozen inputs and adapters": adapters,
    "arguments are attributes": lambda: Stack(Shares, run=shares),
}


@pytest.mark.parametrize(
    "case", MODELS, ids=lambda case: case[1] + " twice" if isinstance(case, tuple) else getattr(case, "__name__", case)
)
def test_losses_gradients_and_weights_are_those_of_the_plain_model(offload, case):
    step = case[0] if isinstance(case, tuple) else train if isinstance(case, str) else case
    compare(MODELS[case](), offload, step)


def test_one_tensor_given_to_several_units_is_stored_once(offload):
    def cross(block, x, context):
        return x + torch.softmax(block.linear(x) @ block.other(context).T, -1) @ context

    compare(Stack(does(cross), run=lambda blocks, x: one_after_the_other(blocks, x, x.tanh())), offload, train)
    if offload.engine.computes_on_host:  # else some copies of the step before are in flight
        assert offload.memory.peak_bytes < (3 + 1) * (4 * 8 * 4 + 64)


def makes_a_module(block, x):
    block.later = getattr(block, "later", None) or nn.Linear(8, 8, device=x.device)
    return block.later(x)


def makes_a_weight(block, x):
    block.later = getattr(block, "later", None) or nn.Parameter(torch.randn((), device=x.device))
    return block.later * x


def test_a_dry_run_takes_no_two_tensors_for_one(offload):
    """Without values all addresses are 0."""
    if not offload.engine.computes_on_host:
        pytest.skip("needs tensors on the meta device, as a dry run")
    block = does(lambda block, x: block.norm(x.relu_()))()
    block.norm = nn.BatchNorm1d(8)
    model = Stack(lambda: block).to("meta")
    offload.attach(find_units(model, "blocks.*"))
    model(torch.ones(4, 8, device="meta")).sum().backward()


def give_a_part(blocks, x):
    blocks[0].whole = torch.ones(8, device=x.device)
    return blocks[0](x, blocks[0].whole[:4])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: Stack(does(makes_a_module)), "the forward of Does made or dropped modules or weights"),
        (lambda: Stack(does(makes_a_weight)), "the forward of Does made or dropped modules or weights"),
        (
            lambda: Stack(does(lambda block, x, part: part.add_(1) + x[:, :4]), run=give_a_part),
            "shares memory with .* a buffer",
        ),
    ],
)
def test_what_a_recompute_cannot_repeat_is_an_error(offload, model, said):
    made = model()
    offload.attach(find_units(made, "blocks.*"))
    with pytest.raises(UnsupportedError, match=said):
        loss_of(made)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_module_of_torch_jit_in_a_unit_is_an_error(offload):
    model = Stack(lambda: nn.Sequential(torch.jit.script(nn.Linear(8, 8))))
    with pytest.raises(UnsupportedError, match=r"unit `blocks\.0` has a module of torch\.jit"):
        offload.attach(find_units(model))


def test_an_error_in_a_unit_leaves_nothing_behind(offload):
    """Its checkpoint is over, though the error, and so every frame up to it, is still there. Not so in torch 2.11."""

    class Refuses(nn.Module):
        num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            raise ValueError(f"not with {x.sin().shape}")

    model = Stack(Refuses)
    offload.attach(find_units(model, "blocks.*"))
    with pytest.raises(ValueError, match="not with") as kept:
        model(torch.randn(2, 8))
    later = torch.full((3,), 2.0, requires_grad=True)
    (later * later).sum().backward()
    assert later.grad.tolist() == [4.0, 4.0, 4.0]
    assert model.blocks[0].num_calls == 1 and kept.value


def after_each(write):
    """Write to the input of each unit after it."""

    def run(blocks, x):
        for block in blocks:
            y = block(x)
            write(x)
            x = y
        return x

    return run


def between(write):
    """Give one tensor to two units, and write to it between them."""

    def run(blocks, x):
        first = blocks[0](x)
        write(x)
        return first + blocks[1](x)

    return run


def once_the_input_is_gone(blocks, x):
    """Write through what outlives the inputs: an array, a storage and a DLPack alias, after all units."""
    array = x.detach().numpy()
    x = blocks[0](x)
    storage = x.untyped_storage()
    x = blocks[1](x)
    alias = torch.from_dlpack(x.detach())
    x = blocks[2](x)
    array[...] = 0
    storage.fill_(0)
    alias.zero_()
    return x


WRITES = {
    "without gradient": after_each(lambda x: torch.no_grad()(x.zero_)()),
    "without a version": after_each(lambda x: x.data.zero_()),
    "through numpy": after_each(lambda x: x.detach().numpy().fill(0)),
    "once the input is gone": once_the_input_is_gone,
    "between two units": between(lambda x: x.mul_(2.0)),
    "other memory between, at the same version": between(lambda x: setattr(x, "data", x.data * 3.0)),
    "other values between, at the same version": between(lambda x: x.data.mul_(3.0)),
}
keeps_no_input = does(lambda block, x: 1.5 * torch.tanh(block.linear(x * 2.0)))
"""Its graph keeps neither the input nor the output itself, so that torch allows to change them afterwards."""


@pytest.mark.parametrize("engine", ["host"], indirect=True)
@pytest.mark.parametrize("writes", WRITES)
def test_writes_to_inputs_that_torch_sees_or_does_not_change_no_gradient(offload, writes):
    compare(Stack(keeps_no_input, run=WRITES[writes]), offload, train)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_a_write_between_two_backwards_of_one_graph_is_seen(offload):
    block = keeps_no_input()
    offload.attach([("block", block)])
    x, grads = torch.randn(4, 8, requires_grad=True), []
    middle = x * 1.0
    loss = block(middle).sum()
    for _ in range(2):
        grads += torch.autograd.grad(loss, x, retain_graph=True)
        middle.data.zero_()
    assert torch.equal(*grads)
