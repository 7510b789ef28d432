"""What the package uses of FSDP2 that torch does not promise to keep. See `lightning_cxl/torch_private.py`."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_cxl.torch_private import find

_FSDP = "torch.distributed.fsdp._fully_shard"

make_wrapper = find("torch", "Tensor._make_wrapper_subclass", "show FSDP2 shards that lie on the host")
no_torch_function = find("torch", "_C._disabled_torch_function_impl", "see operators on shards behind autograd")
to_copy = find("torch", "ops.aten._to_copy.default", "copy shards on the host to the host")

_default_gather = find(f"{_FSDP}._fsdp_collectives", "DefaultAllGather", "gather into memory that is used again")
_default_reduce = find(f"{_FSDP}._fsdp_collectives", "DefaultReduceScatter", "reduce in memory that is used again")

_set_timeout = find(
    "torch.distributed.distributed_c10d", "_set_pg_timeout", "give every process group the timeout of the first"
)

GLOO_THREAD = "pt_gloo_runloop"
"""The name that torch gives each thread of a process group in which gloo's collectives run."""


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments that a call of an operator writes to; None if its kind never writes."""
    if not operator._schema.is_mutable:
        return None
    arguments = operator._schema.arguments
    given = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments)]
    return [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]


def sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 knows of each parameter that it manages in a model, one for tied ones; see `put_shard`."""
    for together in gathered_together(model):
        yield from together


def gathered_together(model: nn.Module) -> Iterator[list[Any]]:
    """Yield what `sharded_parameters` does, those together that FSDP2 gathers as one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in _groups(module):
                yield list(group.fsdp_params)


def _groups(module: Any) -> list[Any]:
    """Return what a module gathers by itself: one group where all of it is cut alike."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    return list(groups)


def has_all_reduce_hook(module: Any) -> bool:
    """Return whether a user has set what runs behind the reductions of a module."""
    return any(group._all_reduce_hook is not None for group in _groups(module))


def put_shard(managed: Any, shard: Tensor, memory: Tensor) -> None:
    """Put `shard` in the place of the local part of a parameter, before the first forward of the model.

    Args:
        shard: of the same shape and dtype, and of the same device unless the parameter is on the meta device.
        memory: of the same storage; FSDP2 takes a parameter with the storage that it knows for unchanged, and does not
            pad it, which would move it to other memory.
    """
    parameter = managed.sharded_param
    if parameter.is_meta:  # the parameter itself says which device it is on
        there = nn.Parameter(managed.to_sharded_dtensor(shard), requires_grad=parameter.requires_grad)
        there.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]
    else:
        parameter._local_tensor = shard
    managed._sharded_param_data = memory.view(-1)


def padded_size(fsdp_param: Any) -> torch.Size:
    """Return the shape of the memory of a shard: equal on all processes, larger than the shard on the last ones."""
    size: torch.Size = fsdp_param.padded_sharded_param_size
    return size


class FsdpUnit:
    """What one `FSDPModule` gathers as one: its sharded parameters, and how they are gathered."""

    def __init__(self, module: Any) -> None:
        groups = _groups(module)
        self.module = module
        self.num_groups = len(groups)
        """0 where all parameters are those of other units; more than one where they are sharded in different ways."""
        self._group = groups[0] if groups else None

    @property
    def gather(self) -> Any:
        """What gathers the parameters now."""
        assert self._group is not None
        return self._group._all_gather_comm

    @property
    def reduce(self) -> Any:
        """What reduces and scatters the gradients now."""
        assert self._group is not None
        return self._group._reduce_scatter_comm

    @property
    def exchanges_by_default(self) -> bool:
        """Whether nobody has replaced what gathers and what reduces."""
        return type(self.gather) is _default_gather and type(self.reduce) is _default_reduce

    def exchange_by(self, gather: Any, reduce: Any) -> None:
        """Let others gather and reduce from now on."""
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(reduce)

    def exchange_by_default(self, other: type) -> None:
        """Let FSDP2 gather and reduce as it does by itself, where objects of a class `other` do so now."""
        if isinstance(self.gather, other):
            self.module.set_custom_all_gather(_default_gather())
        if isinstance(self.reduce, other):
            self.module.set_custom_reduce_scatter(_default_reduce())


def timeout_s(group: Any) -> float | None:
    """Return how long ranks of a group wait for one another; None where its backends do not say."""
    limits = []
    for device in group._device_types:
        with suppress(RuntimeError):  # a backend written in Python is not known by its devices
            limits.append(getattr(getattr(group._get_backend(device), "options", None), "_timeout", None))
    return max((float(limit.total_seconds()) for limit in limits if limit is not None), default=None)


def set_timeout_s(group: Any, seconds: float | None) -> None:
    """Let ranks of a group wait for one another for so long; None: as they do."""
    if seconds is not None:
        _set_timeout(timedelta(seconds=seconds), group)


def fsdp_units(model: nn.Module) -> list[FsdpUnit]:
    """Return all modules inside a model to which ``fully_shard`` has been applied, and that gather something."""
    kind = find("torch.distributed.fsdp", "FSDPModule", "find sharded modules")
    for name in ("_get_fsdp_state", "set_custom_all_gather", "set_custom_reduce_scatter"):
        find("torch.distributed.fsdp", f"FSDPModule.{name}", "replace the collectives of sharded modules")
    for name in ("_sharded_local_tensor", "reset_sharded_param"):
        find(f"{_FSDP}._fsdp_param", f"FSDPParam.{name}", "put shards where other processes can read them")
    units = [FsdpUnit(module) for module in model.modules() if isinstance(module, kind)]
    return [unit for unit in units if unit.num_groups]


def move_shard(shard: Any, flat: Tensor) -> None:
    """Let a sharded parameter lie in other memory: the parameter stays the object that it is."""
    local = shard.sharded_param._local_tensor
    padded = flat.view(shard.padded_sharded_param_size)
    with torch.no_grad():
        shard.sharded_param._local_tensor = padded.as_strided(local.size(), local.stride())
    shard._sharded_param_data = flat
