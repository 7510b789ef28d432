"""Saved optimizer state: which entry belongs to which parameter, is it sound, and what torch's optimizers read."""

import copy
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.optim.eight_bit import check_map, decode, num_blocks
from lightning_cxl.optim.hyperparameters import as_number, check_options, check_ranges
from lightning_cxl.optim.number_formats import join, split
from lightning_cxl.optim.parameter_state import MOMENT_KEYS, REMAINDER
from lightning_cxl.shards import local

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

    Raises:
        CheckpointError: the two sides do not have the same groups of parameters.
    """
    if len(own) != len(saved):
        raise CheckpointError(
            f"the saved optimizer state has {len(saved)} parameter groups, this optimizer has {len(own)}: "
            "configure the optimizer as it was when the checkpoint was written"
        )
    if all("param_names" in group for group in [*own, *saved]):
        return _match_by_name(own, saved)
    matched: list[tuple[Mapping[str, Any], list[Hashable]]] = []
    for index, (group, saved_group) in enumerate(zip(own, saved, strict=True)):
        if len(group["params"]) != len(saved_group["params"]):
            raise CheckpointError(
                f"group {index} of the saved optimizer state has {len(saved_group['params'])} parameters, "
                f"this optimizer's has {len(group['params'])}: the model or the groups have changed"
            )
        matched.append((saved_group, list(saved_group["params"])))
    return matched


def _match_by_name(
    own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], list[Hashable]]]:
    places = {
        name: (index, param_id)
        for index, group in enumerate(saved)
        for name, param_id in zip(group["param_names"], group["params"], strict=True)
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
    """Return for each own group what it takes over from its saved group: hyper-parameters, but not the parameters.

    Raises:
        CheckpointError: a hyper-parameter is out of range.
        UnsupportedError: an option that CPUAdam does not have.
    """
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
        saved: states by key.

    Raises:
        CheckpointError: see `check_moments`.
    """
    for group, keys in sources:
        for index, (parameter, key) in enumerate(zip(group["params"], keys, strict=True)):
            name, entry = parameter_name(group, index), unwrapped(saved.get(key))
            if entry:
                check_moments(name, parameter, entry)
            yield parameter, name, entry or None


def check_moments(name: str, parameter: torch.Tensor, entry: Mapping[str, Any]) -> None:
    """Check that `entry` is an Adam state that fits `parameter`: torch's, bitsandbytes' or ours, of any precision.

    Raises:
        CheckpointError: a tensor is missing, has another shape or no numbers that can be read; names the parameter.
    """
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
    """Return one parameter's state with 8-bit momentum and variance as float32 under torch's keys.

    Args:
        entry: of CPUAdam or bitsandbytes; state of other optimizers stays as it is.
        name: of the parameter, for messages.

    Raises:
        CheckpointError: the codes are of another map than ours.
    """
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
