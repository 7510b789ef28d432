from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices import device_type_of
from lightning_cxl.run.run import Host, place_model
from tests.fakes import fake_topology

NO_MEMORY = SimpleNamespace(shard=None)
META = SimpleNamespace(device=torch.device("meta"))  # moving there makes every parameter anew


def test_parameters_that_a_move_makes_anew_adds_or_drops_are_kept_also_inside_compiled_modules():
    inner = nn.Linear(3, 2)
    model = nn.Sequential(torch.compile(inner, backend="eager"), nn.Linear(2, 1))
    place_model(model, NO_MEMORY, META, [], [], ExitStack())
    assert [parameter.device.type for parameter in model.parameters()] == ["meta"] * 4
    assert [parameter.device.type for parameter in inner.parameters()] == ["meta"] * 2
    model = nn.Sequential(Changes(3, 2))
    place_model(model, NO_MEMORY, META, [], [], ExitStack())
    assert {name: p.device.type for name, p in model.named_parameters()} == {"0.weight": "meta", "0.scale": "meta"}


class Changes(nn.Linear):
    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self.scale = nn.Parameter(torch.ones(1, device=self.weight.device))
        self.register_parameter("bias", None)
        return self


@pytest.mark.parametrize(
    ("integrated", "asked", "streams"), [(False, "auto", True), (True, "auto", False), (True, True, True)]
)
def test_weights_stream_to_a_device_with_memory_of_its_own(on_device, monkeypatch, caplog, integrated, asked, streams):
    if on_device.type == "cpu":
        pytest.skip("is about devices other than the CPU")
    monkeypatch.setattr(type(device_type_of(on_device)), "is_integrated", lambda self, index: integrated)
    host = Host(OffloadConfig(stream_weights=asked), on_device, fake_topology(dram=("1GiB",)))
    assert host.streams_weights is streams
    assert ("computes in the memory of the host" in caplog.text) is not streams
    host.engine.close()
