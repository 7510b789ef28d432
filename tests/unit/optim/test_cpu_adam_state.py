"""State dicts of `CPUAdam`: both ways with torch, by name, weights_only, and what does not fit."""

import copy

import pytest
import torch

from lightning_cxl.errors import CheckpointError, UnsupportedError
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.kernels import dynamic_map
from tests.unit.optim.adam_pairs import assert_equal

NAMES = ["embed.weight", "body.weight", "head.bias"]
SHAPES = [(4, 3), (5,), ()]


def trained(make, names=NAMES, *, steps=3, named=True, **options):
    """An optimizer after a few steps; the values depend on the name only."""
    params = []
    for name in names:
        generator = torch.Generator().manual_seed(len(name))
        params.append(torch.nn.Parameter(torch.randn(SHAPES[NAMES.index(name)], generator=generator)))
    optimizer = make(list(zip(names, params, strict=True)) if named else params, **options)
    for step in range(steps):
        for name, parameter in zip(names, params, strict=True):
            generator = torch.Generator().manual_seed(len(name) + 100 * step)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_round_trips_both_ways_with_torch(make, named):
    decoupled = make is torch.optim.AdamW
    _, theirs = trained(make, named=named, lr=0.02, weight_decay=0.1)
    _, ours = trained(CPUAdam, named=named, steps=0, decoupled=decoupled)
    ours.load_state_dict(theirs.state_dict())
    assert_equal(ours.state_dict()["state"], theirs.state_dict()["state"])
    assert ours.state_dict()["param_groups"] == theirs.state_dict()["param_groups"]

    _, ours = trained(CPUAdam, named=named, decoupled=decoupled, lr=0.02, weight_decay=0.1)
    params, theirs = trained(make, named=named, steps=0)
    theirs.load_state_dict(ours.state_dict())
    assert_equal(theirs.state_dict()["state"], ours.state_dict()["state"])
    assert theirs.state_dict()["param_groups"] == ours.state_dict()["param_groups"]
    params[0].grad = torch.ones_like(params[0])
    theirs.step()


def test_names_decide_not_the_order():
    order = [2, 0, 1]
    shuffled = [NAMES[index] for index in order]
    params, adam = trained(CPUAdam, shuffled)
    _, saved = trained(torch.optim.AdamW)
    adam.load_state_dict(saved.state_dict())
    for place, index in enumerate(order):
        assert_equal(adam.state[params[place]], saved.state_dict()["state"][index])
    assert adam.param_groups[0]["param_names"] == shuffled


def test_named_groups_in_another_order_bring_their_hyper_parameters():
    def make(names):
        params = dict(zip(NAMES, (torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES), strict=True))
        groups = [{"params": [(name, params[name]) for name in group], "lr": len(group) / 10} for group in names]
        for parameter in params.values():
            parameter.grad = torch.ones_like(parameter) * parameter.numel()
        return params, groups

    _, groups = make([NAMES[:1], NAMES[1:]])
    saved = CPUAdam(groups)
    saved.step()
    params, groups = make([[NAMES[2], NAMES[1]], NAMES[:1]])
    adam = CPUAdam(groups, lr=9.0)
    adam.load_state_dict(saved.state_dict())
    assert [group["lr"] for group in adam.param_groups] == [0.2, 0.1]
    assert [group["param_names"] for group in adam.param_groups] == [["head.bias", "body.weight"], ["embed.weight"]]
    for name, mean in (("body.weight", 0.5), ("head.bias", 0.1), ("embed.weight", 1.2)):
        assert adam.state[params[name]]["exp_avg"].flatten().unique().tolist() == pytest.approx([mean])

    _, groups = make([[NAMES[0], NAMES[2]], [NAMES[1]]])
    with pytest.raises(CheckpointError, match=r"spread over the saved groups \[0, 1\]"):
        CPUAdam(groups).load_state_dict(saved.state_dict())


def test_loading_keeps_the_groups_and_copies():
    params, adam = trained(CPUAdam, lr=0.25)
    group = adam.param_groups[0]
    _, saved = trained(torch.optim.AdamW, steps=5, lr=0.5)
    adam.load_state_dict(saved.state_dict())
    assert adam.param_groups[0] is group and group["lr"] == 0.5
    before = copy.deepcopy(saved.state_dict()["state"])
    for parameter in params:
        parameter.grad = torch.ones_like(parameter)
    adam.step()
    assert_equal(saved.state_dict()["state"], before)


