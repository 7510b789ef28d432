"""`ModeMethod`: `train` and `eval` of optimizers without a schedule, which swap the values of all parameters."""

from typing import Any

from torch.optim import Optimizer

from lightning_cxl.gradients.replaced_method import ReplacedMethod
from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.updates.whole_updates import WholeUpdates


class ModeMethod(ReplacedMethod):
    """Stands in for `train` or `eval` of one optimizer object: the model gets what the optimizer has written.

    Args:
        optimizer: whose parameters are masters.
        name: of the method.
        updates: give the model the new weights.
    """

    NAMES = ("train", "eval")

    def __init__(self, optimizer: Optimizer, name: str, updates: WholeUpdates) -> None:
        super().__init__(getattr(optimizer, name))
        self._optimizer = optimizer
        self._updates = updates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the optimizer's own method."""
        parameters = [p for group in self._optimizer.param_groups for p in plain(group["params"])]
        versions = [p._version for p in parameters]
        self._updates.prepare()
        result = self._plain(*args, **kwargs)
        written = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
        if written:
            self._updates.write_back(self._optimizer, written)
        return result


def attach_modes(optimizer: Optimizer, updates: WholeUpdates) -> None:
    """Replace `train` and `eval` of an optimizer that has these, until `detach_modes`."""
    for name in ModeMethod.NAMES:
        if callable(getattr(optimizer, name, None)):
            setattr(optimizer, name, ModeMethod(optimizer, name, updates))


def detach_modes(optimizer: Optimizer) -> None:
    """Undo `attach_modes`."""
    for name in ModeMethod.NAMES:
        if isinstance(vars(optimizer).get(name), ModeMethod):
            delattr(optimizer, name)
