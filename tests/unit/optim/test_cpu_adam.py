"""`CPUAdam` as a torch optimizer: beside torch's own through whole runs, with groups and odd parameters."""

from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.optim.parameter_state import allocate_from_torch
from tests.unit.optim.adam_pairs import assert_close, assert_same_state, pair, parameters, set_gradients, take_step


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"lr": 0.1, "weight_decay": 0.3}, {"betas": (0.3, 0.5), "eps": 1e-3}, {"lr": torch.tensor(0.05)},
        {"fused": True},
    ],
    ids=str,
)  # fmt: skip
def test_runs_beside_torch(monkeypatch, make, options):
    # the one operation in which torch is not exact; with weight decay it would reach momentum through the weights
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: x.double().pow(0.5).float())
    theirs, torch_adam, ours, adam = pair(make, ((5, 3), (7,), (), (0,), (2, 0, 3), (130,)), **options)
    for step in range(6):
        take_step(step, (theirs, torch_adam), (ours, adam))
    assert_close(ours, theirs)
    if "fused" not in options:
        assert_same_state(adam.state_dict()["state"], torch_adam.state_dict()["state"])
    assert adam.state_dict()["param_groups"] == torch_adam.state_dict()["param_groups"]


def test_fused_takes_a_tensor_as_learning_rate_as_a_number():
    """As torch's kernels do."""
    rate = torch.tensor(1e-2)
    runs = [pair(torch.optim.AdamW, ((4096,),), lr=lr, weight_decay=0.01, fused=True) for lr in (rate, float(rate))]
    for step in range(12):
        take_step(step, *((params, adam) for *_, params, adam in runs))
    assert torch.equal(runs[0][2][0], runs[1][2][0])


def test_parameters_without_gradient_are_skipped_and_step_counts_differ():
    theirs, torch_adam, ours, adam = pair(torch.optim.AdamW, ((4,), (5,), (6,)))
    for step in range(5):
        for params, optimizer in ((theirs, torch_adam), (ours, adam)):
            set_gradients(params, step)
            params[0].grad = None
            if step % 2:
                params[1].grad = None
            optimizer.step()
    assert [int(adam.state[p]["step"]) for p in ours[1:]] == [3, 5]
    assert ours[0] not in adam.state
    assert_close(ours, theirs)
    assert_same_state(adam.state_dict()["state"], torch_adam.state_dict()["state"])


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_unsupported_options_are_refused_wherever_they_come_from(option):
    params = parameters((3,))
    message = f"CPUAdam has no `{option}`: set `{option}=False`"
    with pytest.raises(UnsupportedError, match=message):
        CPUAdam.from_torch(torch.optim.AdamW(params, **{option: True}))
    with pytest.raises(UnsupportedError, match=message):
        CPUAdam([{"params": params, option: True}])
    adam = CPUAdam(params)
    adam.param_groups[0][option] = True
    set_gradients(params, 0)
    before = params[0].detach().clone()
    with pytest.raises(UnsupportedError, match=message):
        adam.step()
    assert torch.equal(params[0], before)


def test_unfit_parameters_are_named_and_the_group_is_not_added():
    adam = CPUAdam([("head", parameters((3,))[0])])
    bad = {
        "float16": (ConfigError, torch.nn.Parameter(torch.zeros(3, dtype=torch.float16))),
        "meta": (ConfigError, torch.nn.Parameter(torch.zeros(3, device="meta"))),
        "strides": (UnsupportedError, torch.nn.Parameter(torch.zeros(1).expand(4))),
    }
    for message, (error, parameter) in bad.items():
        with pytest.raises(error, match=f"`body`.*{message}"):
            adam.add_param_group({"params": [("body", parameter)]})
    assert len(adam.param_groups) == 1
    twin = parameters((3,))[0]
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ConfigError, match="twice in the same group"):
        adam.add_param_group({"params": [("a", twin), ("b", twin)]})


def test_sparse_gradients_are_refused_before_anything_changes():
    dense, embedding = parameters((3,))[0], torch.nn.Embedding(10, 4, sparse=True)
    adam = CPUAdam([dense, embedding.weight])
    dense.grad = torch.ones(3)
    before = dense.detach().clone()
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UnsupportedError, match=r"parameter 1 of its group \(shape \(10, 4\)\) is sparse"):
        adam.step()
    assert torch.equal(dense, before)
    assert not adam.state


