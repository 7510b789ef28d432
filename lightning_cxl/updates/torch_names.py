"""`CPUAdam` under the names of torch's classes, for whoever asks an adopted optimizer who it is.

Learning-rate monitors, loggers and profilers name values after the optimizer's class, and user code asks with
``isinstance``. So what takes the place of a user's AdamW is called AdamW, and is both a `CPUAdam` and torch's AdamW.
"""

import torch
from torch.optim import Optimizer

from lightning_cxl.optim.cpu_adam import CPUAdam


class Adam(CPUAdam, torch.optim.Adam):
    """`CPUAdam` in the place of a ``torch.optim.Adam``."""

    adds_nothing = True


class AdamW(CPUAdam, torch.optim.AdamW):
    """`CPUAdam` in the place of a ``torch.optim.AdamW``."""

    adds_nothing = True


def class_in_place_of(optimizer: Optimizer) -> type[CPUAdam]:
    """Return the class of the `CPUAdam` that takes the place of torch's Adam or AdamW, or of another `CPUAdam`."""
    if isinstance(optimizer, torch.optim.AdamW):
        return AdamW
    return Adam if isinstance(optimizer, torch.optim.Adam) else CPUAdam
