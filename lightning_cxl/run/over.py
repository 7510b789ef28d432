"""`refuse_gradients`: a model that only computes any more does not swallow the gradients of another training."""

from collections.abc import Callable

import torch
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.streaming.unit_weights import peek


def refuse_gradients(model: nn.Module, message: str) -> Callable[[], None]:
    """Let every backward into a model's parameters fail; returns what undoes it.

    Args:
        model: whose training is over, while its run goes on.
        message: of the error, which is `UnsupportedError`.
    """

    def refuse(_: torch.Tensor) -> None:
        raise UnsupportedError(message)

    handles = [p.register_hook(refuse) for p in peek(model) if p.requires_grad]  # type: ignore[no-untyped-call]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
