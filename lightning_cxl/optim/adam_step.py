"""`AdamStep`: one step of a `CPUAdam`, for all parameters at once or for some after others."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_cxl.memory.host_memory import is_dense
from lightning_cxl.native import _adam
from lightning_cxl.optim.number_formats import (
    BLOCK_SIZE,
    GRAD_FORMATS,
    STATE_FORMATS,
    WEIGHTS_BF16,
    WEIGHTS_FP16,
    WEIGHTS_FP32,
    WEIGHTS_SPLIT,
    check_compute_weights,
    check_parameter,
    mix_key,
    pack,
    usable_gradient,
)
from lightning_cxl.optim.parameter_state import (
    AdamScalars,
    KnownRow,
    ParameterState,
    ParameterStates,
    check_options,
    check_ranges,
    plain,
    scalars_of,
)
from lightning_cxl.optim.saved_state import check_moments, parameter_name
from lightning_cxl.optim.swapped_state import AddressedRecord, InBuffers, StateSwapper
from lightning_cxl.optim.threads import Stretch, ThreadTeams
from lightning_cxl.shards import first_element, local

# ----------------------------------------------------------------------------------------------------
# `KernelTable`: what one call of the Adam kernel is given, as rows of numbers.

_COMPUTE_FORMATS = {torch.bfloat16: WEIGHTS_BF16, torch.float16: WEIGHTS_FP16}


class KernelRow(NamedTuple):
    """Elements that are updated alike, as the kernel takes them: the fields of ``struct adam_span``, in order."""

    weights: int
    compute: int
    rest: int
    grads: int
    momentum: int
    variance: int
    momentum_scale: int
    variance_scale: int
    key: int
    numel: int
    row: int
    formats: int
    team: int
    first: int


_GRAD, _KEY, _ROW, _TEAM = map(KernelRow._fields.index, ("grads", "key", "row", "team"))  # these change between steps
_KEPT = tuple(
    map(
        KernelRow._fields.index,
        ("weights", "compute", "rest", "momentum", "variance", "momentum_scale", "variance_scale"),
    )
)
"""Addresses of what may lie on SSD."""


class Update(NamedTuple):
    """One parameter's part of a step: of the shard that this process holds."""

    parameter: torch.Tensor
    grad: torch.Tensor
    kept: ParameterState
    compute: torch.Tensor | None
    """16-bit compute weights to write beside a float32 parameter."""
    signature: tuple[object, ...]
    """Equal where the layout, formats and addresses are those of an earlier step; see `signature_of`."""
    written: tuple[torch.Tensor, ...]
    """The parameter of the optimizer, and its compute weights where there are some: cut over processes or not."""
    key: int = 0
    """Of stochastic rounding."""


def signature_of(parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None) -> tuple[object, ...]:
    """Return what must be as it was for a parameter's checks and row of numbers to be right again."""
    beside = None
    if compute is not None:
        beside = compute.data_ptr(), compute.dtype, compute.shape, compute.stride(), compute.is_neg()
    # whoever sets `.data` may change any of it
    return (
        parameter.data_ptr(),
        parameter.dtype,
        parameter.shape,
        parameter.stride(),
        parameter.is_neg(),
        grad.dtype,
        grad.numel(),
        grad.stride(),
        beside,
    )


def is_as_before(
    signature: tuple[object, ...], parameter: torch.Tensor, grad: torch.Tensor, compute: torch.Tensor | None
) -> bool:
    """Return whether a parameter and its gradient still have a `signature`."""
    ordinary = grad.is_cpu and grad.layout is torch.strided and not grad.is_neg() and grad.data_ptr() != 0
    return ordinary and signature == signature_of(parameter, grad, compute)


