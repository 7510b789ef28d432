"""`WholeUpdates`: the update of a step, all parameters at once, by the optimizer's own `step`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights, WeightPair
from lightning_cxl.streaming.unit_weights import UnitWeights


class WholeUpdates:
    """Makes updates when their step asks for them. Nothing runs behind; `UnitUpdates` is the one that overlaps.

    Args:
        units: whose weights stream; copies to the device may read them.
        masters: of the run.
    """

    def __init__(self, units: Sequence[UnitWeights], masters: MasterWeights) -> None:
        self._units = units
        self._masters = masters

    # -- what a backward tells

    def begin_backward(self) -> None:
        """Learn that a backward begins."""

    def resident_has_come(self, pair: WeightPair) -> None:
        """Learn that the gradient of a parameter that does not stream has left the device."""

    def unit_is_over(self, unit: UnitWeights) -> None:
        """Learn that the backward of a unit is over, and that its weights are at home."""

    # -- what a step asks for, in this order

    def begin(self, optimizer: Optimizer) -> None:
        """Learn that a step of `optimizer` begins, before its closure is evaluated."""

    def give_up(self) -> None:
        """Learn that the closure has failed."""

    def prepare(self) -> None:
        """Return when the masters may be written, and have what others wrote into the compute weights."""
        for unit in self._units:
            unit.wait_for_readers()
        self._masters.wait()
        self._masters.absorb_changes()

    def update(self, optimizer: Optimizer, step: Callable[[], Any], loss: Any) -> Any:
        """Update the parameters of `optimizer` that have gradients.

        Args:
            optimizer: checked, and its gradients too.
            step: the optimizer's own.
            loss: what the closure has returned.

        Returns:
            What the optimizer's own step returns.
        """
        return step()

    def write_back(self, optimizer: Optimizer, updated: Sequence[torch.Tensor]) -> None:
        """Give the model the new weights.

        Args:
            optimizer: that has made them.
            updated: masters that were updated.
        """
        self._masters.write_back(updated, kernel_wrote=isinstance(optimizer, CPUAdam))
        self._masters.wait()

    # -- what others ask

    def wait(self) -> None:
        """Return when every update is done and written back, e.g. before an optimizer's state is read."""
        self._masters.wait()

    def close(self, *, after_error: bool = False) -> None:
        """Return when every update is done; see `UnitUpdates`."""
        self._masters.wait()
