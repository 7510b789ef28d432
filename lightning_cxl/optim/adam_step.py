"""`AdamStep`: one step of a `CPUAdam`, for all parameters at once or for some after others."""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_cxl.native import _adam
from lightning_cxl.optim.awaited_params import plain
from lightning_cxl.optim.hyperparameters import check_options, check_ranges, scalars_of
from lightning_cxl.optim.kernel_table import KernelTable, Update, is_as_before, signature_of
from lightning_cxl.optim.number_formats import mix_key
from lightning_cxl.optim.parameter_state import ParameterStates
from lightning_cxl.optim.saved_state import check_moments, parameter_name
from lightning_cxl.optim.state_visits import Visit
from lightning_cxl.optim.tensor_checks import check_compute_weights, check_parameter, usable_gradient
from lightning_cxl.optim.threads import ThreadTeams
from lightning_cxl.optim.visits import Visits
from lightning_cxl.shards import first_element, local
from lightning_cxl.storage.visitor import Visitor


class Work(NamedTuple):
    """The update of one parameter, and what decides it besides its state."""

    group_index: int
    ordinal: int  # of the parameter in the optimizer: rounding depends on it
    update: Update


class AdamStep:
    """Hyper-parameters of one step, as they are when it begins, and the work of it.

    Args:
        groups: of the optimizer.
        state: of the optimizer, by parameter; refers to the memory of `kept` once a parameter has been updated.
        kept: state of each parameter, in memory that stays where it is.
        compute_weights: 16-bit weights to write beside float32 parameters.
        seed: of the stochastic rounding.
        num_threads: of the kernel.
        isa: of the kernel.
        teams: which threads update what; None where all are near to all memory.

    Raises:
        ConfigError: a hyper-parameter is out of range.
        UnsupportedError: an option that CPUAdam does not have.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        state: defaultdict[torch.Tensor, Any],
        kept: ParameterStates,
        compute_weights: Mapping[torch.Tensor, torch.Tensor],
        *,
        seed: int,
        num_threads: int,
        isa: str,
        teams: ThreadTeams | None,
    ) -> None:
        self._groups = [_as_now(group) for group in groups]
        self._state = state
        self._kept = kept
        self._compute_weights = compute_weights
        self._seed = seed
        self._num_threads = num_threads
        self._isa = isa
        self._teams = teams
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
        work = []
        ordinal, num_used = -1, 0
        by_parameter, weights_beside = self._kept.by_parameter, self._compute_weights
        num_kept = len(by_parameter)
        for group_index, group in enumerate(self._groups):
            for index, parameter in enumerate(group["params"]):
                ordinal += 1
                kept = by_parameter.get(parameter)
                if kept is not None:
                    num_used += 1
                grad = parameter.grad if grads is None else grads.get(parameter)
                if grad is None:
                    continue
                compute = weights_beside.get(parameter) if weights_beside else None
                known = None if kept is None else kept.known
                if (
                    known is not None
                    and kept is not None
                    and is_as_before(known.signature, local(parameter), local(grad), local_or_none(compute))
                    and kept.holds(self._state[parameter])
                ):
                    shard, beside = local(parameter), local_or_none(compute)
                    update = Update(shard, local(grad), kept, beside, known.signature, _written(parameter, compute))
                else:
                    update = self._checked(parameter, grad, compute, parameter_name(group, index))
                work.append(Work(group_index, ordinal, update))
        if grads is None and num_used < num_kept:
            self._kept.drop_unused(self._groups, self._state)
        return work

    def _checked(self, parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None, name: str) -> Update:
        """Return the update of a parameter that has changed since the last step, or has had none."""
        shard, beside = local(parameter), local_or_none(compute)
        check_parameter(shard, name)
        kept = self._kept.of(parameter)
        kept.check(parameter, name)
        state = self._state.get(parameter)
        if state and not kept.holds(state):
            check_moments(name, parameter, state)
        check_compute_weights(beside, shard, name)
        grad = usable_gradient(local(grad), shard, name)
        return Update(shard, grad, kept, beside, signature_of(shard, grad, beside), _written(parameter, compute))

    def apply(self, work: Sequence[Work], scale: float) -> None:
        """Carry out updates, and count the step of their parameters.

        Args:
            work: what `collect` returned, or a part of it.
            scale: factor of the gradients.
        """
        for each in work:
            update = each.update
            kept = update.kept
            if kept.known is None or kept.known.signature is not update.signature:
                kept.bind(update.written[0], self._state[update.written[0]])
        visits = self._kept.visits
        in_memory, parts = _parts(work, visits)
        if in_memory:
            visits.expect([record for records, _ in parts for record in records])  # read behind what is updated now
            self._apply(in_memory, scale, None)
        for index, (records, part) in enumerate(parts):
            with visits.visit(records) as visit:
                visits.expect([record for following, _ in parts[index + 1 :] for record in following])
                self._apply(part, scale, visit)

    def _apply(self, work: Sequence[Work], scale: float, visit: Visit | None) -> None:
        """Carry out updates of what is in memory, or visits it together."""
        steps = array("Q", [each.update.kept.step.data_ptr() for each in work])
        values = array("f", bytes(4 * len(work)))
        _adam.next_steps(steps, values)

        rows: dict[tuple[int, float], list[Update]] = {}
        for (group_index, ordinal, update), step in zip(work, values, strict=True):
            if update.kept.precision == "bf16":
                begin = first_element(update.written[0])  # shards of one parameter get different bits
                update = update._replace(key=mix_key(self._seed, ordinal, int(step), *([begin] if begin else [])))
            rows.setdefault((group_index, step), []).append(update)
        table = KernelTable(self._teams, visit)
        for (group_index, step), updates in rows.items():
            table.add(updates, scalars_of(self._groups[group_index], step, scale))
        table.run(self._num_threads, self._isa)
        _adam.store_steps(steps, values)  # only now: a step that fails before has not been made


def _parts(work: Sequence[Work], visits: Visits) -> tuple[list[Work], list[tuple[list[Visitor], list[Work]]]]:
    """Return the updates that need no record, and the others with the records that they need.

    A record is needed by one part only: what it is read for first would be lost where it is read again.
    """
    in_memory: list[Work] = []
    part_of: dict[Visitor, tuple[list[Visitor], list[Work]]] = {}
    for each in work:
        update = each.update
        records: list[Visitor] = [] if update.kept.record is None else [update.kept.record]
        for weights in (update.parameter, update.compute):
            record = None if weights is None else visits.find([weights])
            if record is not None:
                records.append(record)
        if not records:
            in_memory.append(each)
            continue
        own: tuple[list[Visitor], list[Work]] = ([], [])
        for record in records:
            other = part_of.get(record)
            if other is None:
                own[0].append(record)
                part_of[record] = own
            elif other is not own:
                own, joined = other, own
                own[0].extend(joined[0])
                own[1].extend(joined[1])
                part_of |= dict.fromkeys(joined[0], own)
        own[1].append(each)
    parts = {id(part): part for part in part_of.values()}
    return in_memory, list(parts.values())


def written_by(work: Sequence[Work]) -> list[torch.Tensor]:
    """Return what updates write, of which versions must go up, as after an operation of torch."""
    return [each for _, _, update in work for each in update.written]


def _written(parameter: torch.Tensor, compute: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return (parameter,) if compute is None else (parameter, compute)


def local_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return the shard of a tensor, if there is one."""
    return None if tensor is None else local(tensor)


def _as_now(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group whose options do not follow later changes, also of a tensor in place."""
    now = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
    return {**now, "params": plain(group["params"])}
