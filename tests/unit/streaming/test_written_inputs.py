"""Inputs of units that are written to after their unit, seen by torch or not: gradients stay those of plain torch."""

import pytest
import torch
from torch import nn

from lightning_cxl.devices.transfer import HostEngine
from lightning_cxl.streaming.activations import ActivationOffload, same_bits
from tests.fakes import RecyclingMemory

WIDTH = 16


class Block(nn.Module):
    """Its graph keeps neither the input nor the output itself, so that torch allows to change them afterwards."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y=None):
        return 1.5 * torch.tanh(self.linear(x * 2.0 if y is None else x * 2.0 + y))


class Rig:
    """Blocks whose inputs are copied to recycled host memory."""

    def __init__(self, num_blocks=3):
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.memory = RecyclingMemory()
        self.offload = ActivationOffload(HostEngine(), self.memory.allocate, min_bytes=1)
        self.offload.attach([(str(index), each) for index, each in enumerate(self.blocks)])

    def plain(self):
        """Return the same blocks, not offloaded."""
        torch.manual_seed(0)
        return nn.ModuleList(Block() for _ in self.blocks)


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


def overwrites(blocks, x):
    """Change the input of a unit after it."""
    for block in blocks:
        y = block(x)
        x.add_(y)
    return x.square().sum()


def overwrites_without_gradient(blocks, x):
    """Zero what is not needed any more."""
    for block in blocks:
        y = block(x)
        with torch.no_grad():
            x.zero_()
        x = y
    return x.square().sum()


def gives_one_to_several(blocks, x):
    """Give one tensor to all units."""
    shared = x * 3.0
    for block in blocks:
        x = block(x, shared)
    return x.square().sum()


def changes_between(blocks, x):
    """Change a tensor between two units that get it."""
    first = blocks[0](x)
    x.mul_(2.0)
    return (first + blocks[1](x)).square().sum()


def zeroes_data(blocks, x):
    """Write to the memory of an input without a version, and drop the input before backward."""
    for block in blocks:
        y = block(x)
        x.data.zero_()
        x = y
    return x.square().sum()


def writes_through_numpy(blocks, x):
    """Write through an array that is made after the unit."""
    for block in blocks:
        y = block(x)
        x.detach().numpy()[...] = 0
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


WRITES = [
    chain, overwrites, overwrites_without_gradient, gives_one_to_several, changes_between, zeroes_data,
    writes_through_numpy, writes_once_the_input_is_gone, replaces_data_between, writes_data_between,
]  # fmt: skip


@pytest.mark.parametrize("compute", WRITES)
def test_gradients_are_those_without_offloading_in_every_step(compute):
    rig = Rig()
    expected = gradients(rig.plain(), compute_kept(compute), steps=3)
    assert_equal(gradients(rig.blocks, compute_kept(compute), steps=3), expected)


def compute_kept(compute):
    """Give plain blocks all of their parameters a gradient, also where `compute` uses only some."""
    return lambda blocks, x: compute(blocks, x) + 0 * sum(p.sum() for p in blocks.parameters())


def test_a_write_between_two_backwards_of_one_graph_is_seen():
    rig, grads = Rig(1), []
    x = source()
    middle = x * 1.0
    loss = rig.blocks[0](middle).sum()
    for _ in range(2):
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        grads.append(grad)
        middle.data.zero_()
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bits_are_compared_of_every_dtype_and_layout(dtype):
    tensor = torch.arange(12.0).reshape(3, 4).to(dtype).t()
    other = tensor.clone()
    assert same_bits(tensor, other)
    other[1, 2] = 0
    assert not same_bits(tensor, other)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
