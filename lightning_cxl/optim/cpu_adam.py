"""`CPUAdam`: Adam and AdamW on host memory as a real torch optimizer, one pass over memory with all threads."""

import logging
import math
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.memory.host_memory import is_dense, is_ordinary
from lightning_cxl.native import _adam, _cpu, _grads
from lightning_cxl.optim.kernels import (
    BLOCK_SIZE,
    GRAD_FORMATS,
    STATE_FORMATS,
    WEIGHTS_BF16,
    WEIGHTS_FP16,
    WEIGHTS_FP32,
    WEIGHTS_SPLIT,
    MasterForm,
    StatePrecision,
    ThreadTeams,
    check_compute_weights,
    check_parameter,
    chosen_isa,
    flattened,
    mix_key,
    pack,
    thread_count,
    usable_gradient,
)
from lightning_cxl.optim.parameter_state import (
    AllocateState,
    AwaitedParams,
    KnownRow,
    ParameterState,
    ParameterStates,
    allocate_from_torch,
    check_group,
    check_moments,
    choose_precision,
    in_shape,
    match_groups,
    merged_groups,
    moment_bytes,
    parameter_name,
    plain,
    scalars_of,
    unwrapped,
)
from lightning_cxl.optim.swapped_state import InBuffers, StateSwapper, read_states
from lightning_cxl.shards import first_element, local, sums_over_processes
from lightning_cxl.storage.swap import Swappable
from lightning_cxl.timing import timed
from lightning_cxl.torch_private import fused_adam_, keeps_mark, loading_hooks, mark_as_called, share_hooks

# `AdamStep`: one step, for all parameters at once or for some after others. The kernel is given rows of numbers: one or
# more for each parameter, and the scalars that they refer to.

_DEVICE_CHUNK = 2**24
"""Elements that a device updates at a time: so many gradients become float32 at once."""
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
_MAY_BE_ON_SSD = ("weights", "compute", "rest", "momentum", "variance", "momentum_scale", "variance_scale")
_ON_SSD = tuple(map(KernelRow._fields.index, _MAY_BE_ON_SSD))


class Update(NamedTuple):
    """One parameter's part of a step: of the shard that this process holds."""

    group_index: int
    ordinal: int
    """Of the parameter in the optimizer: rounding depends on it."""
    parameter: torch.Tensor
    grad: torch.Tensor
    kept: ParameterState
    compute: torch.Tensor | None
    """16-bit compute weights to write beside a float32 parameter."""
    signature: tuple[object, ...]
    """Equal where the layout, formats and addresses are those of an earlier step; see `signature_of`."""
    written: tuple[torch.Tensor, ...]
    """The parameter of the optimizer, and its compute weights where there are some: cut over processes or not."""


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


def row_of(update: Update) -> KernelRow:
    """Return the row of an update; what differs from step to step is 0."""
    weights, kept, compute = update.parameter, update.kept, update.compute
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


