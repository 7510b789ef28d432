"""`ParameterState`: all that the optimizer keeps of one parameter, in memory that stays where it was placed."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from lightning_cxl.errors import ConfigError, StorageError, UnsupportedError
from lightning_cxl.memory.host_memory import is_dense, laid_out_as
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.kernels import (
    BLOCK_SIZE,
    StatePrecision,
    Stretch,
    decode,
    dynamic_map,
    encode,
    flattened,
    join,
    num_blocks,
    same_layout,
    split,
)
from lightning_cxl.optim.swapped_state import At, OnSsd, StateRecord, StateSwapper
from lightning_cxl.shards import first_element, is_sharded, local, shard_of, sharded_like

# ----------------------------------------------------------------------------------------------------
# Options and hyper-parameters: what CPUAdam accepts, and the numbers of one step made from them.


class AdamScalars(NamedTuple):
    """The numbers of one update; the row of numbers the kernel takes, in this order."""

    decay: float
    """Factor of the weight before the update: 1 - lr * weight_decay when decoupled, else 1."""
    l2: float
    """Weight decay added to the gradient when not decoupled, else 0."""
    lerp_weight: float
    """1 - beta1."""
    beta2: float
    square_weight: float
    """1 - beta2."""
    bias2_sqrt: float
    """sqrt(1 - beta2 ** step)."""
    eps: float
    neg_step_size: float
    """-lr / (1 - beta1 ** step)."""
    grad_scale: float
    """Factor of the gradient, before anything else: unscaling and clipping in one."""


def scalars_of(group: Mapping[str, Any], step: float, grad_scale: float) -> AdamScalars:
    """Return the scalars of a group at the 1-based `step`, in double precision as torch computes them.

    A tensor `lr` or `betas` is used as it is, so that its own precision decides, as in torch.
    """
    lr, weight_decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    decoupled = group["decoupled_weight_decay"]
    return AdamScalars(
        decay=float(1 - lr * weight_decay) if decoupled and weight_decay != 0 else 1.0,
        l2=0.0 if decoupled else float(weight_decay),
        lerp_weight=float(1 - beta1),
        beta2=float(beta2),
        square_weight=float(1 - beta2),
        bias2_sqrt=float((1 - beta2**step) ** 0.5),
        eps=float(group["eps"]),
        neg_step_size=float(-(lr / (1 - beta1**step))),
        grad_scale=float(grad_scale),
    )


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse torch's options that the kernel does not have."""
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise UnsupportedError(
                f"CPUAdam has no `{option}`: set `{option}=False`, or `cpu_adam=False` to run torch's optimizer itself"
            )


