"""`zero_grad` of modules whose gradients live on separate masters, or whose updates run behind the next forward."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from lightning_cxl.gradients.replaced_method import ReplacedMethod
from lightning_cxl.gradients.sink import GradientSink

Peek = Callable[[nn.Module], Iterable[Tensor]]
"""Yields the parameters of a module and its children without waiting for updates of them."""


class ModuleZeroGrad(ReplacedMethod):
    """Stands in for one module's `zero_grad`: clears the masters' gradients, too. A copy of the module has none.

    Gradients that are dropped, not zeroed, need no wait: an update that runs has its own references to them. So a loop
    that calls ``model.zero_grad()`` after the step, as that of transformers does, does not wait for updates.
    """

    def __init__(self, module: nn.Module, grads: GradientSink, peek: Peek) -> None:
        super().__init__(module.zero_grad)
        self._module = module
        self._grads = grads
        self._peek = peek

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear the gradients; see `torch.nn.Module.zero_grad`."""
        if set_to_none and type(self._module).zero_grad is nn.Module.zero_grad:
            parameters = list(self._peek(self._module))
            self._grads.zero(parameters)
            for parameter in parameters:
                parameter.grad = None
        else:
            self._grads.zero(self._module.parameters())
            self._plain(set_to_none)


def attach_zero_grad(model: nn.Module, grads: GradientSink, peek: Peek) -> None:
    """Replace `zero_grad` of a model and of every module in it."""
    for module in model.modules():
        module.__dict__["zero_grad"] = ModuleZeroGrad(module, grads, peek)


def detach_zero_grad(model: nn.Module) -> None:
    """Undo `attach_zero_grad`."""
    for module in model.modules():
        if isinstance(module.__dict__.get("zero_grad"), ModuleZeroGrad):
            del module.__dict__["zero_grad"]
