"""The same parameters and gradients for torch's Adam and ours."""

import torch

from lightning_cxl.optim.cpu_adam import CPUAdam


def parameters(*shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, step):
    """The same gradients for every set of parameters."""
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape, generator=generator))


def take_step(step, *pairs):
    for params, optimizer in pairs:
        set_gradients(params, step)
        optimizer.step()


def assert_equal(ours, theirs):
    """Tensors, or those in lists and dicts, are equal, bit for bit."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def assert_close(ours, theirs, tolerance=1e-6):
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def assert_same_state(ours, theirs):
    """Momentum, variance and step equal torch's to the bit where its kernels fuse multiply and add."""
    exact = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert list(ours) == list(theirs)
    for key in ours:
        assert list(ours[key]) == list(theirs[key])
        for name in ours[key]:
            assert ours[key][name].dtype == theirs[key][name].dtype
            assert ours[key][name].stride() == theirs[key][name].stride()
            torch.testing.assert_close(ours[key][name], theirs[key][name], **({"rtol": 0, "atol": 0} if exact else {}))


def pair(make, shapes=((5, 3), (7,), ()), **options):
    """The same parameters under torch's optimizer and under the CPUAdam that replaced one like it."""
    theirs, ours = parameters(*shapes), parameters(*shapes)
    return theirs, make(theirs, **options), ours, CPUAdam.from_torch(make(ours, **options))
