"""`streamable`: which parameters of units can stream."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_cxl.memory.host_tensors import is_dense
from lightning_cxl.shards import local
from lightning_cxl.streaming.quantised import is_quantised_later, tensors_of
from lightning_cxl.streaming.unit_weights import owners_in
from lightning_cxl.streaming.units import NamedUnits
from lightning_cxl.torch_private import storage_key


def streamable(model: nn.Module, units: NamedUnits) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yield every unit with the parameters that can stream: its alone, dense, in plain memory of this host.

    Others (tied to a module outside of the unit, lazy, not quantised yet, data of a tensor subclass, views of shared
    storage) stay where they are. On the meta device, for planning, memory counts as this host's. Of a parameter that is
    cut over processes its shard counts.
    """
    owners = _owners(model, units)
    storages = _shared_storages(model)
    for name, unit in units:
        module_of = owners_in(unit)
        own = [p for p in unit.parameters() if owners[id(p)] == {name} and not is_lazy(p) and not is_quantised_later(p)]
        own = [p for p in own if all(map(_is_plain, tensors_of(module_of[id(p)], p).values()))]
        chosen = [p for p in own if _storage_of(p) not in storages]
        if chosen:
            yield name, unit, chosen


def _owners(model: nn.Module, units: NamedUnits) -> dict[int, set[str]]:
    """Return the names of the units that use each parameter, by its id; ``""`` stands for the rest of the model."""
    unit_of = {id(module): name for name, unit in units for module in unit.modules()}
    owners: dict[int, set[str]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(unit_of.get(id(module), ""))
    return owners


def _is_plain(tensor: torch.Tensor) -> bool:
    shard = local(tensor.data)
    plain = type(shard) is torch.Tensor and shard.device.type in ("cpu", "meta")
    return plain and shard.numel() > 0 and shard.layout is torch.strided and is_dense(shard)


def _shared_storages(model: nn.Module) -> set[int]:
    """Return the storages, as `_storage_of` tells them, that several tensors of the model lie in."""
    seen: set[int] = set()
    shared: set[int] = set()
    for tensor in map(local, _distinct([*model.parameters(), *model.buffers()])):
        if tensor.layout is torch.strided and not is_lazy(tensor) and tensor.numel():
            storage = _storage_of(tensor)
            (shared if storage in seen else seen).add(storage)
    return shared


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what tells storages apart: where their bytes are, for those without bytes torch's own object."""
    storage = local(tensor).untyped_storage()
    return storage_key(storage) if tensor.is_meta else storage.data_ptr()


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return iter({id(tensor): tensor for tensor in tensors}.values())
