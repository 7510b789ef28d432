"""Quantised frozen weights of bitsandbytes with adapters on top: their bytes and what belongs to them stream."""

import pytest
import torch
from torch import nn

from lightning_cxl.streaming.unit_weights import UnitWeights
from tests import training_device
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.quantised import KINDS, four_bit, quantise
from tests.integration.training import EXACT, offload, train

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]


def quantised(kind, width=64):
    model = tiny_llama(hidden_size=width)
    quantise(model, kind)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.fixture(scope="module", autouse=True)
def _library():
    """Its kernels without a GPU are compiled by torch, which does not know the device apart; its tables stay there."""
    with torch._dynamo.config.patch(disable=True):
        _use_once()
        yield


def _use_once():
    if training_device.unavailable is None:
        four_bit(nn.Linear(64, 64), nested=False).to("cpu").to(training_device.chosen)(
            torch.zeros(1, 64, device=training_device.chosen)
        )


@pytest.mark.parametrize("kind", KINDS)
def test_everything_a_kernel_reads_is_in_the_slot(kind, monkeypatch):
    """While a unit computes all its tensors lie in one slot; in between all of them lie in its home."""
    inside, outside = [], []
    enter, leave = UnitWeights.enter, UnitWeights.leave

    def is_within(tensor, memory):
        start = memory.data_ptr()
        return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + memory.numel()

    def entered(unit, slot):
        enter(unit, slot)
        inside.extend(is_within(tensor, slot) for tensor in all_tensors(unit.module))

    def left(unit):
        leave(unit)
        outside.extend(is_within(tensor, unit.pieces[0].flat) for tensor in all_tensors(unit.module))

    monkeypatch.setattr(UnitWeights, "enter", entered)
    monkeypatch.setattr(UnitWeights, "leave", left)
    train(lambda: quantised(kind), offload(**EXACT), task=LlamaTask, steps=2)
    assert inside and all(inside) and outside and all(outside)


def all_tensors(unit):
    """Every tensor that the quantised layers of a unit hold, found without knowing their names."""
    for module in unit.modules():
        for parameter in module.parameters(recurse=False):
            yield parameter
            holders = [parameter, getattr(parameter, "quant_state", None), getattr(module, "state", None)]
            holders.append(getattr(holders[1], "state2", None))
            for holder in holders:
                values = {} if holder is None else holder.__dict__
                yield from (value for value in values.values() if isinstance(value, torch.Tensor))
