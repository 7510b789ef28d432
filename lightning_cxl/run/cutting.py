"""What front ends do to train a model in several processes: cut it, follow it with optimizers, load whole weights."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.run.session import Session
from lightning_cxl.sharding.fsdp import cut, reshard
from lightning_cxl.shards import shard_of, sharded_like
from lightning_cxl.streaming.quantised import has_quantised
from lightning_cxl.streaming.units import find_units


def cut_for(
    session: Session, model: nn.Module, mesh: DeviceMesh, device: torch.device, root: nn.Module | None = None
) -> nn.Module:
    """Cut a model over all processes, and return the root. See [Note: Sharded models].

    Args:
        session: whose options say what the units are.
        model: INOUT: its parameters are replaced by others.
        mesh: of all processes.
        device: that this process computes on.
        root: see `cut`.

    Raises:
        UnsupportedError: an option or a model that needs one process.
    """
    if session.config.refers_to_ssd:
        raise UnsupportedError(
            "checkpoint='reference' of tier 'ssd' serves one process in this version: a checkpoint of "
            f"{mesh.size()} is one that any number of them reads, and has the state in it. Set checkpoint='copy'"
        )
    if has_quantised(model):
        raise UnsupportedError(
            f"quantised weights serve one process in this version, and there are {mesh.size()}: train with "
            "devices=1, or load the model without quantization"
        )
    return cut(model, find_units(model, session.config.units), mesh, session.host_on(device).engine, root)


def cut_state(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict of whole weights for `load_state_dict` of a model that is cut: its parameters cut alike."""
    reshard(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    fitting = {name: value for name, value in saved.items() if name in own and value.shape == own[name].shape}
    return {**saved, **{n: sharded_like(shard_of(value, own[n]), own[n]) for n, value in fitting.items()}}


def follow(names: Mapping[int, str], model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Put new parameters of a model into optimizers, in the place of those that have left it.

    Args:
        names: of the parameters before, by id.
        model: as it is now.
        optimizers: INOUT.
    """
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]