def check_ranges(group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that torch refuses too. Cheap enough for every step: anyone may write into a group."""
    for name in ("lr", "eps", "weight_decay"):
        if not as_number(group[name]) >= 0.0:
            raise ConfigError(f"`{name}` must be one number, at least 0, got {group[name]!r}")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0.0 <= as_number(beta) < 1.0 for beta in betas):
        raise ConfigError(f"`betas` must be two numbers in [0, 1), got {betas!r}")


def as_number(value: object) -> float:
    """Return a number or one-element tensor as float; NaN, which is in no range, for anything else."""
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value)  # type: ignore[arg-type]  # what cannot be converted says so
    except (TypeError, ValueError, RuntimeError):
        return math.nan


# ----------------------------------------------------------------------------------------------------
# `AwaitedParams`: the list of a group's parameters, which waits for what runs behind before it is read.
#
# A loop over ``optimizer.param_groups`` gets at weights past the modules, which wait too
# ([Note: Awaited parameters]). Learning-rate schedulers read the other entries of a group only, and what belongs to
# the step itself uses `plain`.


class AwaitedParams(list[torch.Tensor]):
    def __init__(
        self, parameters: Iterable[torch.Tensor], wait: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        super().__init__(parameters)
        self._wait = wait
        self.complete = complete

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._wait()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._wait()
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain list, after waiting."""
        return list, (list(self),)


def plain(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(list.__iter__(parameters)) if isinstance(parameters, AwaitedParams) else list(parameters)


def drop_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Drop the gradients of a group. An update that runs is not waited for: it has its own references to them."""
    if isinstance(parameters, AwaitedParams):
        parameters.complete()
    for parameter in plain(parameters):
        parameter.grad = None


# ----------------------------------------------------------------------------------------------------
# `Moment`: momentum or variance of one parameter, in float32, bfloat16 or 8 bit, in memory that stays where it is.

AllocateState = Callable[[torch.Tensor, TensorRole, torch.dtype, int], torch.Tensor]
"""Returns a 1-D host tensor for a parameter's optimizer state: of that role, dtype and number of elements."""

_DTYPES: dict[StatePrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


def allocate_from_torch(parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def choose_precision(parameter: torch.Tensor, wanted: StatePrecision, *, sensitive: bool) -> StatePrecision:
    """Return how the moments of `parameter` are kept.

    Under 4,096 elements there is little to save, and among them are norms and biases, which are sensitive (the rule of
    bitsandbytes). A stochastically rounded moment needs no scale to share, so `sensitive` matters in 8 bit only.
    """
    small = parameter.numel() < 4096
    return "fp32" if small or (sensitive and wanted == "8bit") else wanted


def moment_bytes(numel: int, precision: StatePrecision) -> int:
    scales = 4 * num_blocks(numel) if precision == "8bit" else 0
    return numel * _DTYPES[precision].itemsize + scales


class Moment:
    """One of Adam's two moments of one parameter."""

    __slots__ = ("scales", "unsigned", "values")

    def __init__(
        self, parameter: torch.Tensor, role: TensorRole, precision: StatePrecision, allocate: AllocateState
    ) -> None:
        numel = parameter.numel()
        self.unsigned = role is TensorRole.VARIANCE
        self.scales = None
        if precision == "8bit":
            self.scales = allocate(parameter, role, torch.float32, num_blocks(numel))
        self.values = laid_out_as(allocate(parameter, role, _DTYPES[precision], numel), parameter)

    @property
    def flat(self) -> torch.Tensor:
        return flattened(self.values)

    def zero_(self, at: At = flattened) -> None:
        at(self.values).fill_(127 if self.scales is not None and not self.unsigned else 0)
        if self.scales is not None:
            at(self.scales).zero_()

    def load(self, values: torch.Tensor, scales: torch.Tensor | None = None, at: At = flattened) -> None:
        """Take over `values` of the parameter's shape, any element order.

        Args:
            scales: one per block, in the memory order of `values`; in row-major order where these have gaps.
        """
        own, own_values = None if self.scales is None else at(self.scales), in_shape(self.values, at)
        if scales is not None:
            values = values.cpu() if is_dense(values) else values.cpu().contiguous()
        if own is not None and scales is not None and values.stride() == self.values.stride():
            own_values.copy_(values)
            own.copy_(scales)
            return
        plain = values if scales is None else decode(values, scales, unsigned=self.unsigned)
        if own is None:
            own_values.copy_(plain)
            return
        ordered = torch.empty_strided(self.values.shape, self.values.stride(), dtype=torch.float32).copy_(plain)
        encode(ordered, own_values, own, unsigned=self.unsigned)


def in_shape(tensor: torch.Tensor, at: At) -> torch.Tensor:
    """Return a dense tensor where its memory is now."""
    return at(tensor).as_strided(tensor.shape, tensor.stride())


class KnownRow(NamedTuple):
    """The kernel's row of a parameter in its last step, and the signature for which it is right."""

    signature: tuple[object, ...]
    numbers: tuple[int, ...]
    stretches: list[Stretch] | None
    """By team; None where there are no teams."""


class MomentKeys(NamedTuple):
    """Where a moment is in the state of a parameter: under torch's key, or in 8 bit under those of bitsandbytes."""

    values: str
    codes: str
    scales: str
    map: str
    unsigned: bool
    """Whether codes have no sign."""


MOMENT_KEYS = (
    MomentKeys("exp_avg", "state1", "absmax1", "qmap1", unsigned=False),
    MomentKeys("exp_avg_sq", "state2", "absmax2", "qmap2", unsigned=True),
)
REMAINDER = "remainder"
"""Key of what bfloat16 weights lack of float32 master weights, int16; see `kernels.split`."""


class ParameterState:
    """Step count, momentum, variance and, of a bfloat16 parameter, the remainder of its master weights.

    All of it is of the shard that this process holds. See [Note: Shards].
    """

    def __init__(self, parameter: torch.Tensor, precision: StatePrecision, allocate: AllocateState) -> None:
        self.dtype = parameter.dtype  # decides whether there is a remainder
        self.precision = precision
        self.known: KnownRow | None = None  # see `cpu_adam.KernelTable`
        self.step = torch.zeros((), dtype=torch.float32)
        self.momentum = Moment(parameter, TensorRole.MOMENTUM, precision, allocate)
        self.variance = Moment(parameter, TensorRole.VARIANCE, precision, allocate)
        self.remainder: torch.Tensor | None = None
        if parameter.dtype is torch.bfloat16:
            memory = allocate(parameter, TensorRole.MASTER_WEIGHTS, torch.int16, parameter.numel())
            self.remainder = laid_out_as(memory, parameter)
        self._entries = self._shown = self._varying()
        self.record: StateRecord | None = None
        """The record that this state lies in; None where it is in memory."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps."""
        return {**vars(self), "known": None}

    def lie_in(self, record: StateRecord, parameter: torch.Tensor) -> None:
        """Learn that all of it is in a record, and show that to users of `parameter`."""
        self.record = record
        self._show(parameter)

    def _show(self, parameter: torch.Tensor) -> None:
        """Make what users see: tensors cut as the parameter is, and `OnSsd` for those that are not in memory."""
        shard, record = local(parameter), self.record

        def shown(value: torch.Tensor) -> torch.Tensor:
            owner = parameter if shard is not parameter and value.shape == shard.shape else None
            if value is self.step:
                return value
            if record is not None:
                return OnSsd.of(record, value, owner)
            return value if owner is None else sharded_like(value, owner)

        self._shown = [(key, shown(value)) for key, value in self._entries]

    @contextmanager
    def reached(self) -> Iterator[At]:
        """Return a region in which the state can be read and written, in memory or in a buffer; yields where."""
        if self.record is None:
            yield flattened
        else:
            with self.record.use() as swapped:
                yield swapped.flat

    def come_to_memory(self, shown: Mapping[str, torch.Tensor]) -> None:
        """Lie in tensors that show what the record had, by key."""
        views = {id(value): local(shown[key]) for key, value in self._entries}
        for moment in (self.momentum, self.variance):
            moment.values = views[id(moment.values)]
            moment.scales = None if moment.scales is None else views[id(moment.scales)]
        if self.remainder is not None:
            self.remainder = views[id(self.remainder)]
        self._entries, self.known, self.record = self._varying(), None, None
        self._shown = [(key, shown[key]) for key, _ in self._entries]

    @property
    def entries(self) -> dict[str, torch.Tensor]:
        """Tensors that steps change, by key of the optimizer's state, as they are shown there."""
        return dict(self._shown)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors that steps change, but for the count of steps."""
        return [tensor for _, tensor in self._entries if tensor is not self.step]

    def holds(self, state: Mapping[str, Any]) -> bool:
        return all(state.get(key) is value for key, value in self._shown)

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Check that this memory is still right for `parameter`, which may have changed since this was made."""
        parameter = local(parameter)
        if parameter.dtype is not self.dtype:
            before, now = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, parameter.dtype))
            raise ConfigError(
                f"{name} was {before} when the optimizer was made, is {now} now: convert the model first, then make "
                "the optimizer"
            )
        if parameter.shape != self.momentum.values.shape:
            raise ConfigError(
                f"{name} had shape {tuple(self.momentum.values.shape)} when the optimizer was made and has "
                f"{tuple(parameter.shape)} now: make a new optimizer after resizing a model"
            )
        if not same_layout(self.momentum.values, parameter):
            raise ConfigError(
                f"{name} had strides {self.momentum.values.stride()} when the optimizer was made and has "
                f"{parameter.stride()} now: bring a model into its memory format first, then make the optimizer"
            )

    def bind(self, parameter: torch.Tensor, state: dict[str, Any], at: At | None = None) -> None:
        """Make ``optimizer.state[parameter]`` refer to this memory.

        The keys are torch's (``exp_avg``, ``exp_avg_sq``), with 8-bit state bitsandbytes' (``state1``, ``absmax1``,
        ``qmap1``, ...), so that torch does not take codes for numbers. An empty `state` starts at zero. A tensor that
        someone else put there is copied in and replaced by ours. The parameter has passed `check` and
        `tensor_checks.check_parameter`, the state `saved_state.check_moments`. Of a parameter that is cut over
        processes the state shows tensors that are cut alike, but of each shard its own scales of 8-bit state.

        Args:
            at: where the memory is now, for the caller who is in `reached`; None: it is reached here.
        """
        if local(parameter) is not parameter and self._shown is self._entries:
            self._show(parameter)
        if not state:
            self.step.zero_()
            if self.record is None:
                self._zero(flattened)
            else:
                self.record.blanks.append(self._zero)
        elif self.holds(state):
            return
        else:
            with self.reached() if at is None else nullcontext(at) as here:
                self._take(parameter, state, here)
        state.clear()
        state.update(self._shown)
        if self.precision == "8bit":
            state.update({keys.map: dynamic_map(keys.unsigned) for keys in MOMENT_KEYS})

    def _zero(self, at: At) -> None:
        """Make all but the count of steps zero, wherever it is now."""
        self.momentum.zero_(at)
        self.variance.zero_(at)
        if self.remainder is not None:
            at(self.remainder).zero_()

    def _varying(self) -> list[tuple[str, torch.Tensor]]:
        entries = [("step", self.step)]
        pairs = list(zip((self.momentum, self.variance), MOMENT_KEYS, strict=True))
        entries += [(keys.values if moment.scales is None else keys.codes, moment.values) for moment, keys in pairs]
        entries += [(keys.scales, moment.scales) for moment, keys in pairs if moment.scales is not None]
        if self.remainder is not None:
            entries.append((REMAINDER, self.remainder))
        return entries

    def _take(self, parameter: torch.Tensor, state: Mapping[str, Any], at: At) -> None:
        """Copy another state in, of any precision; see `saved_state.check_moments` for what it may look like."""
        if state["step"] is not self.step:
            self.step.fill_(float(state["step"]))
        shown = self.entries
        for moment, keys in zip((self.momentum, self.variance), MOMENT_KEYS, strict=True):
            key = keys.values if keys.values in state else keys.codes
            if state[key] is not shown.get(key):
                values, scales = (_in_memory(state.get(name)) for name in (key, keys.scales))
                moment.load(*_shard_of_moment(values, scales, parameter, unsigned=moment.unsigned), at)
        saved = state.get(REMAINDER)
        if saved is not None and saved.dtype is not torch.int16:
            saved = None  # torch's optimizers carry it along as a number, and their steps make it meaningless
        if saved is not None and saved is not shown.get(REMAINDER):
            saved = shard_of(_in_memory(saved), parameter)
        if self.remainder is None:
            if saved is not None:  # of split weights: these are float32 masters of the same compute weights
                shard = local(parameter).detach()
                shard.copy_(join(split(shard)[0], saved))
        elif saved is None:
            at(self.remainder).zero_()
        elif saved is not shown.get(REMAINDER):
            in_shape(self.remainder, at).copy_(saved)


def _in_memory(value: Any) -> Any:
    """Return state of another optimizer, which may lie on SSD."""
    return value.read() if isinstance(value, OnSsd) else value


def _shard_of_moment(
    values: torch.Tensor, scales: torch.Tensor | None, parameter: torch.Tensor, *, unsigned: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what of a saved moment belongs to the shard of `parameter`: numbers, or codes with their scales.

    Scales are per block of a whole parameter, or per block of this very shard.
    """
    if values.dtype is not torch.uint8 or scales is None:
        return shard_of(values, parameter), None
    if is_sharded(values) or not is_sharded(parameter):  # its scales are those of the shard, or of the whole
        return local(values), scales
    return shard_of(decode(values, scales, unsigned=unsigned), parameter), None


class ParameterStates:
    """Makes the states of parameters, keeps them, and lets go of those that nothing can ask for any more."""

    def __init__(
        self,
        precision: StatePrecision,
        fp32_state: Collection[torch.Tensor],
        allocate: AllocateState,
        swapper: StateSwapper | None,
    ) -> None:
        self.by_parameter: dict[torch.Tensor, ParameterState] = {}
        self.allocate = allocate
        self.swapper = swapper
        """Brings state that is not in memory; None where all is."""
        self.lost = ""
        """Why the state is not whole any more; empty where it is."""
        self._precision: StatePrecision = precision
        # `in` compares the elements of tensors in a list; where it goes by hash, tensors are told apart by identity
        by_hash = isinstance(fp32_state, (AbstractSet, Mapping)) or not isinstance(fp32_state, Iterable)
        self.fp32_state = fp32_state if by_hash else dict.fromkeys(fp32_state)

    def make(self, parameter: torch.Tensor) -> ParameterState:
        """Return a new state, which is not kept here yet."""
        precision = choose_precision(parameter, self._precision, sensitive=parameter in self.fp32_state)

        def allocate(_shard: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
            return self.allocate(parameter, role, dtype, numel)

        state = ParameterState(local(parameter), precision, allocate)
        record = None if self.swapper is None else self.swapper.find(state.tensors)
        assert record is None or isinstance(record, StateRecord)
        if record is not None:
            state.lie_in(record, parameter)
        return state

    def of(self, parameter: torch.Tensor) -> ParameterState:
        """Return the state of a parameter; make it when the parameter was frozen while others got theirs."""
        own = self.by_parameter.get(parameter)
        if own is None:
            own = self.by_parameter[parameter] = self.make(parameter)
        return own

    def drop_unused(self, groups: Iterable[Mapping[str, Any]], state: Mapping[torch.Tensor, Any]) -> None:
        """Let go of parameters that are in no group and have no state: those of a group that was removed."""
        used = {parameter for group in groups for parameter in plain(group["params"])}
        for parameter in [one for one in self.by_parameter if one not in used and one not in state]:
            del self.by_parameter[parameter]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps; what lies on SSD is made again in memory when it is needed."""
        in_memory = {parameter: own for parameter, own in self.by_parameter.items() if own.record is None}
        return {**vars(self), "by_parameter": in_memory, "allocate": allocate_from_torch, "swapper": None}

    def check_not_lost(self) -> None:
        if self.lost:
            raise StorageError(self.lost)

    def exit_run(self, states: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:
        """Take memory from torch from now on. State on SSD becomes memory that shows it, to which updates write."""
        swapper, self.swapper, self.allocate = self.swapper, None, allocate_from_torch
        if swapper is None:
            return
        on_ssd = {parameter: own for parameter, own in self.by_parameter.items() if own.record is not None}
        try:
            swapper.wait()
            views = {own.record: swapper.view(own.record) for own in on_ssd.values() if own.record is not None}
        except StorageError as error:
            self.lost = f"the state of this optimizer was lost with its run: {error}"
            self.by_parameter = {}
            raise
        for parameter, own in on_ssd.items():
            assert own.record is not None
            view, before = views[own.record], own.entries
            shown = {key: value.shown_in(view) if isinstance(value, OnSsd) else value for key, value in before.items()}
            own.come_to_memory(shown)
            for key, value in (states.get(parameter) or {}).items():
                if value is before.get(key):
                    states[parameter][key] = shown[key]


# ----------------------------------------------------------------------------------------------------
# 8-bit state that was saved for other shards: its scales are per block of a shard.

_SCALES = tuple(keys.scales for keys in MOMENT_KEYS)
_MAPS = tuple(keys.map for keys in MOMENT_KEYS)


def of_this_shard(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return 8-bit state with the scales of this shard; as numbers, where other shards than this one were saved."""
    first, numel = first_element(parameter), local(parameter).numel()
    result = {key: value for key, value in entry.items() if not key.startswith((*_SCALES, *_MAPS))}
    for keys in MOMENT_KEYS:
        codes = entry[keys.codes]
        if codes.dtype is not torch.uint8:  # bitsandbytes keeps small parameters in float32 under the same names
            continue
        named = {key: value for key, value in entry.items() if key.startswith(keys.scales)}
        scales = {int(key.partition(".")[2] or 0): value.flatten() for key, value in named.items()}
        begins = sorted(scales)
        ends = dict(zip(begins, [*begins[1:], parameter.numel()], strict=True))
        if first in scales and ends[first] == first + numel:
            result |= {keys.scales: scales[first], keys.map: dynamic_map(keys.unsigned)}
            continue
        del result[keys.codes]
        numbers = dynamic_map(keys.unsigned)[local(codes).flatten().long()]
        for begin in begins:
            low, high = max(begin, first), min(ends[begin], first + numel)
            if low < high:
                block = (torch.arange(low, high) - begin) // BLOCK_SIZE
                numbers[low - first : high - first] *= scales[begin][block]
        result[keys.values] = sharded_like(numbers.view(local(parameter).shape), parameter)
    return result
