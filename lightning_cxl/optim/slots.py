"""`Slots`: the slot of every parameter of an optimizer, made when first asked for."""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.optim.moment import AllocateState, allocate_from_torch, choose_precision
from lightning_cxl.optim.number_formats import StatePrecision
from lightning_cxl.optim.slot import Slot


class Slots:
    """Makes slots, keeps them by parameter, and lets go of those that nothing can ask for any more.

    Args:
        precision: of momentum and variance.
        fp32_state: parameters whose state stays float32 with ``"8bit"``.
        allocate: gives the memory of new slots. Not part of a copy or a pickle: it belongs to this process.
    """

    def __init__(
        self, precision: StatePrecision, fp32_state: Collection[torch.Tensor], allocate: AllocateState
    ) -> None:
        self.by_parameter: dict[torch.Tensor, Slot] = {}
        self.allocate = allocate
        self._precision: StatePrecision = precision
        # `in` compares the elements of tensors in a list; where it goes by hash, tensors are told apart by identity
        by_hash = isinstance(fp32_state, (AbstractSet, Mapping)) or not isinstance(fp32_state, Iterable)
        self.fp32_state = fp32_state if by_hash else dict.fromkeys(fp32_state)

    def make(self, parameter: torch.Tensor) -> Slot:
        """Return a new slot, which is not kept here yet."""
        precision = choose_precision(parameter, self._precision, sensitive=parameter in self.fp32_state)
        return Slot(parameter, precision, self.allocate)

    def of(self, parameter: torch.Tensor) -> Slot:
        """Return the slot of a parameter; makes it when the parameter was frozen while others got theirs."""
        slot = self.by_parameter.get(parameter)
        if slot is None:
            slot = self.by_parameter[parameter] = self.make(parameter)
        return slot

    def drop_unused(self, groups: Iterable[Mapping[str, Any]], state: Mapping[torch.Tensor, Any]) -> None:
        """Let go of parameters that are in no group and have no state: those of a group that was removed."""
        used = {parameter for group in groups for parameter in plain(group["params"])}
        for parameter in [one for one in self.by_parameter if one not in used and one not in state]:
            del self.by_parameter[parameter]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps."""
        return {**vars(self), "allocate": allocate_from_torch}