class KernelTable:
    """Rows of parameters, and the rows of scalars that they refer to.

    Args:
        teams: which threads take which part; None where all are near to all memory.
        swapped: where state and weights are now that are not in memory otherwise; None where all is in memory.
    """

    def __init__(self, teams: ThreadTeams | None = None, swapped: InBuffers | None = None) -> None:
        self._teams = teams
        self._swapped = swapped
        self._rows = array("Q")
        self._scalars = array("f")
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters with gaps, and what is updated

    def add(self, updates: Iterable[Update], scalars: AdamScalars) -> None:
        scalars_row = len(self._scalars) // _adam.SCALAR_FIELDS
        self._scalars.extend(scalars)
        for update in updates:
            known = update.kept.known
            if known is None or known.signature is not update.signature:
                known = self._describe(update)
            start = len(self._rows)
            self._rows.extend(known.numbers)
            self._rows[start + _GRAD], self._rows[start + _KEY] = update.grad.data_ptr(), update.key
            self._rows[start + _ROW] = scalars_row
            stretches = known.stretches
            if self._swapped is not None:
                for field in _KEPT:
                    self._rows[start + field] = self._swapped.moved(self._rows[start + field])
                stretches = self._stretches(update.kept)  # of a buffer, which is another one each time
            if stretches is None:
                continue
            if len(stretches) == 1:
                self._rows[start + _TEAM] = stretches[0].team
                continue
            whole = KernelRow(*self._rows[start:])
            del self._rows[start:]
            state_bytes = update.kept.momentum.values.element_size()
            for stretch in stretches:
                self._rows.extend(_part(whole, stretch, update.grad.element_size(), state_bytes))

    def _stretches(self, kept: ParameterState) -> list[Stretch] | None:
        if self._teams is None:
            return None
        momentum = kept.momentum.flat
        return self._teams.stretches(momentum if self._swapped is None else self._swapped.flat(momentum))

    def _describe(self, update: Update) -> KnownRow:
        """Return the row of a parameter, which knows it from now on if it was not copied."""
        weights, kept = update.parameter, update.kept
        if not is_dense(weights):
            weights = weights.detach().contiguous()
            self._copies.append((update.parameter, weights))
        stretches = self._stretches(kept)
        known = KnownRow(update.signature, _pack(update, weights), stretches)
        if weights is update.parameter:
            kept.known = known
        return known

    def run(self, num_threads: int, isa: str) -> None:
        _adam.update(self._rows, self._scalars, num_threads, isa, None if self._teams is None else self._teams.cpus)
        for parameter, updated in self._copies:
            parameter.copy_(updated)


def _pack(update: Update, weights: torch.Tensor) -> KernelRow:
    """Return the row of an update of dense `weights`; what differs from step to step is 0."""
    kept, compute = update.kept, update.compute
    if kept.remainder is not None:  # the parameter is the upper half
        form, addresses = WEIGHTS_SPLIT, (0, weights.data_ptr(), kept.remainder.data_ptr())
    elif compute is not None:
        form, addresses = _COMPUTE_FORMATS[compute.dtype], (weights.data_ptr(), compute.data_ptr(), 0)
    else:
        form, addresses = WEIGHTS_FP32, (weights.data_ptr(), 0, 0)
    momentum, variance = kept.momentum, kept.variance
    return KernelRow(
        *addresses,
        grads=0,
        momentum=momentum.values.data_ptr(),
        variance=variance.values.data_ptr(),
        momentum_scale=0 if momentum.scales is None else momentum.scales.data_ptr(),
        variance_scale=0 if variance.scales is None else variance.scales.data_ptr(),
        key=0,
        numel=weights.numel(),
        row=0,
        formats=pack(GRAD_FORMATS[update.grad.dtype], form, STATE_FORMATS[kept.precision]),
        team=0,
        first=0,
    )


