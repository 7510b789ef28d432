"""For front ends that train a model in several processes: cut it, follow it with optimizers, gather whole weights."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.run.session import Session
from lightning_cxl.sharding.fsdp import cut, reshard
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import shard_of, sharded_like
from lightning_cxl.streaming.quantised import kept_whole, tensors_of
from lightning_cxl.streaming.units import find_units, owners_in
from lightning_cxl.weights.files import UnreadWeight


def cut_for(
    session: Session, model: nn.Module, mesh: DeviceMesh, device: torch.device, root: nn.Module | None = None
) -> nn.Module:
    """Cut a model over all processes, and return the root. See [Note: Sharded models]."""
    if session.config.refers_to_ssd:
        raise UnsupportedError(
            "checkpoint='reference' of tier 'ssd' serves one process in this version: a checkpoint of "
            f"{mesh.size()} is one that any number of them reads, and has the state in it. Set checkpoint='copy'"
        )
    units, engine = find_units(model, session.config.units), session.host_on(device).engine
    if whole := kept_whole(model):
        whole = {name: _read(model, parameter) for name, parameter in whole.items()}
        _refuse_different(whole, model)
    return cut(model, units, mesh, engine, root, whole.values())


def _read(model: nn.Module, parameter: nn.Parameter) -> nn.Parameter:
    """Read weights whose reading was deferred ([Note: Deferred reading]), of which no process takes its rows alone."""
    if not isinstance(parameter, UnreadWeight):
        return parameter
    read = nn.Parameter(parameter.detach().clone(), requires_grad=False)
    for module in model.modules():  # a tied one has several
        module._parameters.update({own: read for own, each in module._parameters.items() if each is parameter})
    return read


def _refuse_different(whole: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Refuse weights that all processes should have alike and have not: each would train adapters of another base."""
    module_of = owners_in(model)

    def checksum(parameter: nn.Parameter) -> int:
        found = 0
        for tensor in tensors_of(module_of[id(parameter)], parameter).values():
            values: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            found = zlib.crc32(values, found)
        return found

    def checksums() -> dict[str, int]:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return dict(zip(whole, pool.map(checksum, whole.values()), strict=True))

    of_rank = on_all_ranks(checksums)
    for name, expected in of_rank[0].items():
        other = next((rank for rank, found in enumerate(of_rank) if found.get(name) != expected), None)
        if other is not None:
            raise UnsupportedError(
                f"`{name}` of the quantised base has other values on rank {other} than on rank 0, and every process "
                "needs the same: load it on all of them from the same files"
            )


def cut_state(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict of whole weights for `load_state_dict` of a model that is cut: its parameters cut alike."""
    reshard(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    fitting = {name: value for name, value in saved.items() if name in own and value.shape == own[name].shape}
    return {**saved, **{n: sharded_like(shard_of(value, own[n]), own[n]) for n, value in fitting.items()}}


@contextmanager
def taking_whole(model: nn.Module) -> Iterator[None]:
    """Return a region in which `load_state_dict` of a model that is cut takes whole weights, the same everywhere."""

    def cut_given(module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
        own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        given.update({prefix + name: value for name, value in cut_state(own, module).items()})

    handle = model.register_load_state_dict_pre_hook(cut_given)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def whole_state(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Return whole weights of a model that is cut, on the first process; all processes call it, others get nothing.

    One tensor after the other is gathered, so that a device holds one of them.
    """
    reshard(model)
    owners = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Any] = {}
    first_name: dict[int | str, str] = {}
    for name, value in model.state_dict().items():
        if not wanted(name):
            continue
        first = first_name.setdefault(owners.get(name, name), name)  # tied ones stay one tensor
        if first == name and isinstance(value, DTensor):
            value = value.full_tensor()
        if dist.get_rank() == 0:
            found[name] = found[first] if first != name else _on_host(value)
    return found


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def follow(names: Mapping[int, str], model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Put new parameters of a model into optimizers, in the place of those that have left it."""
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]
