"""Saved optimizer state: which entry belongs to which parameter, is it sound, and what torch's optimizers read."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.optim.kernels import check_map, check_parameter, decode, join, num_blocks, split
from lightning_cxl.optim.parameter_state import (
    MOMENT_KEYS,
    REMAINDER,
    ParameterStates,
    as_number,
    check_options,
    check_ranges,
    in_shape,
)
from lightning_cxl.optim.swapped_state import read_states
from lightning_cxl.shards import local
from lightning_cxl.torch_private import loading_hooks

_MOMENTS = tuple(keys.values for keys in MOMENT_KEYS)
_CODED = tuple(keys.codes for keys in MOMENT_KEYS)
_WRAPPED = "__bnb_optimizer_quant_state__"  # in its state dicts of late, these lie in a dict of their own


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
    if all("param_names" in group for group in [*own, *saved]):
        return _match_by_name(own, saved)
    for index, (group, saved_group) in enumerate(zip(own, saved, strict=True)):
        if len(group["params"]) != len(saved_group["params"]):
            raise CheckpointError(
                f"group {index} of the saved optimizer state has {len(saved_group['params'])} parameters, "
                f"this optimizer's has {len(group['params'])}: the model or the groups have changed"
            )
    return [(saved_group, list(saved_group["params"])) for saved_group in saved]


def _match_by_name(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], list[Hashable]]]:
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
        check_options(saved_group)
        try:
            check_ranges({**group, **taken[-1]})
        except ConfigError as error:
            raise CheckpointError(f"saved state of parameter group {index}: {error}") from error
    return taken


def _some(names: Iterable[str]) -> str:
    """Return the first few names, sorted, or ``"none"``."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return ", ".join(f"`{name}`" for name in ordered[:5]) + more or "none"


def unwrapped(entry: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a parameter's saved state as one mapping, also when a state dict of bitsandbytes nests a part of it."""
    if not entry or _WRAPPED not in entry:
        return entry
    return {**{key: value for key, value in entry.items() if key != _WRAPPED}, **entry[_WRAPPED]}


def checked_entries(
    sources: Iterable[tuple[Mapping[str, Any], Sequence[Any]]], saved: Mapping[Any, Mapping[str, Any]]
) -> Iterator[tuple[torch.Tensor, str, Mapping[str, Any] | None]]:
    """Yield every parameter, its name and its saved state, None where there is none.

    Args:
        sources: parameter groups, each with the keys in `saved` of its parameters.
    """
    for group, keys in sources:
        for index, (parameter, key) in enumerate(zip(group["params"], keys, strict=True)):
            name, entry = parameter_name(group, index), unwrapped(saved.get(key))
            if entry:
                check_moments(name, parameter, entry)
            yield parameter, name, entry or None


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
    _check_step(name, entry["step"])


def _check_step(name: str, step: object) -> None:
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
    flat = unwrapped(entry) or {}
    if not set(_CODED) <= flat.keys():
        return dict(flat)
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


# ----------------------------------------------------------------------------------------------------
# `StateLoading`: how `CPUAdam` takes saved state into the memory that it has for it.


class StateLoading:
    """Loads whole state dicts, or the state of one parameter after another."""

    param_groups: list[dict[str, Any]]
    plain_state: defaultdict[torch.Tensor, Any]
    kept: ParameterStates
    wait: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; its tensors are not copies.

        Of state on tier `ssd` tensors show what the drives have now, in pages of the page cache and not in memory of
        the process; checksums have been compared. Writes to them change no state, and the next step may
        change what they show: clone what is to be kept.
        """
        found = super().state_dict()  # type: ignore[misc]
        return {**found, "state": read_states(found["state"])}

    def unread_state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with `OnSsd` for tensors on tier `ssd`, which are not read."""
        unread: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return unread

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of CPUAdam, ``torch.optim.Adam`` or ``torch.optim.AdamW`` into the memory held already.

        Parameters are matched by name when both sides carry names, else by order. Whether weight decay is decoupled
        stays as constructed. Everything is checked before anything is written.
        """
        self.wait()
        state_dict = state_dict.copy()
        before, after = loading_hooks(cast(Optimizer, self))
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
        self,
        sources: list[tuple[dict[str, Any], list[Any]]],
        saved: Mapping[Any, Mapping[str, Any]],
    ) -> None:
        """Copy saved states in. `sources` has for each group the key in `saved` of each of its parameters."""
        if self.kept.swapper is not None:
            self.kept.swapper.wait()
        found = []
        for parameter, name, entry in checked_entries(sources, saved):
            if entry is not None:
                check_parameter(local(parameter), name)
                self.kept.of(parameter).check(parameter, name)
            found.append((parameter, entry))
        together: dict[Any, list[tuple[torch.Tensor, Mapping[str, Any]]]] = {}  # a record is read and written once
        for parameter, entry in found:
            if entry is None:
                self.plain_state.pop(parameter, None)
            else:
                together.setdefault(self.kept.of(parameter).record or parameter, []).append((parameter, entry))
        with torch.no_grad():
            for several in together.values():
                states = {parameter: dict(entry) for parameter, entry in several}
                with self.kept.of(several[0][0]).reached() as at:
                    for parameter, state in states.items():
                        self.kept.of(parameter).bind(parameter, state, at)  # copies what was saved into our memory
                self.plain_state.update(states)

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
