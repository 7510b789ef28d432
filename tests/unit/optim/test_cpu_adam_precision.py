"""`CPUAdam` with bfloat16 parameters and low-precision state, and its copies and state dicts between all of these."""

import copy
import pickle

import pytest
import torch

from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.kernels import join, split
from tests.numerics.reference.blockwise import dequantize
from tests.unit.optim.adam_pairs import assert_close, assert_equal, parameters, set_gradients

STATES = ["fp32", "bf16", "8bit"]
LARGE, SMALL = (96, 64), (40,)
HYPER = {"lr": 0.01, "weight_decay": 0.1}


def bf16(params):
    return [torch.nn.Parameter(p.detach().bfloat16()) for p in params]


def half_gradients(params, step, dtype=torch.bfloat16):
    """The same gradients, rounded to `dtype`, for parameters of any dtype."""
    shadows = [torch.nn.Parameter(torch.zeros(p.shape)) for p in params]
    set_gradients(shadows, step)
    for p, shadow in zip(params, shadows, strict=True):
        p.grad_dtype = None
        p.grad = shadow.grad.to(dtype)


def masters(optimizer):
    """The float32 weights that an optimizer has, whatever the form."""
    found = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        remainder = optimizer.state[p].get("remainder")
        found.append(p.detach() if remainder is None else join(p.detach(), remainder))
    return found