class AdamStep:
    """One step of a `CPUAdam`. It has the hyper-parameters of when it began."""

    def __init__(self, optimizer: "CPUAdam") -> None:
        self._optimizer = optimizer
        self._kept = optimizer.kept
        self._state = optimizer.plain_state
        self._kept.check_not_lost()
        self._groups: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            # copied: options of a step do not follow later changes, also of a tensor in place
            options = {key: value for key, value in group.items() if key != "params"}
            tensors = {key: v.detach().clone() for key, v in options.items() if isinstance(v, torch.Tensor)}
            self._groups.append({**options, **tensors, "params": plain(group["params"])})
            check_group(self._groups[-1])
        self._places = [
            (number, index, p) for number, g in enumerate(self._groups) for index, p in enumerate(g["params"])
        ]
        self._ordinals: dict[torch.Tensor, list[int]] = {}  # torch only warns of a parameter that is there twice
        for ordinal, (_, _, parameter) in enumerate(self._places):
            self._ordinals.setdefault(parameter, []).append(ordinal)

    def check_unchanged(self) -> None:
        """Refuse hyper-parameters that were written after the step began: a part of it is made with those of before."""
        for begun, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            if any(begun.get(key) != value for key, value in group.items() if key != "params"):
                raise UnsupportedError(
                    "hyper-parameters of the optimizer were changed while updates ran behind the backward: change them "
                    "before the backward or after the step, or set overlap_step=False"
                )

    def collect(self, grads: Mapping[torch.Tensor, torch.Tensor] | None = None) -> list[Update]:
        """Return the updates of parameters that have gradients, or of those in `grads`."""
        updates = []
        by_parameter, weights_beside = self._kept.by_parameter, self._optimizer.compute_weights
        chosen: Iterable[int] = range(len(self._places))
        if grads is not None:
            chosen = sorted(ordinal for parameter in grads for ordinal in self._ordinals.get(parameter, ()))
        for ordinal in chosen:
            group_index, index, parameter = self._places[ordinal]
            grad = parameter.grad if grads is None else grads[parameter]
            if grad is None:
                continue
            kept = by_parameter.get(parameter)
            compute = weights_beside.get(parameter) if weights_beside else None
            shard, grad, beside = local(parameter), local(grad), None if compute is None else local(compute)
            known = None if kept is None else kept.known
            if (
                kept is not None
                and known is not None
                and (grad.is_cpu and grad.layout is torch.strided and not grad.is_neg() and grad.data_ptr() != 0)
                and known.signature == signature_of(shard, grad, beside)
                and kept.holds(self._state[parameter])
            ):
                signature = known.signature
            else:
                name = parameter_name(self._groups[group_index], index)
                check_parameter(shard, name)
                kept = self._kept.of(parameter)
                kept.check(parameter, name)
                state = self._state.get(parameter)
                if state and not kept.holds(state):
                    check_moments(name, parameter, state)
                check_compute_weights(beside, shard, name)
                grad = usable_gradient(grad, shard, name)
                signature = signature_of(shard, grad, beside)
            written = (parameter,) if compute is None else (parameter, compute)
            updates.append(Update(group_index, ordinal, shard, grad, kept, beside, signature, written))
        if grads is None:  # of a group that was removed, parameters without state are let go
            for parameter in [p for p in by_parameter if p not in self._ordinals and p not in self._state]:
                del by_parameter[parameter]
        return updates

    @torch.no_grad()
    @timed("update_s", "update")
    def apply(self, updates: Sequence[Update], scale: float) -> None:
        """Carry out updates, and count the step of their parameters."""
        for update in updates:
            kept = update.kept
            if kept.known is None or kept.known.signature is not update.signature:
                kept.bind(update.written[0], self._state[update.written[0]])
        for device in dict.fromkeys(each.parameter.device for each in updates if not each.parameter.is_cpu):
            self._apply_on_device([each for each in updates if each.parameter.device == device], scale)
        updates = [update for update in updates if update.parameter.is_cpu]
        swapper = self._kept.swapper
        if swapper is None:
            self._apply(updates, scale, None)
            return
        in_memory, parts = _parts(updates, swapper)
        if in_memory:
            self._apply(in_memory, scale, None)
        for records, part in parts:
            with swapper.use(records) as swapped:
                self._apply(part, scale, swapped)

    def _apply_on_device(self, updates: Sequence[Update], scale: float) -> None:
        """Carry out updates of float32 parameters on their device, by torch's fused kernels there."""
        device = updates[0].parameter.device
        # all memory is taken before anything is written: where it is refused, none of these is updated. With its dtype,
        # as Lightning's bf16-true changes torch's default in `training_step`
        steps = {
            step: torch.full((), step, dtype=torch.float32, device=device)
            for step in {float(each.kept.step) + 1 for each in updates}
        }
        numel = min(max(update.grad.numel() for update in updates), _DEVICE_CHUNK)
        words = torch.empty(numel, dtype=torch.float32, device=device)
        is_nan = torch.empty(numel, dtype=torch.bool, device=device)
        options: list[dict[str, Any]] = []
        for group in self._groups:  # once: to read a learning rate that is on a device waits for it
            beta1, beta2 = map(float, group["betas"])
            numbers = {name: float(group[name]) for name in ("lr", "weight_decay", "eps")}
            options.append({**numbers, "beta1": beta1, "beta2": beta2, "decoupled": group["decoupled_weight_decay"]})
        for update in updates:
            kept = update.kept
            step = float(kept.step) + 1
            tensors = [update.parameter, update.grad, kept.momentum.values, kept.variance.values]
            tensors += [] if update.compute is None else [update.compute]
            chunks = [torch.split(flattened(tensor), _DEVICE_CHUNK) for tensor in tensors]
            for weights, grad, momentum, variance, *compute in zip(*chunks, strict=True):
                word = words[: grad.numel()]
                if grad.dtype is not torch.float32 or scale != 1.0:
                    grad = word.copy_(grad).mul_(scale)
                lists = [weights], [grad], [momentum], [variance], [steps[step]]
                fused_adam_(*lists, **options[update.group_index])
                for half in compute:  # rounded as `split` and the kernels of the host do it, ties away from zero
                    bits = word.view(torch.int32).copy_(weights.view(torch.int32)).add_(0x8000).bitwise_right_shift_(16)
                    half.view(torch.int16).copy_(bits)
                    half.masked_fill_(torch.ne(weights, weights, out=is_nan[: half.numel()]), torch.nan)
            kept.step.fill_(step)

    def _apply(self, updates: Sequence[Update], scale: float, swapped: InBuffers | None) -> None:
        """Carry out updates of what is in memory, or in buffers together."""
        optimizer, teams = self._optimizer, self._optimizer.teams
        steps = array("Q", [update.kept.step.data_ptr() for update in updates])
        values = array("f", bytes(4 * len(updates)))
        _adam.next_steps(steps, values)
        rows, scalars = array("Q"), array("f")
        scalars_row: dict[tuple[int, float], int] = {}
        for update, step in zip(updates, values, strict=True):
            group, kept = (update.group_index, step), update.kept
            if group not in scalars_row:
                scalars_row[group] = len(scalars_row)
                scalars.extend(scalars_of(self._groups[update.group_index], step, scale))
            known = kept.known
            if known is None or known.signature is not update.signature:
                stretches = None if teams is None or swapped is not None else teams.stretches(kept.momentum.flat)
                known = kept.known = KnownRow(update.signature, row_of(update), stretches)
            start = len(rows)
            rows.extend(known.numbers)
            rows[start + _GRAD], rows[start + _ROW] = update.grad.data_ptr(), scalars_row[group]
            if kept.precision == "bf16":
                begin = first_element(update.written[0])  # shards of one parameter get different bits
                rows[start + _KEY] = mix_key(optimizer.seed, update.ordinal, int(step), *([begin] if begin else []))
            stretches = known.stretches
            if swapped is not None:
                for field in _ON_SSD:
                    rows[start + field] = swapped.moved(rows[start + field])
                if teams is not None:  # the buffer is another one each time
                    stretches = teams.stretches(swapped.flat(kept.momentum.flat))
            if stretches is None:
                continue
            if len(stretches) == 1:
                rows[start + _TEAM] = stretches[0].team
                continue
            whole = KernelRow(*rows[start:])
            del rows[start:]
            state_bytes = kept.momentum.values.element_size()
            element_bytes = {"weights": 4, "compute": 2, "rest": 2, "grads": update.grad.element_size()}
            element_bytes |= {"momentum": state_bytes, "variance": state_bytes}
            for stretch in stretches:
                offsets = {field: stretch.begin * nbytes for field, nbytes in element_bytes.items()}
                # a stretch begins with a block of scales
                offsets |= dict.fromkeys(("momentum_scale", "variance_scale"), stretch.begin // BLOCK_SIZE * 4)
                places = {field: at + by for field, by in offsets.items() if (at := getattr(whole, field))}
                numel = stretch.end - stretch.begin
                rows.extend(whole._replace(**places, numel=numel, team=stretch.team, first=stretch.begin))
        _adam.update(rows, scalars, optimizer.num_threads, optimizer.isa, None if teams is None else teams.cpus)
        _adam.store_steps(steps, values)  # only now: a step that fails before has not been made


def _parts(
    updates: Sequence[Update], swapper: StateSwapper
) -> tuple[list[Update], list[tuple[list[Swappable], list[Update]]]]:
    """Return the updates that need no record, and the others with the records that they need."""
    # a record is needed by one part only: what it is read for first would be lost where it is read again
    in_memory: list[Update] = []
    part_of: dict[Swappable, tuple[list[Swappable], list[Update]]] = {}
    for update in updates:
        records: list[Swappable] = [] if update.kept.record is None else [update.kept.record]
        for weights in (update.parameter, update.compute):
            record = None if weights is None else swapper.find([weights])
            if record is not None:
                records.append(record)
        if not records:
            in_memory.append(update)
            continue
        own: tuple[list[Swappable], list[Update]] = ([], [])
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
        own[1].append(update)
    parts = {id(part): part for part in part_of.values()}
    return in_memory, list(parts.values())


def written_by(updates: Sequence[Update]) -> list[torch.Tensor]:
    """Return what updates write, of which versions must go up, as after an operation of torch."""
    return [each for update in updates for each in update.written]


# Clipping by the total norm: sums of squares of gradients, and the factor that the step applies.

SumsOf = Callable[[Iterable[torch.Tensor]], list[float]]


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def kernel_can_read(grad: torch.Tensor) -> bool:
    return grad.dtype in GRAD_FORMATS and is_ordinary(grad) and is_dense(grad)


def sums_of_squares(grads: Sequence[torch.Tensor], num_threads: int, isa: str) -> list[float]:
    """Return the sum of squares of each tensor, finite if and only if every element is, in one read of all of them.

    Of tensors that are cut over processes it is that of the shard here. Where the kernel can read a tensor the sum
    depends on the values only, neither on threads nor `isa`; of others torch computes it.
    """
    grads = [local(grad) for grad in grads]
    readable, rows = list(filter(kernel_can_read, grads)), array("Q")
    for grad in readable:
        grad_format = GRAD_FORMATS[grad.dtype]
        rows.extend((grad.data_ptr(), 0, grad.numel(), grad_format, grad_format, 0))
    results = array("d", bytes(8 * len(readable)))
    if readable:
        _grads.measure(rows, results, num_threads, isa)
    measured = dict(zip(map(id, readable), results, strict=True))
    there = [grad for grad in grads if not grad.is_cpu and grad.layout is torch.strided]
    if there:  # one wait for the device
        norms = [torch.linalg.vector_norm(grad.detach(), dtype=torch.float32) for grad in there]
        squares = torch.stack([norm.to(norms[0].device) for norm in norms]).double().square().tolist()
        for grad, square in zip(there, squares, strict=True):
            if not math.isfinite(square) and bool(torch.linalg.vector_norm(grad.detach(), math.inf).isfinite()):
                square = sys.float_info.max  # finite float32 numbers whose squares are not
            measured[id(grad)] = square
    sums = []
    for grad in grads:
        if id(grad) in measured:
            sums.append(measured[id(grad)])
            continue
        values = grad.coalesce().values() if grad.is_sparse else grad
        total = float(torch.linalg.vector_norm(values.detach().double())) ** 2
        if not math.isfinite(total) and bool(values.isfinite().all()):
            total = sys.float_info.max  # finite float64 numbers whose squares are not
        sums.append(total)
    return sums


def clip_factor(sums: list[float], max_norm: float, scale: float) -> tuple[float, float]:
    """Return the norm of gradients times `scale`, and the factor that brings it down to `max_norm` (at most 1).

    As in ``torch.nn.utils.clip_grad_norm_``; a norm that is not a number gives such a factor.
    """
    norm = math.sqrt(math.fsum(sums)) * scale if all(map(math.isfinite, sums)) else sum(sums)
    factor = max_norm / (norm + 1e-6)
    return norm, 1.0 if factor > 1.0 else factor


def _nothing_runs() -> None:
    """Return at once."""


class CPUAdam(Optimizer):
    """Adam or AdamW over host parameters, float32 or bfloat16, in one pass over memory.

    Hyper-parameters, state and state dict are those of ``torch.optim.Adam``, and checkpoints go both ways. In float32,
    momentum and variance equal torch's bit for bit, the weights up to torch's ``sqrt``, which is at times off by one
    bit. Of a bfloat16 parameter, state also holds the lower half of float32 master weights, of which the parameter is
    the upper half: training equals that of float32 masters bit for bit.

    Args:
        params: as for any torch optimizer; on the host, or float32 on a device, where torch's fused kernel updates
            them. Gradients may be float32, bfloat16 or float16.
        lr: learning rate, a number or a one-element tensor.
        betas: decay of momentum and variance, each in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the weight decay.
        decoupled: True for AdamW, False for Adam with the decay added to the gradient.
        state: how momentum and variance are kept: ``"fp32"``; ``"bf16"``, stochastically rounded; or ``"8bit"``,
            blockwise in the format of bitsandbytes. Parameters under 4,096 elements: float32.
        fp32_state: parameters whose state stays float32 with ``state="8bit"``, such as embeddings, told apart by
            identity. A set or mapping is read whenever a parameter is added, any other collection once.
        seed: of the stochastic rounding; the result depends on it, the order of parameters and the step only.
        num_threads: None for what the process may use (CPU set, cgroup quota, ``OMP_NUM_THREADS``).
        isa: None for the fastest (or ``LIGHTNING_CXL_ISA``). The result does not depend on it, nor on the threads.
        allocate_state: makes the 1-D tensor for the role MOMENTUM, VARIANCE or MASTER_WEIGHTS (the lower halves); its
            contents do not matter. Called at construction, so that a full tier shows before training, for every
            parameter that requires a gradient. None: ``torch.empty``.
        compute_weights: for float32 parameters: bfloat16 or float16 host tensors, shaped and laid out as these, that
            get the new weights in the same pass, rounded to nearest. Read at every step: entries may be added later.
        swapper: brings state to memory that `allocate_state` has put elsewhere. None: all of it is in memory.

    Raises:
        ConfigError: a hyper-parameter out of range, a parameter that is neither float32 nor, on the host, bfloat16.
        UnsupportedError: amsgrad, maximize, capturable or differentiable asked for in a group, or a parameter with gaps
            in its memory.
    """

    adds_nothing = True
    """Whether this class behaves as `CPUAdam` does. Each class says so itself: a user's subclass may do anything."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        state: StatePrecision = "fp32",
        fp32_state: Collection[torch.Tensor] = frozenset(),
        seed: int = 0,
        num_threads: int | None = None,
        isa: str | None = None,
        allocate_state: AllocateState | None = None,
        compute_weights: Mapping[torch.Tensor, torch.Tensor] | None = None,
        swapper: StateSwapper | None = None,
    ) -> None:
        self.num_threads = thread_count(num_threads)
        self.isa = chosen_isa(isa)
        if state not in STATE_FORMATS:
            raise ConfigError(f"state must be one of {', '.join(map(repr, STATE_FORMATS))}, got {state!r}")
        self.state_precision = state
        self.seed = seed
        # in a list, so that setting it through a wrapper that only passes attributes on, as Lightning's, sets our own
        self._scale = [1.0]
        self.wait = _nothing_runs
        """Returns when no update runs behind."""
        self.teams = ThreadTeams.detect()
        """Which threads update what; None on a machine with CPUs on one node."""
        self.compute_weights = {} if compute_weights is None else compute_weights
        self.kept = ParameterStates(state, fp32_state, allocate_state or allocate_from_torch, swapper)
        self._sums_of: SumsOf | None = None  # of a run, which measures gradients as they arrive
        self._with_masters: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # of what joins a group in a run
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            # torch's other options, so that its Adam can load our state dict
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": decoupled,
        }
        Optimizer.__init__(self, params, defaults)  # not torch's Adam: see `gradients/step.py`

    @classmethod
    def from_torch(cls, optimizer: Optimizer, **options: Any) -> "CPUAdam":
        """Return a CPUAdam that continues a torch Adam or AdamW, or another CPUAdam.

        It takes over the very same ``param_groups`` list and ``defaults`` dict, so that learning-rate schedulers and
        callbacks that hold them keep working, the hooks, and a copy of the state. A scheduler must also be pointed
        at it (``scheduler.optimizer = new``).

        Args:
            optimizer: exactly ``torch.optim.Adam``, ``torch.optim.AdamW`` or this class. Must not be stepped any more.
            options: the arguments of CPUAdam from `state` on.

        Raises:
            UnsupportedError: another class, or an option CPUAdam does not have.
        """
        own = isinstance(optimizer, CPUAdam) and vars(type(optimizer)).get("adds_nothing")
        if not (own or type(optimizer) in (Adam, AdamW)):
            raise UnsupportedError(
                f"CPUAdam can replace torch.optim.Adam and AdamW, not {type(optimizer).__qualname__}: "
                + (
                    "use CPUAdam itself, and step hooks for what the subclass adds"
                    if isinstance(optimizer, CPUAdam)
                    else "set `cpu_adam=False` to run the optimizer as it is"
                )
            )
        names = ("lr", "betas", "eps", "weight_decay")
        given = {name: optimizer.defaults[name] for name in names}
        decoupled = bool(optimizer.defaults.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
        new = cls(optimizer.param_groups, **given, decoupled=decoupled, **options)
        new.param_groups = optimizer.param_groups
        new.defaults = optimizer.defaults
        share_hooks(optimizer, new)
        new._load_moments([(group, list(group["params"])) for group in new.param_groups], optimizer.state)
        return new

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """State by parameter, as of the last step: waits for updates that run behind.

        What lies on tier `ssd` cannot be read here: `state_dict` reads it, and `load_state_dict` writes it.
        """
        self.wait()
        self.kept.check_not_lost()
        return self.plain_state

    @state.setter
    def state(self, value: defaultdict[torch.Tensor, Any]) -> None:
        self.plain_state = value

    @property
    def grad_scale(self) -> float:
        """Factor of the gradients in the next step, which sets it back to 1."""
        return self._scale[0]

    @grad_scale.setter
    def grad_scale(self, value: float) -> None:
        self._scale[0] = value

    def clip_grad_norm_(self, max_norm: float, *, scale: float = 1.0) -> float:
        """Let the next step clip the gradients to a total norm, without a sweep of its own.

        The norm comes from one read of those gradients that were not measured when they arrived; the step multiplies by
        the factor as it reads them. ``.grad`` keeps the values from before. Of several calls before a step the last
        one counts.

        Args:
            scale: factor that the gradients still need, such as 1 / loss scale; the step applies it too.

        Returns:
            The norm before clipping, of the scaled gradients; infinite or NaN if an element is.
        """
        norm, factor = clip_factor(self._whole_sums(), max_norm, scale)
        # set, not multiplied: the step that a factor of before was for may have been left out
        self.grad_scale = scale * factor
        return norm

    def drop_stale_scale(self) -> None:
        """Forget a factor that is infinite or not a number, unless these gradients are: it was for others."""
        if math.isfinite(self.grad_scale):
            return
        if all(map(math.isfinite, self._whole_sums())):
            self.grad_scale = 1.0

    def _whole_sums(self) -> list[float]:
        parameters = [parameter for group in self.param_groups for parameter in plain(group["params"])]
        grads = gradients(parameters)
        if self._sums_of is None:
            sums = sums_of_squares(grads, self.num_threads, self.isa)
        else:
            sums = self._sums_of(parameters)
        return sums_over_processes(grads, sums)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; a `grad_scale` that was for them goes, too.

        With `set_to_none` updates that run behind are not waited for, so they go on behind the next forward.
        """
        if set_to_none:
            for group in self.param_groups:
                if isinstance(group["params"], AwaitedParams):
                    group["params"].complete()
                for parameter in plain(group["params"]):
                    parameter.grad = None
        else:
            self.wait()  # updates that run behind read these gradients
            super().zero_grad(set_to_none)
        self.grad_scale = 1.0

    @property
    def fp32_state(self) -> Container[torch.Tensor]:
        """Parameters whose state stays float32 with ``state="8bit"``."""
        return self.kept.fp32_state

    def enter_run(
        self, sums_of: SumsOf, wait: Callable[[], None], with_masters: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._sums_of = sums_of
        self.wait = wait
        self._with_masters = with_masters

    def exit_run(self) -> None:
        """Use nothing of a run that is over: take memory from torch from now on, and measure gradients alone."""
        try:
            self.kept.exit_run(self.plain_state)
        finally:
            if self.kept.lost:
                self.plain_state.clear()
            self.wait = _nothing_runs
            self._sums_of = self._with_masters = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and reserve its optimizer state. A group that is refused is not added."""
        # not a method that the run puts here: Fabric's wrapper of an optimizer has those of the class alone
        super().add_param_group(param_group if self._with_masters is None else self._with_masters(param_group))
        group = self.param_groups[-1]
        try:
            check_group(group)
            if len(set(group["params"])) != len(group["params"]):
                raise ConfigError("a parameter is twice in the same group: it would be updated twice in each step")
            states = {}
            for index, parameter in enumerate(group["params"]):
                check_parameter(local(parameter), parameter_name(group, index))
                if parameter.requires_grad:
                    states[parameter] = self.kept.make(parameter)
        except BaseException:
            self.param_groups.pop()
            raise
        self.kept.by_parameter.update(states)

    @keeps_mark
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Nothing is changed if a parameter, a gradient or a hyper-parameter is refused.

        Args:
            closure: evaluates the loss again and returns it.

        Raises:
            UnsupportedError: a sparse gradient, or an option CPUAdam does not have.
            ConfigError: a parameter has meanwhile left the host, changed its dtype, shape or strides, or lost its
                memory; or a hyper-parameter is out of range.
            CheckpointError: someone replaced a parameter's state by one that does not fit it.
        """
        mark_as_called(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            step = AdamStep(self)
            updates = step.collect()
            self.drop_stale_scale()
            step.apply(updates, self.grad_scale)
            self.grad_scale = 1.0
            torch.autograd.graph.increment_version(written_by(updates))
        if self.kept.swapper is not None:
            self.kept.swapper.show_weights()  # step hooks may read parameters, and write to them
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; its tensors are not copies.

        Of state on tier `ssd` tensors show what the drives have now, in pages of the page cache and not in memory of
        the process; checksums have been compared. Writes to them change no state, and the next step may
        change what they show: clone what is to be kept.
        """
        found = super().state_dict()
        return {**found, "state": read_states(found["state"])}

    def unread_state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with `OnSsd` for tensors on tier `ssd`, which are not read."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of CPUAdam, ``torch.optim.Adam`` or ``torch.optim.AdamW`` into the memory held already.

        Parameters are matched by name when both sides carry names, else by order. Whether weight decay is decoupled
        stays as constructed. Everything is checked before anything is written.
        """
        self.wait()
        state_dict = state_dict.copy()
        before, after = loading_hooks(self)
        for pre_hook in before:
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        if not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError(
                f"an optimizer state dict has `state` and `param_groups`, this has {', '.join(map(str, state_dict))}"
            )
        matched = match_groups(self.param_groups, state_dict["param_groups"])
        groups = merged_groups(self.param_groups, [saved for saved, _ in matched])
        self._load_moments(
            [(g, ids) for g, (_, ids) in zip(self.param_groups, matched, strict=True)], state_dict["state"]
        )
        for group, new in zip(self.param_groups, groups, strict=True):
            group.update(new)
        for post_hook in after:
            post_hook(self)

    def _load_moments(
        self, sources: Iterable[tuple[Mapping[str, Any], Sequence[Any]]], saved: Mapping[Any, Mapping[str, Any]]
    ) -> None:
        """Copy saved states in. `sources` has for each group the key in `saved` of each of its parameters."""
        if self.kept.swapper is not None:
            self.kept.swapper.wait()
        entries: dict[torch.Tensor, dict[str, Any]] = {}
        for group, keys in sources:
            for index, (parameter, key) in enumerate(zip(group["params"], keys, strict=True)):
                name, entry = parameter_name(group, index), unwrapped(saved.get(key) or {})
                if entry:
                    check_moments(name, parameter, entry)
                    check_parameter(local(parameter), name)
                    self.kept.of(parameter).check(parameter, name)
                entries[parameter] = dict(entry)
        together: dict[Any, list[torch.Tensor]] = {}  # a record is read and written once
        for parameter, entry in entries.items():
            if entry:
                together.setdefault(self.kept.of(parameter).record or parameter, []).append(parameter)
            else:
                self.plain_state.pop(parameter, None)
        with torch.no_grad():
            for parameters in together.values():
                with self.kept.of(parameters[0]).reached() as at:
                    for parameter in parameters:  # copies what was saved into our memory
                        self.kept.of(parameter).bind(parameter, entries[parameter], at)
                self.plain_state.update((parameter, entries[parameter]) for parameter in parameters)

    def load_parameter(self, parameter: torch.Tensor, name: str, entry: Mapping[str, Any]) -> None:
        """Copy the saved state of one parameter into the memory that its state has; an empty one clears it."""
        self.wait()
        self._load_moments([({"params": [parameter], "param_names": [name]}, [0])], {0: entry})

    def load_options(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over hyper-parameters, group by group in their order."""
        for group, new in zip(self.param_groups, merged_groups(self.param_groups, groups), strict=True):
            group.update(new)

    @torch.no_grad()
    def load_remainder(self, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
        """Copy what a bfloat16 parameter lacks of its float32 master weights into the state of the parameter."""
        self.wait()
        own = self.kept.of(parameter)
        assert own.remainder is not None, "only split weights have a remainder"
        with own.reached() as at:
            in_shape(own.remainder, at).copy_(remainder)

    def __getstate__(self) -> dict[str, Any]:
        # nothing of a run, which belongs to this process
        own = ("num_threads", "isa", "compute_weights", "state_precision", "seed", "_scale", "kept")
        plain = super().__getstate__()
        state = defaultdict(dict, read_states(plain["state"]))
        return {**plain, "state": state, **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.wait = _nothing_runs
        self.plain_state = state.pop("state")
        Optimizer.__setstate__(self, state)  # not torch's Adam: see `gradients/step.py`
        if self.isa not in _cpu.supported_isas():  # the copy may be on another machine
            self.isa = _cpu.best_isa()
        self.teams = ThreadTeams.detect()
        self._sums_of = self._with_masters = None


log = logging.getLogger(__name__)


class Precisions:
    def __init__(
        self,
        use_cpu_adam: bool,
        state: StatePrecision,
        master: MasterForm,
        is_sensitive: Callable[[torch.Tensor], bool],
    ) -> None:
        self._use_cpu_adam = use_cpu_adam
        self.state: StatePrecision = state
        """How `CPUAdam` keeps momentum and variance, where its user has not said it."""
        self._master = master
        self._sensitive = is_sensitive
        self._foreign: set[int] = set()  # ids of parameters that not just one CPUAdam updates

    def consider(self, optimizers: Iterable[Optimizer]) -> None:
        """Learn which parameters not just one CPUAdam holds, before any is adopted: those have no split masters."""
        seen: set[int] = set()
        for optimizer in optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._foreign |= own & seen if self.becomes_cpu_adam(optimizer) else own
            seen |= own

    def form_for(self, optimizer: Optimizer, parameter: torch.Tensor) -> MasterForm | None:
        """Return the form of a 16-bit parameter's master; None where not only CPUAdam updates it."""
        is_ours = self.becomes_cpu_adam(optimizer) and id(parameter) not in self._foreign
        return self._master if is_ours else None

    def moment_bytes(self, optimizer: Optimizer, parameter: torch.Tensor) -> int:
        """Return the bytes of each of the two moments of a compute parameter; 0 where CPUAdam does not make them."""
        if not parameter.requires_grad or not self.becomes_cpu_adam(optimizer):
            return 0
        state = optimizer.state_precision if isinstance(optimizer, CPUAdam) else self.state
        sensitive = self.is_sensitive(optimizer, parameter)
        return moment_bytes(local(parameter).numel(), choose_precision(parameter, state, sensitive=sensitive))

    def is_sensitive(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        own = isinstance(optimizer, CPUAdam) and parameter in optimizer.fp32_state
        return own or self._sensitive(parameter)

    def becomes_cpu_adam(self, optimizer: Optimizer) -> bool:
        if isinstance(optimizer, CPUAdam):
            return True
        if not self._use_cpu_adam or type(optimizer) not in (Adam, AdamW):  # a subclass may do anything
            return False
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        other = dtypes - {torch.float32, torch.bfloat16, torch.float16}
        if other:
            log.info(
                f"{type(optimizer).__name__} stays torch's own: CPUAdam updates float32 and 16-bit weights, and some "
                f"are {', '.join(map(str, other))}"
            )
        return not other
