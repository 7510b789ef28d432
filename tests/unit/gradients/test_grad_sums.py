"""`GradientOffload` on shared 16-bit parameters: what autograd delivers is added up in float32, or stochastically."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cxl.devices import HostEngine
from lightning_cxl.gradients.guard import GradientMeter
from lightning_cxl.gradients.offload import GradientOffload, attach_zero_grad, detach_zero_grad
from lightning_cxl.memory.host_memory import mirror
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.masters import MasterWeights


class Rig:
    """Offloaded gradients of parameters of its own, and a record of the memory it asked for."""

    def __init__(self, *shapes, dtype=torch.bfloat16, form="split", half_sums=False, hook=None):
        generator = torch.Generator().manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
        for p in self.params if hook else []:
            p.register_post_accumulate_grad_hook(hook)
        self.asked = []

        def allocate(parameter, role, dtype):
            self.asked.append((role, dtype))
            return mirror(parameter, dtype, lambda count, dt: torch.empty(count, dtype=dt))

        def allocates(wanted, role):
            return [allocate(parameter, role, dtype) for parameter, dtype in wanted]

        masters = MasterWeights({}, allocate)
        self.pairs = [masters.adopt(p, form) for p in self.params]
        self.asked.clear()
        self.meter = GradientMeter()
        self.grads = GradientOffload(HostEngine(), allocates, self.meter, None, lambda: None, {}, half_sums=half_sums)
        self.grads.watch(self.pairs)

    def backward(self, step):
        made = []
        for index, p in enumerate(self.params):
            generator = torch.Generator().manual_seed(100 * step + index)
            made.append(torch.randn(p.shape, generator=generator).to(p.dtype))
        torch.autograd.backward(self.params, made)
        return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32_from_the_second_gradient_on(dtype):
    form = "split" if dtype is torch.bfloat16 else "fp32"
    rig = Rig((40, 3), (), dtype=dtype, form=form)
    total = [g.float() for g in rig.backward(0)]
    targets = [pair.master for pair in rig.pairs]
    assert [p.grad.dtype for p in targets] == [dtype, dtype]
    for step in (1, 2, 3):
        total = [t + g.float() for t, g in zip(total, rig.backward(step), strict=True)]
        for p, expected in zip(targets, total, strict=True):
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, expected)
    sums = rig.meter.sums([p.grad for p in targets])
    assert sums == pytest.approx([float(t.double().square().sum()) for t in total], rel=1e-12)


def test_bf16_sums_stay_in_the_memory_they_have():
    rig = Rig((20_000,), half_sums=True)
    (p,) = rig.params
    first = rig.backward(0)[0]
    memory = p.grad.data_ptr()
    second = rig.backward(1)[0]
    exact = first.float() + second.float()
    assert p.grad.dtype == torch.bfloat16 and p.grad.data_ptr() == memory
    assert not torch.equal(p.grad, exact.bfloat16()), "not to nearest"
    torch.testing.assert_close(p.grad.float(), exact, rtol=2**-7, atol=0)


def test_two_runs_round_alike_and_two_sums_differently():
    def run():
        rig = Rig((5000,), (5000,), half_sums=True)
        for step in range(3):
            torch.autograd.backward(rig.params, [torch.full_like(p, 1.001 + step / 300) for p in rig.params])
        return [p.grad for p in rig.params]

    one, two = run(), run()
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert not torch.equal(one[0], one[1])


def test_float32_parameters_are_added_by_autograd_itself():
    rig = Rig((7,), dtype=torch.float32)
    (p,) = rig.params
    first = rig.backward(0)[0]
    memory = p.grad.data_ptr()
    second = rig.backward(1)[0]
    assert p.grad.data_ptr() == memory and torch.equal(p.grad, first + second)
    assert rig.asked == [(TensorRole.COMPUTE_GRADS, torch.float32)] * 2, "reserved, and the first gradient"


def test_a_gradient_at_the_address_of_an_old_one_of_ours_is_not_taken_for_it():
    """The allocator may give memory that was only reserved, or has been given back, to autograd."""
    rig = Rig((7,), dtype=torch.float32)
    (pair,) = rig.pairs
    for step in range(2):
        ours = rig.grads._new_memory([pair], [torch.float32])[0] if step == 0 else pair.master.grad
        assert rig.grads.is_ours(pair, ours) and not rig.grads.is_ours(pair, ours.detach())
        same_memory = ours.detach()
        del ours
        pair.master.grad = None
        rig.asked.clear()
        pair.compute.grad = same_memory
        rig.grads._receive_shared(pair)
        assert rig.asked == [(TensorRole.COMPUTE_GRADS, torch.float32)]
        assert pair.master.grad is not same_memory and pair.master.grad.data_ptr() != same_memory.data_ptr()


def test_another_optimizers_gradients_are_float32():
    rig = Rig((7,), form=None)
    made = rig.backward(0)[0]
    pair = rig.pairs[0]
    assert not pair.is_shared and pair.compute.grad is pair.master.grad
    assert pair.master.grad.dtype == torch.float32 and torch.equal(pair.master.grad, made.float())


def test_the_user_may_take_replace_and_drop_gradients():
    rig = Rig((50,))
    (p,) = rig.params
    first = rig.backward(0)[0]
    kept = p.grad
    p.grad = torch.ones_like(p)
    second = rig.backward(1)[0]
    assert torch.equal(p.grad, 1 + second.float()) and torch.equal(kept, first)
    p.grad = None
    third = rig.backward(2)[0]
    assert p.grad.dtype == torch.bfloat16 and torch.equal(p.grad, third)
    p.grad.zero_()
    assert torch.equal(rig.backward(3)[0].float(), p.grad.float())
    p.grad = torch.ones(1, dtype=torch.bfloat16).expand(50)
    fifth = rig.backward(4)[0]
    assert torch.equal(p.grad, 1 + fifth.float())


def test_a_gradient_in_another_element_order():
    rig = Rig((6, 8))
    (p,) = rig.params
    for _ in range(2):
        p.backward(torch.arange(48.0).view(8, 6).T.bfloat16())
    assert torch.equal(p.grad, torch.arange(48.0).view(8, 6).T * 2)


def test_frozen_parameters_cost_nothing_until_they_are_unfrozen():
    rig = Rig((5,), (6,))
    rig.params[1].requires_grad_(False)
    rig.params[0].backward(torch.ones_like(rig.params[0]))
    assert rig.params[1].grad is None
    rig.params[1].requires_grad_(True)
    for _ in range(2):
        rig.params[1].backward(torch.ones_like(rig.params[1]))
    assert rig.params[1].grad.dtype == torch.float32 and rig.params[1].grad.tolist() == [2.0] * 6


def test_a_backward_that_fails_adds_nothing_to_a_later_one():
    rig = Rig((50,))
    (p,) = rig.params
    rig.backward(0)
    for clears in (False, True):
        rig.grads._stash_sum(rig.pairs[0])  # autograd is about to add, and fails
        assert p.grad is None, "what `zero_grad` leaves, too"
        if clears:
            rig.grads.start_backward()
            assert not rig.grads._stash
        new = rig.backward(1)[0]
        assert torch.equal(p.grad, new)


def test_hooks_the_user_had_before_see_the_sum():
    seen = []
    rig = Rig((5,), hook=lambda p: seen.append(p.grad.clone()))
    total = rig.backward(0)[0].float()
    total = total + rig.backward(1)[0].float()
    assert torch.equal(seen[1], total) and len(seen) == 2


def test_close_gives_up_what_a_failed_backward_left():
    rig = Rig((5,))
    rig.backward(0)
    rig.grads._stash_sum(rig.pairs[0])
    rig.params[0].grad = torch.ones_like(rig.params[0])  # autograd's, alone
    rig.grads.close()
    assert rig.params[0].grad is None and rig.params[0].grad_dtype == torch.bfloat16
    for _ in range(2):
        rig.params[0].backward(torch.ones_like(rig.params[0]))
    assert rig.params[0].grad.dtype == torch.bfloat16, "autograd is on its own"
    kept = Rig((5,))
    mine = kept.params[0].grad = torch.ones_like(kept.params[0])
    kept.grads.close()
    assert kept.params[0].grad is mine and kept.params[0].grad_dtype == torch.bfloat16


@pytest.fixture
def four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class Engine(HostEngine):
    """Notes what callers say of the memory of their sources."""

    def __init__(self):
        self.from_here = []

    def d2h_all(self, copies, *, after=None, from_here=False):
        self.from_here.append(from_here)
        return super().d2h_all(copies, after=after)


@pytest.mark.usefixtures("four_ranks")
def test_gradients_that_machines_reduce_are_of_another_stream():
    """FSDP2 allocates them on the stream that scatters, and calls hooks on the one that reduces over machines."""
    engine = Engine()
    allocate_all = lambda wanted, role: [torch.empty(2) for _ in wanted]  # noqa: E731
    grads = GradientOffload(engine, allocate_all, GradientMeter(1), None, lambda: None, {})
    shard = torch.ones(2)
    of_one = DTensor.from_local(shard, init_device_mesh("cpu", (4,)), [Shard(0)])
    of_machines = DTensor.from_local(shard, init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)])
    for weight in (shard, of_one, of_machines):
        weight.grad = weight.detach()
        master = SimpleNamespace(grad=None, requires_grad=True)
        pair = SimpleNamespace(name="weight", compute=weight, master=master, grad_dtype=torch.float32)
        pair.is_shared, pair.is_same_memory, pair.is_on_device = False, True, False
        grads._receive_from_device(pair)
        grads.complete()
        assert torch.equal(getattr(master.grad, "_local_tensor", master.grad), shard)
    assert engine.from_here == [True, True, False]


def test_a_zero_grad_that_a_user_has_put_on_the_module_is_called_and_put_back():
    model, calls, zeroed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [], []

    def own(*args, **keywords):
        calls.append((args, keywords))

    model[0].zero_grad = own
    sink = SimpleNamespace(zero=zeroed.extend)
    attach_zero_grad(model, sink, nn.Module.parameters)
    model[0].zero_grad()
    model[0].zero_grad(set_to_none=False)
    model[1].zero_grad()
    assert calls == [((), {}), ((), {"set_to_none": False})]
    assert zeroed == [*model[0].parameters(), *model[0].parameters(), *model[1].parameters()]
    detach_zero_grad(model)
    assert model[0].zero_grad is own
    assert "zero_grad" not in vars(model[1])
