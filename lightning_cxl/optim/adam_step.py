"""`AdamStep`: one step of a `CPUAdam`, for all parameters at once or for some after others."""

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_cxl import _adam
from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.optim.hyperparameters import check_options, check_ranges, scalars_of
from lightning_cxl.optim.layout import check_compute_weights, check_parameter, usable_gradient
from lightning_cxl.optim.number_formats import mix_key
from lightning_cxl.optim.spans import SpanTable, Update, is_as_before, signature_of
from lightning_cxl.optim.state import check_moments, parameter_name

if TYPE_CHECKING:
    from lightning_cxl.optim.cpu_adam import CPUAdam


class Work(NamedTuple):
    """The update of one parameter, and what decides it besides its state."""

    group_index: int
    ordinal: int  # of the parameter in the optimizer: rounding depends on it
    update: Update


class AdamStep:
    """Hyper-parameters of one step, as they are when it begins, and the work of it.

    Args:
        optimizer: whose step it is.

    Raises:
        ConfigError: a hyper-parameter is out of range.
        UnsupportedError: an option that CPUAdam does not have.
    """

    def __init__(self, optimizer: "CPUAdam") -> None:
        self._optimizer = optimizer
        self._groups = [_as_now(group) for group in optimizer.param_groups]
        for group in self._groups:
            check_options(group)
            check_ranges(group)

    def collect(self, grads: Mapping[torch.Tensor, torch.Tensor] | None = None) -> list[Work]:
        """Return the updates of the parameters with a gradient; nothing is changed.

        Args:
            grads: gradients by parameter; None for those that parameters have.

        Raises:
            ConfigError, CheckpointError, UnsupportedError: see `CPUAdam.step`.
        """
        optimizer = self._optimizer
        work = []
        ordinal, num_used = -1, 0
        slots = optimizer.slots.by_parameter
        num_slots = len(slots)
        for group_index, group in enumerate(self._groups):
            for index, parameter in enumerate(group["params"]):
                ordinal += 1
                slot = slots.get(parameter)
                if slot is not None:
                    num_used += 1
                grad = parameter.grad if grads is None else grads.get(parameter)
                if grad is None:
                    continue
                compute = optimizer.compute_weights.get(parameter) if optimizer.compute_weights else None
                known = None if slot is None else slot.known
                if (
                    known is not None
                    and slot is not None
                    and is_as_before(known.signature, parameter, grad, compute)
                    and slot.holds(optimizer.plain_state[parameter])
                ):
                    update = Update(parameter, grad, slot, compute, known.signature)
                else:
                    update = self._checked(parameter, grad, compute, parameter_name(group, index))
                work.append(Work(group_index, ordinal, update))
        if grads is None and num_used < num_slots:
            optimizer.slots.drop_unused(optimizer.param_groups, optimizer.plain_state)
        return work

    def _checked(self, parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None, name: str) -> Update:
        """Return the update of a parameter that has changed since the last step, or has had none."""
        check_parameter(parameter, name)
        slot = self._optimizer.slots.of(parameter)
        slot.check(parameter, name)
        state = self._optimizer.plain_state.get(parameter)
        if state and not slot.holds(state):
            check_moments(name, parameter, state)
        check_compute_weights(compute, parameter, name)
        grad = usable_gradient(grad, parameter, name)
        return Update(parameter, grad, slot, compute, signature_of(parameter, grad, compute))

    def apply(self, work: Sequence[Work], scale: float) -> None:
        """Carry out updates, and count the step of their parameters.

        Args:
            work: what `collect` returned, or a part of it.
            scale: factor of the gradients.
        """
        optimizer = self._optimizer
        steps, values = array("Q"), array("f", bytes(4 * len(work)))
        for _, _, update in work:
            slot = update.slot
            if slot.known is None or slot.known.signature is not update.signature:
                slot.bind(update.parameter, optimizer.plain_state[update.parameter])
            steps.append(slot.step_address)
        _adam.next_steps(steps, values)

        rows: dict[tuple[int, float], list[Update]] = {}
        for (group_index, ordinal, update), step in zip(work, values, strict=True):
            if update.slot.precision == "bf16":
                update = update._replace(key=mix_key(optimizer.seed, ordinal, int(step)))
            rows.setdefault((group_index, step), []).append(update)
        table = SpanTable(optimizer.homes)
        for (group_index, step), updates in rows.items():
            table.add(updates, scalars_of(self._groups[group_index], step, scale))
        table.run(optimizer.num_threads, optimizer.isa)
        _adam.store_steps(steps, values)  # only now: a step that fails before has not been made


def written_by(work: Sequence[Work]) -> list[torch.Tensor]:
    """Return what updates write, of which versions must go up, as after an operation of torch."""
    written = [update.parameter for _, _, update in work]
    return written + [update.compute for _, _, update in work if update.compute is not None]


def _as_now(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group whose options do not follow later changes, also of a tensor in place."""
    now = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
    return {**now, "params": plain(group["params"])}
