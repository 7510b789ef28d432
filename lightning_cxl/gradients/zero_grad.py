"""`zero_grad` of modules whose gradients live on separate masters."""

from torch import nn

from lightning_cxl.gradients.replaced_method import ReplacedMethod
from lightning_cxl.gradients.sink import GradientSink


class ModuleZeroGrad(ReplacedMethod):
    """Stands in for one module's `zero_grad`: clears the masters' gradients, too. A copy of the module has none."""

    def __init__(self, module: nn.Module, grads: GradientSink) -> None:
        super().__init__(module.zero_grad)
        self._module = module
        self._grads = grads

    def __call__(self, set_to_none: bool = True) -> None:
        """Clear the gradients; see `torch.nn.Module.zero_grad`."""
        self._grads.zero(self._module.parameters())
        self._plain(set_to_none)


def attach_zero_grad(model: nn.Module, grads: GradientSink) -> None:
    """Replace `zero_grad` of a model and of every module in it."""
    for module in model.modules():
        module.__dict__["zero_grad"] = ModuleZeroGrad(module, grads)


def detach_zero_grad(model: nn.Module) -> None:
    """Undo `attach_zero_grad`."""
    for module in model.modules():
        if isinstance(module.__dict__.get("zero_grad"), ModuleZeroGrad):
            del module.__dict__["zero_grad"]
