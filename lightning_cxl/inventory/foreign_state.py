"""How many tensors an optimizer that is not `CPUAdam` keeps per parameter: for planning, before its first step."""

from typing import Any

from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, NAdam, Optimizer, RAdam, RMSprop, Rprop

_FIXED: dict[type[Optimizer], int] = {Adadelta: 2, Adagrad: 1, Adamax: 2, ASGD: 1, NAdam: 2, RAdam: 2, Rprop: 2}


def num_state_tensors(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many tensors of a parameter's size its state has; 0 for classes that are not torch's.

    Adafactor keeps less than one, LBFGS a history that is shared by all; both count as 0 as well.
    """
    if isinstance(optimizer, Adam):  # AdamW too
        return 3 if group.get("amsgrad") else 2
    if isinstance(optimizer, SGD):
        return 1 if group.get("momentum") else 0
    if isinstance(optimizer, RMSprop):
        return 1 + bool(group.get("momentum")) + bool(group.get("centered"))
    return next((count for kind, count in _FIXED.items() if isinstance(optimizer, kind)), 0)
