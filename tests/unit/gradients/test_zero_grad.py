"""`zero_grad` of modules in a run: the user's own is called, and is there afterwards."""

from torch import nn

from lightning_cxl.gradients.offload import attach_zero_grad, detach_zero_grad


class Sink:
    def __init__(self):
        self.zeroed = []

    def zero(self, parameters):
        self.zeroed += parameters


def test_a_zero_grad_that_a_user_has_put_on_the_module_is_called_and_put_back():
    model, calls, sink = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [], Sink()

    def own(*args, **keywords):
        calls.append((args, keywords))

    model[0].zero_grad = own
    attach_zero_grad(model, sink, nn.Module.parameters)
    model[0].zero_grad()
    model[0].zero_grad(set_to_none=False)
    model[1].zero_grad()
    assert calls == [((), {}), ((), {"set_to_none": False})]
    assert sink.zeroed == [*model[0].parameters(), *model[0].parameters(), *model[1].parameters()]
    detach_zero_grad(model)
    assert model[0].zero_grad is own
    assert "zero_grad" not in vars(model[1])
