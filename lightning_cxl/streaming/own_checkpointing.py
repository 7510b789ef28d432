"""Models that checkpoint their blocks themselves: switched off while units are recomputed anyway.

[Note: A model's own checkpointing]
Two checkpoints around one block give the same losses, but run its forward three times. Hugging Face models show that
they checkpoint by a flag, which is set on blocks and on what contains them: it is False while the model is attached,
and True again afterwards. A ``torch.utils.checkpoint`` in the user's own forward shows itself only when a unit's first
forward runs within a backward. It may span more than a unit, so it is left to the user, who is told once. Where it is
not reentrant and spans units alone, it has saved nothing that needs a recompute of its own.
"""

import logging
from collections.abc import Iterable

from torch import nn

from lightning_cxl.torch_private import is_in_backward

log = logging.getLogger("lightning_cxl")
_FLAG = "gradient_checkpointing"


class OwnCheckpointing:
    """Switches off what a model does itself, and says so once. See [Note: A model's own checkpointing]."""

    def __init__(self) -> None:
        self._switched: list[nn.Module] = []
        self._has_told = False

    def switch_off(self, modules: Iterable[nn.Module]) -> None:
        """Switch off the flag of these modules where it is on."""
        on = [module for module in modules if getattr(module, _FLAG, False) is True]
        if on and not self._switched:
            log.info(
                "the model's own gradient checkpointing is switched off during the run: units are recomputed from "
                "inputs on the host instead"
            )
        for module in on:
            setattr(module, _FLAG, False)
        self._switched += on

    def restore(self) -> None:
        """Switch on again what was on."""
        while self._switched:
            setattr(self._switched.pop(), _FLAG, True)

    def look_around(self, unit: str) -> None:
        """Tell the user if the first forward of a unit runs in a backward: in a checkpoint of the user's own."""
        if not self._has_told and is_in_backward():
            self._has_told = True
            log.info(
                f"unit `{unit}` runs within a checkpoint of the model's own, so it is computed three times: leave "
                "torch.utils.checkpoint out: inputs are offloaded anyway, which is faster and gives the same losses"
            )
