"""`ParameterState`: all that the optimizer keeps of one parameter, in memory that stays where it was placed.

Below it, saved state: which entry belongs to which parameter, is it sound, and what torch's optimizers read of it.
"""

import copy
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from lightning_cxl.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from lightning_cxl.memory.host_memory import is_dense, laid_out_as
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.kernels import (
    BLOCK_SIZE,
    StatePrecision,
    Stretch,
    check_map,
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

# Options and hyper-parameters: what CPUAdam accepts, and the numbers of one step made from them.


class AdamScalars(NamedTuple):
    """The numbers of one update: the fields of ``struct adam_scalars``, in order."""

    decay: float
    l2: float
    lerp_weight: float
    beta2: float
    square_weight: float
    bias2_sqrt: float
    eps: float
    neg_step_size: float
    grad_scale: float


def scalars_of(group: Mapping[str, Any], step: float, grad_scale: float) -> AdamScalars:
    """Return the scalars of a group at the 1-based `step`, in double precision as torch computes them.

    A tensor `lr` or `betas` is used as it is, so that its own precision decides, as in torch, whose fused kernels
    however take a tensor `lr` as a number.
    """
    lr, weight_decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    lr = float(lr) if group.get("fused") else lr
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


def check_group(group: Mapping[str, Any]) -> None:
    """Refuse torch's options that the kernel does not have, and hyper-parameters that torch refuses, too."""
    # cheap enough for every step: anyone may write into a group
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise UnsupportedError(
                f"CPUAdam has no `{option}`: set `{option}=False`, or `cpu_adam=False` to run torch's optimizer itself"
            )
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


AllocateState = Callable[[torch.Tensor, TensorRole, torch.dtype, int], torch.Tensor]
"""Returns a 1-D tensor for a parameter's optimizer state: of that role, dtype and number of elements."""

_DTYPES: dict[StatePrecision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


def allocate_from_torch(parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device=parameter.device)


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
        shard = local(parameter)
        numel = shard.numel()
        self.unsigned = role is TensorRole.VARIANCE
        self.scales = None
        if precision == "8bit":
            self.scales = allocate(parameter, role, torch.float32, num_blocks(numel))
        self.values = laid_out_as(allocate(parameter, role, _DTYPES[precision], numel), shard)

    @property
    def flat(self) -> torch.Tensor:
        return flattened(self.values)

    def zero_(self, at: At = flattened) -> None:
        at(self.values).fill_(127 if self.scales is not None and not self.unsigned else 0)
        if self.scales is not None:
            at(self.scales).zero_()

    def load(self, values: torch.Tensor, scales: torch.Tensor | None = None, at: At = flattened) -> None:
        """Take over `values` of the parameter's shape, any element order.

        Scales are one per block, in the memory order of `values`; in row-major order where these have gaps.
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

    def __init__(
        self,
        parameter: torch.Tensor,
        precision: StatePrecision,
        allocate: AllocateState,
        swapper: StateSwapper | None = None,
    ) -> None:
        shard = local(parameter)
        self.dtype = parameter.dtype  # decides whether there is a remainder
        self.precision = precision
        self.known: KnownRow | None = None
        self.step = torch.zeros((), dtype=torch.float32)
        self.momentum = Moment(parameter, TensorRole.MOMENTUM, precision, allocate)
        self.variance = Moment(parameter, TensorRole.VARIANCE, precision, allocate)
        self.remainder: torch.Tensor | None = None
        if parameter.dtype is torch.bfloat16:
            memory = allocate(parameter, TensorRole.MASTER_WEIGHTS, torch.int16, shard.numel())
            self.remainder = laid_out_as(memory, shard)
        own, found = self._tensors(), None
        if swapper is not None:
            found = swapper.find(tensor for key, tensor in own.items() if key != "step")
        assert found is None or isinstance(found, StateRecord)
        self.record = found
        """The record that this state lies in; None where it is in memory."""
        # what users see: tensors cut as the parameter is, and `OnSsd` for those that are not in memory
        self.shown = dict(own)
        for key, value in own.items():
            if value is self.step:
                continue
            owner = parameter if shard is not parameter and value.shape == shard.shape else None
            if found is not None:
                self.shown[key] = OnSsd.of(found, value, owner)
            elif owner is not None:
                self.shown[key] = sharded_like(value, owner)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that steps change, by key of the optimizer's state."""
        pairs = list(zip((self.momentum, self.variance), MOMENT_KEYS, strict=True))
        own = {"step": self.step}
        own |= {keys.values if moment.scales is None else keys.codes: moment.values for moment, keys in pairs}
        own |= {keys.scales: moment.scales for moment, keys in pairs if moment.scales is not None}
        return own if self.remainder is None else {**own, REMAINDER: self.remainder}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "known": None}

    @contextmanager
    def reached(self) -> Iterator[At]:
        """Return a region in which the state can be read and written, in memory or in a buffer; yields where."""
        if self.record is None:
            yield flattened
        else:
            with self.record.use() as swapped:
                yield swapped.flat

    def come_to_memory(self, show: Callable[[Any], torch.Tensor], state: MutableMapping[str, Any]) -> None:
        """Lie where `show` says for each tensor that users see, from now on; a user's `state` follows."""
        before, own = self.shown, self._tensors()
        self.shown = {key: show(each) for key, each in before.items()}
        state.update({key: self.shown[key] for key, value in state.items() if value is before.get(key)})
        moved = {id(tensor): local(self.shown[key]) for key, tensor in own.items()}
        for moment in (self.momentum, self.variance):
            moment.values = moved[id(moment.values)]
            moment.scales = None if moment.scales is None else moved[id(moment.scales)]
        self.remainder = None if self.remainder is None else moved[id(self.remainder)]
        self.known = self.record = None

    def holds(self, state: Mapping[str, Any]) -> bool:
        return all(state.get(key) is value for key, value in self.shown.items())

    def check(self, parameter: torch.Tensor, name: str) -> None:
        """Check that this memory is still right for `parameter`, which may have changed since this was made."""
        parameter = local(parameter)
        if parameter.device != self.momentum.values.device:
            where = f"{parameter.device}, and its optimizer state on {self.momentum.values.device}"
            raise ConfigError(f"{name} is on {where}: bring the model back, or make a new optimizer")
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
        """Make ``optimizer.state[parameter]``, which has passed the checks, refer to this memory.

        An empty `state` starts at zero. A tensor that someone else put there is copied in and replaced by ours. In a
        region of `reached`, `at` says where the memory is now.
        """
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
        state.update(self.shown)
        if self.precision == "8bit":
            state.update({keys.map: dynamic_map(keys.unsigned) for keys in MOMENT_KEYS})

    def _zero(self, at: At) -> None:
        """Make all but the count of steps zero, wherever it is now."""
        self.momentum.zero_(at)
        self.variance.zero_(at)
        if self.remainder is not None:
            at(self.remainder).zero_()

    def _take(self, parameter: torch.Tensor, state: Mapping[str, Any], at: At) -> None:
        """Copy another state in, of any precision; see `check_moments` for what it may look like."""

        def read(key: str) -> Any:  # state of another optimizer may lie on SSD
            value = state.get(key)
            return value.read() if isinstance(value, OnSsd) else value

        if state["step"] is not self.step:
            self.step.fill_(float(state["step"]))
        for moment, keys in zip((self.momentum, self.variance), MOMENT_KEYS, strict=True):
            key = keys.values if keys.values in state else keys.codes
            if state[key] is self.shown.get(key):
                continue
            values, scales = read(key), read(keys.scales)
            if values.dtype is not torch.uint8 or scales is None:
                moment.load(shard_of(values, parameter), None, at)
            elif is_sharded(values) or not is_sharded(parameter):  # scales are those of the shard, or of the whole
                moment.load(local(values), scales, at)
            else:
                moment.load(shard_of(decode(values, scales, unsigned=moment.unsigned), parameter), None, at)
        saved = state.get(REMAINDER)
        if saved is not None and saved.dtype is not torch.int16:
            saved = None  # torch's optimizers carry it along as a number, and their steps make it meaningless
        is_own = saved is not None and saved is self.shown.get(REMAINDER)
        if saved is not None and not is_own:
            saved = shard_of(read(REMAINDER), parameter)
        if self.remainder is None:
            if saved is not None:  # of split weights: these are float32 masters of the same compute weights
                shard = local(parameter).detach()
                shard.copy_(join(split(shard)[0], saved.to(shard.device)))
        elif saved is None:
            at(self.remainder).zero_()
        elif not is_own:
            in_shape(self.remainder, at).copy_(saved)


class ParameterStates:
    """Makes the states of parameters and keeps them."""

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
        if not local(parameter).is_cpu:
            return ParameterState(parameter, "fp32", allocate_from_torch)
        precision = choose_precision(parameter, self._precision, sensitive=parameter in self.fp32_state)
        return ParameterState(parameter, precision, self.allocate, self.swapper)

    def of(self, parameter: torch.Tensor) -> ParameterState:
        """Return the state of a parameter; make it when the parameter was frozen while others got theirs."""
        own = self.by_parameter.get(parameter)
        if own is None:
            own = self.by_parameter[parameter] = self.make(parameter)
        return own

    def __getstate__(self) -> dict[str, Any]:
        # what lies on SSD is made again in memory when it is needed
        in_memory = {parameter: own for parameter, own in self.by_parameter.items() if own.record is None}
        return {**vars(self), "by_parameter": in_memory, "allocate": allocate_from_torch, "swapper": None}

    def check_not_lost(self) -> None:
        if self.lost:
            raise StorageError(self.lost)

    def exit_run(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Take memory from torch from now on. State on SSD becomes memory that shows it, to which updates write.

        State on a device comes to the host, as the model does.
        """
        swapper, self.swapper, self.allocate = self.swapper, None, allocate_from_torch
        if swapper is not None:
            self._leave(swapper, states)
        for parameter, own in self.by_parameter.items():
            if not own.momentum.values.is_cpu:
                own.come_to_memory(torch.Tensor.cpu, states.get(parameter, {}))

    def _leave(self, swapper: StateSwapper, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        on_ssd = [(parameter, own, own.record) for parameter, own in self.by_parameter.items() if own.record]
        try:
            swapper.wait()
            views = {record: swapper.view(record) for record in dict.fromkeys(record for *_, record in on_ssd)}
        except StorageError as error:
            self.lost = f"the state of this optimizer was lost with its run: {error}"
            self.by_parameter = {}
            raise
        for parameter, own, record in on_ssd:
            own.come_to_memory(partial(_shown_in, views[record]), states.get(parameter, {}))


def _shown_in(view: Buffer, each: Any) -> Any:
    return each.shown_in(view) if isinstance(each, OnSsd) else each


# Saved state: which entry belongs to which parameter, is it sound, and what torch's optimizers read of it.

_MOMENTS = tuple(keys.values for keys in MOMENT_KEYS)
_CODED = tuple(keys.codes for keys in MOMENT_KEYS)  # so that torch does not take codes for numbers
_WRAPPED = "__bnb_optimizer_quant_state__"  # in its state dicts of late, these lie in a dict of their own
_SCALES = tuple(keys.scales for keys in MOMENT_KEYS)
_MAPS = tuple(keys.map for keys in MOMENT_KEYS)


def parameter_name(group: Mapping[str, Any], index: int) -> str:
    """Return how messages call parameter `index` of `group`: its name where known, else place and shape."""
    names = group.get("param_names")
    if names is not None:
        return f"`{names[index]}`"
    return f"parameter {index} of its group (shape {tuple(group['params'][index].shape)})"


def match_groups(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], list[Hashable]]]:
    """Return for each own group the saved group that it continues and the saved id of each of its parameters.

    By parameter name when every group of both sides has names, so that order does not matter; else by order.
    """
    if len(own) != len(saved):
        raise CheckpointError(
            f"the saved optimizer state has {len(saved)} parameter groups, this optimizer has {len(own)}: "
            "configure the optimizer as it was when the checkpoint was written"
        )
    if not all("param_names" in group for group in [*own, *saved]):
        for index, (group, saved_group) in enumerate(zip(own, saved, strict=True)):
            if len(group["params"]) != len(saved_group["params"]):
                raise CheckpointError(
                    f"group {index} of the saved optimizer state has {len(saved_group['params'])} parameters, "
                    f"this optimizer's has {len(group['params'])}: the model or the groups have changed"
                )
        return [(saved_group, list(saved_group["params"])) for saved_group in saved]
    places = {
        name: (index, key)
        for index, group in enumerate(saved)
        for name, key in zip(group["param_names"], group["params"], strict=True)
    }
    own_names = {name for group in own for name in group["param_names"]}
    if own_names != places.keys():
        raise CheckpointError(
            "the saved optimizer state is for other parameters: "
            f"not in the checkpoint: {_some(own_names - places.keys())}; "
            f"not in this optimizer: {_some(places.keys() - own_names)}"
        )
    matched: list[tuple[Mapping[str, Any], list[Hashable]]] = []
    for index, group in enumerate(own):
        names = group["param_names"]
        sources = sorted({places[name][0] for name in names}) or [index]
        if len(sources) > 1:
            raise CheckpointError(
                f"parameters of group {index} ({_some(names)}) are spread over the saved groups {sources}: "
                "their hyper-parameters cannot be merged; group the parameters as when the checkpoint was written"
            )
        matched.append((saved[sources[0]], [places[name][1] for name in names]))
    return matched


def merged_groups(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each own group what it takes over from its saved group: hyper-parameters, but not the parameters."""
    taken = []
    for index, (group, saved_group) in enumerate(zip(own, saved, strict=True)):
        kept = {"params", "decoupled_weight_decay"} | ({"param_names"} & group.keys())
        taken.append({key: copy.deepcopy(value) for key, value in saved_group.items() if key not in kept})
        try:
            check_group({**group, **taken[-1]})
        except ConfigError as error:
            raise CheckpointError(f"saved state of parameter group {index}: {error}") from error
    return taken


def _some(names: Iterable[str]) -> str:
    """Return the first few names, sorted, or ``"none"``."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(f"`{name}`" for name in ordered[:5]) + more or "none"


def unwrapped(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a parameter's saved state as one mapping, also when a state dict of bitsandbytes nests a part of it."""
    return {**{key: value for key, value in entry.items() if key != _WRAPPED}, **entry.get(_WRAPPED, {})}


def check_moments(name: str, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
    """Check that `entry` is an Adam state that fits `parameter`: torch's, bitsandbytes' or ours, of any precision."""
    keys = _CODED if "state1" in entry else _MOMENTS
    missing = [key for key in ("step", *keys) if key not in entry]
    if missing:
        raise CheckpointError(
            f"the saved state of {name} has no {', '.join(missing)} (only {', '.join(map(str, entry)) or 'nothing'}): "
            "only the state of Adam or AdamW can be loaded"
        )
    for key in [*keys, *({REMAINDER} & entry.keys())]:
        _check_tensor(name, key, entry[key], tuple(parameter.shape))
        coded = keys is _CODED and entry[key].dtype is torch.uint8
        if key != REMAINDER and not coded and not entry[key].is_floating_point():
            kinds = "floating point or uint8 codes" if keys is _CODED else "floating point"
            raise CheckpointError(f"the saved {key} of {name} is {entry[key].dtype}, it must be {kinds}")
    if keys is _CODED:
        for _, codes, scales, map_, unsigned in MOMENT_KEYS:
            if entry[codes].dtype is not torch.uint8:
                continue  # bitsandbytes keeps small parameters in float32 under the same names
            shard = local(parameter)
            of_shard = isinstance(own := entry.get(scales), torch.Tensor) and own.numel() == num_blocks(shard.numel())
            _check_tensor(name, scales, own, (num_blocks((shard if of_shard else parameter).numel()),))
            if not entry[scales].is_floating_point():
                raise CheckpointError(
                    f"the saved {scales} of {name} is {entry[scales].dtype}, it must be floating point"
                )
            check_map(entry.get(map_), name, unsigned=unsigned)
    step = entry["step"]
    if isinstance(step, torch.Tensor) and step.numel() != 1:
        raise CheckpointError(f"the saved step of {name} has shape {tuple(step.shape)}, it must be one number")
    if not 0 <= as_number(step) < math.inf:
        raise CheckpointError(f"the saved step of {name} is {step!r}, it must be a number of steps, 0 or more")


def _check_tensor(name: str, key: str, value: object, shape: tuple[int, ...]) -> None:
    found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != shape:
        raise CheckpointError(
            f"the saved {key} of {name} has shape {found}, it must have {shape} for this parameter: "
            "the checkpoint is of another model"
        )
    assert isinstance(value, torch.Tensor)
    if value.layout is not torch.strided or value.is_meta:
        where = "the meta device" if value.is_meta else f"{value.layout} memory"
        raise CheckpointError(f"the saved {key} of {name} is in {where}: load the checkpoint as ordinary tensors")


def decoded(entry: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one parameter's state with 8-bit momentum and variance as float32 under torch's keys."""
    flat = dict(unwrapped(entry))
    if not set(_CODED) <= flat.keys():
        return flat
    of_codes = {key for keys in MOMENT_KEYS for key in (keys.codes, keys.scales, keys.map)}
    result = {key: value for key, value in flat.items() if key not in of_codes}
    for keys in MOMENT_KEYS:
        values = flat[keys.codes]
        if values.dtype is torch.uint8:
            check_map(flat.get(keys.map), name, unsigned=keys.unsigned)
            values = decode(values, flat[keys.scales], unsigned=keys.unsigned)
        result[keys.values] = values
    return result


def without_remainder(entry: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the state without the lower half of split master weights, and that half where it means something.

    torch's optimizers carry it along as a floating point number, and their steps make it meaningless.
    """
    remainder = entry.get(REMAINDER)
    rest = {key: value for key, value in entry.items() if key != REMAINDER}
    return rest, remainder if isinstance(remainder, torch.Tensor) and remainder.dtype is torch.int16 else None


def joined(weights: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return float32 master weights from compute weights, in any precision, and what they lack of them."""
    upper = weights if weights.dtype is torch.bfloat16 else split(weights.float().contiguous())[0]
    return join(upper.contiguous(), remainder.to(upper.device).contiguous())


def of_this_shard(entry: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return 8-bit state with the scales of this shard; as numbers, where other shards than this one were saved.

    Scales are per block of the shard that was saved, under keys that end with its first element.
    """
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
