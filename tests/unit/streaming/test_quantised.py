"""Which quantised parameters stream, and what is refused; with a stand-in of the kind that bitsandbytes has."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.streaming.quantised import prepare_layers
from lightning_cxl.streaming.unit_weights import UnitWeights
from lightning_cxl.streaming.units import streamable
from tests.unit.streaming.test_params import allocate


class Params4bit(nn.Parameter):
    """Bytes, with a state object beside them."""

    def __new__(cls, data, *, quantised=True):
        self = torch.Tensor._make_subclass(cls, data, False)
        nested = SimpleNamespace(absmax=torch.rand(1), code=torch.rand(256), offset=None)
        self.bnb_quantized = quantised
        self.quant_state = None
        if quantised:
            self.quant_state = SimpleNamespace(
                absmax=torch.rand(6), code=torch.rand(16), offset=torch.rand(()), state2=nested
            )
        return self


def block(**options):
    module = nn.Linear(4, 4)
    module.weight = Params4bit(torch.randint(256, (96, 1), dtype=torch.uint8), **options)
    return module


def streamed(module):
    parameters = list(module.parameters())
    return UnitWeights("block", module, [parameters], allocate)


def test_what_is_quantised_on_its_way_to_the_device_does_not_stream():
    model = nn.ModuleDict({"ready": block(), "later": block(quantised=False)})
    chosen = {name: own for name, _, own in streamable(model, list(model.named_children()))}
    assert any(each is model["ready"].weight for each in chosen["ready"])
    assert not any(each is model["later"].weight for each in chosen["later"])


def test_bytes_that_a_forward_replaces_are_an_error_not_garbage():
    unit = streamed(module := block())
    unit.enter(torch.zeros(unit.nbytes, dtype=torch.uint8))
    module.weight.data = torch.zeros(96, 1, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="replaced the bytes of 1 quantised weights"):
        unit.exit()
    assert module.weight.data_ptr() == unit.pieces[0].flat.data_ptr()


def test_a_parameter_that_its_module_has_replaced_by_its_like_is_put_back():
    """As peft's DoRA does on the CPU: the other one would show the slot for ever."""
    module = block()
    own, before = module.weight, module.weight.data.clone()
    unit = streamed(module)
    slot = torch.empty(unit.nbytes, dtype=torch.uint8)
    slot.copy_(unit.pieces[0].flat)
    unit.enter(slot)
    module.weight = nn.Parameter(module.weight.data, requires_grad=False)
    unit.exit()
    slot.fill_(0)
    assert module.weight is own
    assert torch.equal(module.weight.data, before)


@pytest.mark.parametrize("training", [True, False], ids=["dequantised", "8-bit product"])
def test_an_8_bit_layer_keeps_no_input(training):
    bnb = pytest.importorskip("bitsandbytes")
    layer = bnb.nn.Linear8bitLt(16, 8, has_fp16_weights=False).to("cpu").train(training)
    gradients = []
    for prepares in (False, True):
        undo = prepare_layers(layer, ()) if prepares else None
        inputs = torch.arange(32.0).view(2, 16).requires_grad_()
        made = inputs * 2
        kept = weakref.ref(made)
        output = layer(made)
        del made
        gc.collect()
        assert (kept() is None) == prepares
        gradients.append(torch.autograd.grad(output.square().sum(), inputs)[0])
        if undo is not None:
            undo()
    assert torch.equal(*gradients)