def test_channels_last_weights_and_gradients_in_another_order():
    theirs, ours = (torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    torch_adam = torch.optim.AdamW(theirs.parameters())
    adam = CPUAdam(ours.parameters(), weight_decay=0.01, allocate_state=lambda *args: torch.empty(args[-1]))
    assert not ours.weight.is_contiguous()
    for step in range(4):
        for net, optimizer in ((theirs, torch_adam), (ours, adam)):
            set_gradients(list(net.parameters()), step)
            if step == 2:
                net.weight.grad = net.weight.grad.contiguous()
            optimizer.step()
    assert_close(ours.parameters(), theirs.parameters())
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(adam.state[ours.weight][key], torch_adam.state[theirs.weight][key])


def test_state_memory_is_reserved_at_construction_and_never_moves():
    asked = []

    def allocate(parameter, role, dtype, numel):
        memory = torch.full((numel,), float("nan"), dtype=dtype)  # contents do not matter
        asked.append((role, memory.data_ptr()))
        return memory

    trained, frozen = parameters((3,), (2,))
    frozen.requires_grad_(False)
    adam = CPUAdam([trained, frozen], allocate_state=allocate)
    assert [role for role, _ in asked] == [TensorRole.MOMENTUM, TensorRole.VARIANCE]
    assert not adam.state
    take_step(0, ([trained], adam))
    other = torch.optim.AdamW([trained, frozen])
    take_step(1, ([trained], other))
    adam.load_state_dict(other.state_dict())
    adam.step()
    assert [adam.state[trained][key].data_ptr() for key in ("exp_avg", "exp_avg_sq")] == [at for _, at in asked]
    assert adam.state[trained]["exp_avg"].isfinite().all()
    frozen.requires_grad_(True)
    take_step(2, ([trained, frozen], adam))
    assert len(asked) == 4


def test_allocation_failure_leaves_the_optimizer_as_it_was():
    def allocate(parameter, role, dtype, numel):
        if numel > 3:
            raise MemoryError("full")
        return allocate_from_torch(parameter, role, dtype, numel)

    adam = CPUAdam(parameters((3,)), allocate_state=allocate)
    with pytest.raises(MemoryError):
        adam.add_param_group({"params": parameters((2,), (4,))})
    assert len(adam.param_groups) == 1


def test_state_that_someone_replaced_is_taken_over():
    theirs, torch_adam, ours, adam = pair(torch.optim.AdamW)
    for step in range(4):
        take_step(step, (theirs, torch_adam), (ours, adam))
        for params, optimizer in ((theirs, torch_adam), (ours, adam)):
            state = optimizer.state[params[0]]
            if step == 1:
                optimizer.state[params[0]] = {key: value.clone() + 1 for key, value in state.items()}
            if step == 2:
                optimizer.state.pop(params[1])  # starts again from zero
    assert_same_state(adam.state_dict()["state"], torch_adam.state_dict()["state"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_compute_weights_follow_in_the_same_step(state, dtype):
    masters = parameters((96, 64), (7,))
    compute = {masters[0]: torch.zeros(96, 64, dtype=dtype)}
    adam = CPUAdam(masters, lr=0.1, compute_weights=compute, state=state)
    set_gradients(masters, 0)
    versions = compute[masters[0]]._version, masters[0]._version
    adam.step()
    assert torch.equal(compute[masters[0]], masters[0].detach().to(dtype))
    assert compute[masters[0]]._version > versions[0] and masters[0]._version > versions[1], "autograd notices"
    compute[masters[1]] = torch.zeros(7, dtype=dtype)  # added later
    adam.step()
    assert all(torch.equal(compute[master], master.detach().to(dtype)) for master in masters)
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    compute[masters[0]] = compute[masters[0]].view(other)  # at the same place
    adam.step()
    assert torch.equal(compute[masters[0]], masters[0].detach().to(other))


@pytest.mark.parametrize("compute", [torch.zeros(3), torch.zeros(4).bfloat16(), torch.zeros(6).bfloat16()[::2]])
def test_unfit_compute_weights_are_refused(compute):
    (master,) = parameters((3,))
    adam = CPUAdam([master], compute_weights={master: compute})
    set_gradients([master], 0)
    before = master.detach().clone()
    with pytest.raises(ConfigError, match=r"weights of parameter 0 .* must be bfloat16 or float16 .* shape \(3,\)"):
        adam.step()
    assert torch.equal(master, before)


one_cycle = partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=8)  # changes betas, too
on_plateau = partial(schedulers.ReduceLROnPlateau, patience=0)


@pytest.mark.parametrize("make_scheduler", [one_cycle, on_plateau])
@pytest.mark.parametrize("repoint", [False, True])
def test_schedulers(make_scheduler, repoint):
    """On CPUAdam, or made for the user's optimizer and pointed at CPUAdam afterwards; no warnings (they are errors)."""
    theirs, ours = parameters((6,)), parameters((6,))
    torch_adam, original = torch.optim.AdamW(theirs, lr=0.1), torch.optim.AdamW(ours, lr=0.1)
    expected = make_scheduler(torch_adam)
    early = make_scheduler(original) if repoint else None
    adam = CPUAdam.from_torch(original)
    scheduler = early or make_scheduler(adam)
    scheduler.optimizer = adam
    arguments = (1.0,) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else ()
    for step in range(6):
        take_step(step, (theirs, torch_adam), (ours, adam))
        for current in (expected, scheduler):
            current.step(*arguments)
        assert adam.param_groups[0]["lr"] == torch_adam.param_groups[0]["lr"]
    assert_close(ours, theirs)


def test_from_torch_shares_groups_defaults_and_hooks_and_keeps_the_state():
    theirs, ours = parameters((3,)), parameters((3,))
    torch_adam, original = torch.optim.Adam(theirs), torch.optim.Adam(ours)
    calls = []
    original.register_step_post_hook(lambda optimizer, args, kwargs: calls.append(optimizer))
    take_step(0, (theirs, torch_adam), (ours, original))
    adam = CPUAdam.from_torch(original)
    assert adam.param_groups is original.param_groups
    assert adam.defaults is original.defaults
    take_step(1, (theirs, torch_adam), (ours, adam))
    assert calls == [original, adam]
    assert_same_state(adam.state_dict()["state"], torch_adam.state_dict()["state"])
    assert_close(ours, theirs)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2**20 + 7), (2**20 + 7, 3)], ids=str)