def test_a_parameter_without_saved_state_starts_again():
    params, adam = trained(CPUAdam)
    _, saved = trained(torch.optim.AdamW)
    state = saved.state_dict()
    del state["state"][1]
    adam.load_state_dict(state)
    assert params[1] not in adam.state
    params[1].grad = torch.ones_like(params[1])
    adam.step()
    assert adam.state[params[1]]["step"].item() == 1
    assert adam.state[params[1]]["exp_avg"].tolist() == pytest.approx([0.1] * 5)


def test_low_precision_and_old_fashioned_states_load():
    _, saved = trained(torch.optim.AdamW, named=False)
    state = saved.state_dict()
    for entry in state["state"].values():
        entry.update(step=7, exp_avg=entry["exp_avg"].bfloat16())
    params, adam = trained(CPUAdam, steps=0, named=False)
    adam.load_state_dict(state)
    assert adam.state[params[0]]["step"].dtype == torch.float32
    assert adam.state[params[0]]["step"].item() == 7
    assert torch.equal(adam.state[params[0]]["exp_avg"], state["state"][0]["exp_avg"].float())


CODED = {
    "step": 3,
    **{f"state{number}": torch.zeros(5, dtype=torch.uint8) for number in (1, 2)},
    **{f"absmax{number}": torch.ones(1) for number in (1, 2)},
    **{f"qmap{number}": dynamic_map(number == 2) for number in (1, 2)},
}
"""8-bit state of one parameter, as bitsandbytes keeps it."""


def entry(base=None, **change):
    return lambda state: state["state"].update({1: {**(base or state["state"][1]), **change}})


def group(**change):
    return lambda state: state["param_groups"][0].update(change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (entry(exp_avg_sq=torch.zeros(2, 2)), r"exp_avg_sq of `body.weight` has shape \(2, 2\)"),
        (entry(exp_avg=None), "exp_avg of `body.weight` has shape NoneType"),
        (entry(step=torch.zeros(2)), r"step of `body.weight` has shape \(2,\)"),
        (entry(step="x"), "step of `body.weight` is 'x', it must be a number of steps"),
        (entry(step=-1), "step of `body.weight` is -1, it must be"),
        (entry(exp_avg=torch.zeros(5, dtype=torch.uint8)), "exp_avg of `body.weight` is torch.uint8, it must"),
        (entry(exp_avg=torch.zeros(5).to_sparse()), "exp_avg of `body.weight` is in torch.sparse_coo memory"),
        (entry(exp_avg=torch.zeros(5, device="meta")), "exp_avg of `body.weight` is in the meta device"),
        (entry(CODED, qmap1=torch.zeros(16)), "8-bit state of `body.weight` uses another map"),
        (entry(CODED, qmap1="dynamic"), "8-bit state of `body.weight` uses another map"),
        (entry(CODED, qmap1=dynamic_map(True)), "8-bit state of `body.weight` uses another map"),
        (entry(CODED, absmax1=torch.ones(2)), "absmax1 of `body.weight` has shape"),
        (entry(CODED, absmax2=None), "absmax2 of `body.weight` has shape NoneType"),
        (entry(CODED, state1=torch.zeros(5, dtype=torch.int64)), "state1 of `body.weight` is torch.int64, it must be"),
        (entry(CODED, absmax2=torch.zeros(1, dtype=torch.int32)), "absmax2 of `body.weight` is torch.int32"),
        (lambda state: state["state"][1].pop("exp_avg"), "state of `body.weight` has no exp_avg"),
        (
            group(param_names=["embed.weight", "spine.weight", "head.bias"]),
            "not in the checkpoint: `body.weight`; not in this optimizer: `spine.weight`",
        ),
        (group(params=[0, 1], param_names=NAMES[:2]), "not in the checkpoint: `head.bias`"),
        (lambda state: state["param_groups"].append({}), "has 2 parameter groups, this optimizer has 1"),
        (dict.clear, "has `state` and `param_groups`"),
        (group(amsgrad=True), "CPUAdam has no `amsgrad`"),
    ],
)
def test_what_does_not_fit_changes_nothing(damage, message):
    _, adam = trained(CPUAdam)
    before = copy.deepcopy(adam.state_dict()["state"])
    state = trained(torch.optim.AdamW)[1].state_dict()
    damage(state)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        adam.load_state_dict(state)
    assert_equal(adam.state_dict()["state"], before)
    assert adam.param_groups[0]["lr"] == 1e-3


def test_a_checkpoint_of_fewer_parameters_without_names_is_refused():
    _, adam = trained(CPUAdam)
    with pytest.raises(CheckpointError, match="has 2 parameters, this optimizer's has 3"):
        adam.load_state_dict(trained(torch.optim.AdamW, NAMES[:2], named=False)[1].state_dict())
