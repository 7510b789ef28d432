"""`zero_grad` of modules whose updates run behind the next forward, or whose shards have separate masters."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from lightning_cxl.gradients.replaced_method import ReplacedMethod
from lightning_cxl.gradients.sink import GradientSink

Peek = Callable[[nn.Module], Iterable[Tensor]]
"""Yields the parameters of a module and its children without waiting for updates of them."""


class ModuleZeroGrad(ReplacedMethod):
    """Stands in for one module's `zero_grad`. A copy of the module has none.

    Gradients that are dropped, not zeroed, need no wait: an update that runs has its own references to them. So a loop
    that calls ``model.zero_grad()`` after the step, as that of transformers does, does not wait for updates.
    """

    def __init__(self, module: nn.Module, grads: GradientSink, peek: Peek) -> None:
        super().__init__(module.zero_grad)
        self._module = module
        self._grads = grads
        self._peek = peek
        self.own = vars(module).get("zero_grad")
        """What the user has put on the module, which is called and put back."""

    def __call__(self, *args: Any, **keywords: Any) -> None:
        """Clear the gradients; see `torch.nn.Module.zero_grad`."""
        set_to_none = args[0] if args else keywords.get("set_to_none", True)
        if set_to_none and self.own is None and type(self._module).zero_grad is nn.Module.zero_grad:
            parameters = list(self._peek(self._module))
            self._grads.zero(parameters)
            for parameter in parameters:
                parameter.grad = None
        else:
            self._grads.zero(self._module.parameters())
            self._plain(*args, **keywords)


def attach_zero_grad(model: nn.Module, grads: GradientSink, peek: Peek) -> None:
    """Replace `zero_grad` of a model and of every module in it."""
    for module in model.modules():
        module.__dict__["zero_grad"] = ModuleZeroGrad(module, grads, peek)


def detach_zero_grad(model: nn.Module) -> None:
    """Undo `attach_zero_grad`."""
    for module in model.modules():
        ours = vars(module).get("zero_grad")
        if isinstance(ours, ModuleZeroGrad):
            del module.__dict__["zero_grad"]
            if ours.own is not None:
                module.__dict__["zero_grad"] = ours.own