def test_reading_data_costs_no_memory_and_writes_through_it_count(shape, is_transposed):
    weights = torch.randn(shape).bfloat16()
    compute = torch.nn.Parameter(weights.mT.contiguous().mT if is_transposed and weights.ndim == 2 else weights)
    masters = MasterWeights({}, lambda compute, role, dtype: torch.empty(compute.shape, dtype=dtype))
    pair = masters.adopt(compute, "fp32")
    pair.master.data.mul_(1 + 2**-12)  # less than the compute weights can tell
    expected = pair.master.detach().clone()
    pair.put_front(lambda: None)
    with torch.profiler.profile(profile_memory=True) as profile:
        assert compute.data is not None
        masters.absorb_changes()
    assert torch.equal(pair.master, expected)
    if compute.is_contiguous():
        assert max(event.self_cpu_memory_usage for event in profile.events()) <= 4 * 2**20
    if compute.numel():
        last = tuple(size - 1 for size in shape)
        compute.data[last] = expected[last] = 5.0
        masters.absorb_changes()
        assert torch.equal(pair.master, expected)
    pair.remove_front()


def test_groups_have_their_own_hyper_parameters():
    def groups(params):
        return [{"params": params[:1], "lr": 0.5}, {"params": params[1:], "weight_decay": 0.5, "betas": (0.5, 0.5)}]

    theirs, ours = parameters((3,), (4,)), parameters((3,), (4,))
    torch_adam, adam = torch.optim.AdamW(groups(theirs)), CPUAdam(groups(ours), weight_decay=0.01)
    for step in range(4):
        torch_adam.param_groups[1]["lr"] = adam.param_groups[1]["lr"] = 0.1 * step
        take_step(step, (theirs, torch_adam), (ours, adam))
    assert_close(ours, theirs)