def _part(whole: KernelRow, stretch: Stretch, grad_bytes: int, state_bytes: int) -> KernelRow:
    """Return the row of one stretch of a row's elements; it begins with a block of scales."""

    def at(address: int, element_bytes: int) -> int:
        return address + stretch.begin * element_bytes if address else 0

    def scale_at(address: int) -> int:
        return address + stretch.begin // BLOCK_SIZE * 4 if address else 0

    return whole._replace(
        weights=at(whole.weights, 4),
        compute=at(whole.compute, 2),
        rest=at(whole.rest, 2),
        grads=at(whole.grads, grad_bytes),
        momentum=at(whole.momentum, state_bytes),
        variance=at(whole.variance, state_bytes),
        momentum_scale=scale_at(whole.momentum_scale),
        variance_scale=scale_at(whole.variance_scale),
        numel=stretch.end - stretch.begin,
        team=stretch.team,
        first=stretch.begin,
    )


class Work(NamedTuple):
    group_index: int
    ordinal: int  # of the parameter in the optimizer: rounding depends on it
    update: Update


class AdamStep:
    """Hyper-parameters of one step, as they are when it begins, and the work of it.

    Args:
        state: of the optimizer, by parameter; refers to the memory of `kept` once a parameter has been updated.
        kept: state of each parameter, in memory that stays where it is.
        teams: which threads update what; None where all are near to all memory.
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
        """Carry out updates, and count the step of their parameters."""
        for each in work:
            update = each.update
            kept = update.kept
            if kept.known is None or kept.known.signature is not update.signature:
                kept.bind(update.written[0], self._state[update.written[0]])
        swapper = self._kept.swapper
        if swapper is None:
            self._apply(work, scale, None)
            return
        in_memory, parts = _parts(work, swapper)
        if in_memory:
            swapper.expect([record for records, _ in parts for record in records])  # read behind what is updated now
            self._apply(in_memory, scale, None)
        for index, (records, part) in enumerate(parts):
            with swapper.use(records) as swapped:
                swapper.expect([record for following, _ in parts[index + 1 :] for record in following])
                self._apply(part, scale, swapped)

    def _apply(self, work: Sequence[Work], scale: float, swapped: InBuffers | None) -> None:
        """Carry out updates of what is in memory, or in buffers together."""
        steps = array("Q", [each.update.kept.step.data_ptr() for each in work])
        values = array("f", bytes(4 * len(work)))
        _adam.next_steps(steps, values)

        rows: dict[tuple[int, float], list[Update]] = {}
        for (group_index, ordinal, update), step in zip(work, values, strict=True):
            if update.kept.precision == "bf16":
                begin = first_element(update.written[0])  # shards of one parameter get different bits
                update = update._replace(key=mix_key(self._seed, ordinal, int(step), *([begin] if begin else [])))
            rows.setdefault((group_index, step), []).append(update)
        table = KernelTable(self._teams, swapped)
        for (group_index, step), updates in rows.items():
            table.add(updates, scalars_of(self._groups[group_index], step, scale))
        table.run(self._num_threads, self._isa)
        _adam.store_steps(steps, values)  # only now: a step that fails before has not been made


def _parts(
    work: Sequence[Work], swapper: StateSwapper
) -> tuple[list[Work], list[tuple[list[AddressedRecord], list[Work]]]]:
    """Return the updates that need no record, and the others with the records that they need.

    A record is needed by one part only: what it is read for first would be lost where it is read again.
    """
    in_memory: list[Work] = []
    part_of: dict[AddressedRecord, tuple[list[AddressedRecord], list[Work]]] = {}
    for each in work:
        update = each.update
        records: list[AddressedRecord] = [] if update.kept.record is None else [update.kept.record]
        for weights in (update.parameter, update.compute):
            record = None if weights is None else swapper.find([weights])
            if record is not None:
                records.append(record)
        if not records:
            in_memory.append(each)
            continue
        own: tuple[list[AddressedRecord], list[Work]] = ([], [])
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
    return None if tensor is None else local(tensor)


def _as_now(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group whose options do not follow later changes, also of a tensor in place."""
    now = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
    return {**now, "params": plain(group["params"])}
