"""Where compute weights move when a run begins."""

from contextlib import ExitStack
from types import SimpleNamespace

import torch
from torch import nn

from lightning_cxl.run.run import place_model

NO_MEMORY = SimpleNamespace(shard=None)
META = SimpleNamespace(device=torch.device("meta"))  # moving there makes every parameter anew


def test_parameters_that_a_move_makes_anew_are_kept_also_inside_compiled_modules():
    inner = nn.Linear(3, 2)
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(2, 1))
    place_model(model, NO_MEMORY, META, [], [], ExitStack())
    assert [parameter.device.type for parameter in model.parameters()] == ["meta"] * 4
    assert [parameter.device.type for parameter in inner.parameters()] == ["meta"] * 2


class Changes(nn.Linear):
    """Has other parameters after a move."""

    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(1, device=self.weight.device))
        self.register_parameter("bias", None)
        return self


def test_parameters_that_a_move_adds_or_drops():
    model = nn.Sequential(Changes(3, 2))
    place_model(model, NO_MEMORY, META, [], [], ExitStack())
    assert {name: p.device.type for name, p in model.named_parameters()} == {"0.weight": "meta", "0.scale": "meta"}