@pytest.mark.parametrize("grads", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_bfloat16_parameters_train_like_float32_ones(state, grads):
    halves = bf16(parameters(LARGE, SMALL, (), (0,)))
    wholes = [torch.nn.Parameter(p.detach().float()) for p in halves]
    ours, other = CPUAdam(halves, state=state, **HYPER), CPUAdam(wholes, state=state, **HYPER)
    for step in range(5):
        for params, optimizer in ((halves, ours), (wholes, other)):
            half_gradients(params, step, grads)
            optimizer.clip_grad_norm_(0.7)
            optimizer.step()
    for p, master, whole in zip(halves, masters(ours), wholes, strict=True):
        assert torch.equal(master, whole) and torch.equal(p.detach(), split(whole.detach())[0])
    assert ours.state[halves[0]]["remainder"].any()
    for p, whole in zip(halves, wholes, strict=True):
        assert_equal({key: ours.state[p][key] for key in other.state[whole]}, other.state[whole])


def test_stochastic_rounding_depends_on_seed_and_order_only():
    def run(seed=0, **options):
        params = parameters(LARGE, LARGE)
        optimizer = CPUAdam(params, state="bf16", seed=seed, **options)
        for step in range(3):
            for p in params:
                p.grad = torch.full_like(p, 0.3 + step)
            optimizer.step()
        return [optimizer.state[p]["exp_avg"] for p in params]

    one = run()
    assert torch.equal(one[0], run(num_threads=3)[0]) and torch.equal(one[0], run(isa="baseline")[0])
    assert not torch.equal(one[0], one[1]), "each parameter rounds on its own"
    assert not torch.equal(one[0], run(seed=1)[0])


def test_gradients_change_format_address_and_order_from_step_to_step():
    ours, theirs = parameters((6, 8)), parameters((6, 8))
    adam, torch_adam = CPUAdam(ours, **HYPER), torch.optim.AdamW(theirs, **HYPER)
    forms = [
        lambda g: g, lambda g: g.T.contiguous().T, lambda g: torch.cat([g, g], 1)[:, :8], lambda g: torch._neg_view(-g),
        lambda g: g.bfloat16(), lambda g: g.half(), lambda g: g.double(), lambda g: g,
    ]  # fmt: skip
    for step, form in enumerate(forms):
        set_gradients(theirs, step)
        grad = form(theirs[0].grad)
        theirs[0].grad = grad.float().contiguous()
        ours[0].grad = None
        ours[0].grad_dtype = None
        ours[0].grad = grad
        torch_adam.step()
        adam.step()
    assert_close(ours, theirs)


def trained(state, dtype=torch.float32, steps=3, **options):
    params = parameters(LARGE, SMALL)
    params = bf16(params) if dtype is torch.bfloat16 else params
    adam = CPUAdam(params, state=state, **{**HYPER, **options})
    train(adam, steps)
    return params, adam


def train(adam, steps, first=0):
    for step in range(first, first + steps):
        half_gradients(adam.param_groups[0]["params"], step)
        adam.step()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", STATES)
def test_copies_go_on_alike_and_independently(state, dtype, how):
    params, adam = trained(state, dtype, seed=3)
    before = [p.detach().clone() for p in params]
    adam.clip_grad_norm_(0.5)
    twin = how(adam)
    assert (twin.state_precision, twin.seed, twin.grad_scale) == (state, 3, adam.grad_scale)
    twin.grad_scale = 1.0
    assert adam.grad_scale < 1.0
    adam.grad_scale = 1.0
    train(twin, 2, first=3)
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    train(adam, 2, first=3)
    assert_equal(masters(adam), masters(twin))


@pytest.mark.parametrize("second", STATES)
@pytest.mark.parametrize("first", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_state_dicts_convert(first, second, dtype):
    params, adam = trained(first, dtype)
    saved = copy.deepcopy(adam.state_dict())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = CPUAdam(copies, state=second, **HYPER)
    other.load_state_dict(adam.state_dict())
    assert other.state[copies[0]]["step"] == 3
    assert_equal(masters(adam), masters(other))
    for index, p in enumerate(copies):
        for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
            was, now = read(saved["state"][index], number), read(other.state[p], number)
            exact = second in (first, "fp32") or p.numel() < 4096
            tolerance = 0 if exact else {"bf16": 2**-8, "8bit": 0.015}[second] * float(was.abs().max())
            torch.testing.assert_close(now, was, rtol=0, atol=tolerance, msg=key)
    train(other, 1, first=3)
    if first == second:
        train(adam, 1, first=3)
        assert_equal(masters(adam), masters(other))
    assert saved["state"][0].keys() == adam.state_dict()["state"][0].keys()


def read(entry, number):
    plain = entry.get(("exp_avg", "exp_avg_sq")[number - 1])
    if plain is not None:
        return plain.float()
    return dequantize(entry[f"state{number}"], entry[f"absmax{number}"], unsigned=number == 2)


def test_float32_parameters_take_the_remainders_of_a_bfloat16_state():
    params, adam = trained("fp32", torch.bfloat16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in params]
    other = CPUAdam(wide, **HYPER)
    other.load_state_dict(adam.state_dict())
    assert all(torch.equal(p.detach(), m) for p, m in zip(wide, masters(adam), strict=True))
    assert all("remainder" not in entry for entry in other.state.values())


def test_remainders_that_torch_carried_along_are_stale():
    params, adam = trained("fp32", torch.bfloat16)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in params]
    torch_adam = torch.optim.AdamW(theirs, **HYPER)
    torch_adam.load_state_dict(adam.state_dict())
    for p in theirs:
        p.grad = torch.ones_like(p)
    torch_adam.step()
    for make in (lambda p: p.detach().clone(), lambda p: p.detach().float()):
        back = [torch.nn.Parameter(make(p)) for p in theirs]
        other = CPUAdam(back, **HYPER)
        other.load_state_dict(torch_adam.state_dict())
        assert all(torch.equal(m, p.detach().float()) for m, p in zip(masters(other), theirs, strict=True))
        assert other.state[back[0]]["step"] == 4


@pytest.mark.parametrize("second", [LARGE, SMALL])
def test_bitsandbytes_itself(second):
    """Its optimizer continues ours and ours continues its own, on the CPU, through its own state dict."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    theirs = parameters(LARGE, second)
    bnb = bitsandbytes.optim.AdamW8bit(theirs, **HYPER)
    train(bnb, 3)
    ours = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    adam = CPUAdam(ours, state="8bit", **HYPER)
    adam.load_state_dict(bnb.state_dict())
    for key in ("state1", "state2", "absmax1", "absmax2"):
        assert_equal(adam.state[ours[0]][key], bnb.state[theirs[0]][key])
    optimizers = [bnb, adam]
    if second is SMALL:  # it keeps this state in float32, under the names of codes, and cannot read ours
        assert_equal(adam.state[ours[1]]["exp_avg"], bnb.state[theirs[1]]["state1"])
    else:
        optimizers.append(bitsandbytes.optim.AdamW8bit([torch.nn.Parameter(p.detach().clone()) for p in ours], **HYPER))
        optimizers[-1].load_state_dict(adam.state_dict())
    for optimizer in optimizers:
        train(optimizer, 2, first=3)
        torch.testing.assert_close(optimizer.param_groups[0]["params"], theirs, rtol=0, atol=5e-4)
