import collections
import random

import numpy as np
import pytest
import torch
from torch import nn

from lightning_cxl.streaming.replay import Containers, ModuleState, UnitModules


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("large", torch.zeros(300, 300))
        self.alias = self.large
        self.inner = nn.BatchNorm1d(3)
        self.items = [1]
        self.table = collections.OrderedDict(a=1)
        self.count = 0


def state_of(unit, *arguments):
    containers = Containers("unit")
    containers.take_in(arguments, lambda value: type(value) is tuple)
    return ModuleState(unit if isinstance(unit, UnitModules) else UnitModules(unit), containers)


def test_what_a_replay_does_is_not_seen_by_the_next():
    unit = Unit()
    state = state_of(unit)
    state.settle()
    for _ in range(2):
        with state.replay():
            assert unit.items == [1] and not unit.inner.running_mean.any()
            unit.items.append(9)
            unit.inner.running_mean.add_(5.0)
    assert unit.items == [1] and not unit.inner.running_mean.any()


def test_large_buffers_are_copied_only_if_the_forward_changed_them():
    """NaN counts as changed."""
    unit = Unit()
    unit.large.fill_(float("nan"))
    state = state_of(unit)
    state.settle()
    unit.large.zero_()
    with state.replay():
        assert unit.large.isnan().all()

    unchanged = state_of(unit)
    unchanged.settle()
    with unchanged.replay():
        shown = unit.large
    assert shown is unit.large

    changed = state_of(unit)
    unit.large.data.add_(1.0)
    changed.settle()
    with changed.replay():
        assert not unit.large.any() and unit.alias is unit.large
        unit.large.add_(5.0)  # another recompute of the same graph does not see it
    assert unit.large.all()

    with torch.no_grad():
        unit.large.add_(1.0)
    with pytest.raises(RuntimeError, match=r"a buffer of shape \(300, 300\).*at version 3, the forward saw version 2"):
        unchanged.replay().__enter__()
    with changed.replay():
        assert not unit.large.any()


def test_changed_parameters_are_an_error():
    unit = Unit()
    state = state_of(unit)
    state.settle()
    with state.replay():
        pass
    with torch.no_grad():
        unit.inner.bias.add_(1.0)
    with pytest.raises(RuntimeError, match=r"parameter `inner\.bias` of Unit is at version"), state.replay():
        pass


def test_what_a_unit_draws_is_drawn_again_where_it_sets_its_generator_back():
    unit = Unit()
    unit.rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    state = state_of(unit, generator)
    drawn = unit.rng.random(), torch.rand(1, generator=generator)
    unit.rng.seed(1)
    generator.manual_seed(1)
    state.settle()
    unit.rng.seed(2)
    generator.manual_seed(2)
    with state.replay([generator]):
        assert (unit.rng.random(), torch.rand(1, generator=generator)) == drawn


def test_a_number_that_numpy_keeps_for_the_next_call_is_drawn_again():
    unit = UnitModules(Unit())
    np.random.seed(1)
    np.random.randn()
    saved = np.random.get_state()
    np.random.randn()
    for number in range(6):  # numbers of the normal distribution come in pairs, and the second one moves nothing
        if number == 1:
            np.random.set_state(saved)
        state = state_of(unit)
        drawn = np.random.randn()
        state.settle()
        after = np.random.get_state()[2:]
        with state.replay():
            assert np.random.randn() == drawn
        assert np.random.get_state()[2:] == after
    moved = state_of(unit)
    moved.settle()
    np.random.seed(1)
    with moved.replay():  # which has not drawn: nothing to repeat
        assert np.random.rand() == 0.417022004702574


def change_attributes(unit):
    unit.items_of_then, unit.extra = unit.items, unit.table  # as many, of types that have been met
    del unit.items, unit.count


@pytest.mark.parametrize("change", [change_attributes, lambda unit: setattr(unit, "inner", nn.BatchNorm1d(3))])
def test_a_unit_may_change_its_modules_and_their_attributes(change):
    unit = Unit()
    modules = UnitModules(unit)
    state_of(modules).settle()
    change(unit)
    state = state_of(modules)
    unit.table["b"] = 2
    unit.inner(torch.randn(4, 3))
    state.settle()
    with state.replay():
        assert unit.table == getattr(unit, "extra", unit.table) == {"a": 1} and unit.inner.num_batches_tracked == 0
    assert unit.table["b"] == 2 and unit.inner.num_batches_tracked == 1
