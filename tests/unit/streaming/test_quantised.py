"""Which quantised parameters stream, and what is refused; with a stand-in of the kind that bitsandbytes has."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.streaming.streamable import streamable
from lightning_cxl.streaming.unit_weights import UnitWeights, piece_nbytes
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


def state_of(module):
    state = module.weight.quant_state
    return [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]


def streamed(module):
    parameters = list(module.parameters())
    return UnitWeights("block", module, [parameters], allocate)


def test_state_goes_with_the_bytes():
    module = block()
    before = [tensor.clone() for tensor in (module.weight.data, *state_of(module))]
    unit = streamed(module)
    assert unit.nbytes == piece_nbytes(module, list(module.parameters())) == 64 * 2 + 64 + 4 * 64 + 1024
    slot = torch.full((unit.nbytes,), 255, dtype=torch.uint8)
    unit.enter(slot)
    assert all((tensor.view(-1).view(torch.uint8) == 255).all() for tensor in (module.weight.data, *state_of(module)))
    slot.copy_(unit.pieces[0].flat)
    assert all(map(torch.equal, (module.weight.data, *state_of(module)), before))
    unit.leave()
    slot.fill_(0)
    assert all(map(torch.equal, (module.weight.data, *state_of(module)), before))
    assert module.weight.quant_state.state2.offset is None


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
        unit.leave()
    assert module.weight.data_ptr() == unit.pieces[0].flat.data_ptr()
