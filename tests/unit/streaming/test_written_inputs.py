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


def blocks_of(num_blocks=3, *, offloaded):
    """Blocks; where they are offloaded, their inputs are copied to recycled host memory."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(num_blocks))
    if offloaded:
        offload = ActivationOffload(HostEngine(), RecyclingMemory().allocate, min_bytes=1)
        offload.attach([(str(index), each) for index, each in enumerate(blocks)])
    return blocks


def source(seed=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def after_each(write):
    """Write to the input of each unit after it, given its output."""

    def compute(blocks, x):
        for block in blocks:
            y = block(x)
            write(x, y)
            x = y
        return x

    return compute


def between(write):
    """Give one tensor to two units, and write to it between them."""

    def compute(blocks, x):
        first = blocks[0](x)
        write(x)
        return first + blocks[1](x)

    return compute


def adds_up(blocks, x):
    for block in blocks:
        x.add_(block(x))
    return x


def gives_one_to_several(blocks, x):
    shared = x * 3.0
    for block in blocks:
        x = block(x, shared)
    return x


def writes_once_the_input_is_gone(blocks, x):
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


def replaces_data(x):
    x.data = x.data * 3.0


WRITES = {
    "none": after_each(lambda x, y: None),
    "in place": adds_up,
    "without gradient": after_each(lambda x, y: torch.no_grad()(x.zero_)()),
    "one to several": gives_one_to_several,
    "without a version": after_each(lambda x, y: x.data.zero_()),
    "through numpy": after_each(lambda x, y: x.detach().numpy().fill(0)),
    "once the input is gone": writes_once_the_input_is_gone,
    "between two units": between(lambda x: x.mul_(2.0)),
    "other memory between, at the same version": between(replaces_data),
    "other values between, at the same version": between(lambda x: x.data.mul_(3.0)),
}


@pytest.mark.parametrize("writes", WRITES)
def test_gradients_are_those_without_offloading_in_every_step(writes):
    found = []
    for offloaded in (False, True):
        blocks = blocks_of(offloaded=offloaded)
        found.append([])
        for step in range(3):
            x = source(step)
            blocks.zero_grad()
            loss = WRITES[writes](blocks, x * 1.0).square().sum()
            (loss + 0 * sum(p.sum() for p in blocks.parameters())).backward()  # some blocks may not have been used
            found[-1] += [x.grad, *(p.grad.clone() for p in blocks.parameters())]
    assert all(map(torch.equal, *found))


def test_a_write_between_two_backwards_of_one_graph_is_seen():
    x, grads = source(), []
    middle = x * 1.0
    loss = blocks_of(1, offloaded=True)[0](middle).sum()
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
