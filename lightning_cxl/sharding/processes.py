"""What torch.distributed is asked about processes: how they meet, wait and agree. Every front end asks it here.

A process is one of ``world size`` ranks, each with one device. Functions here need the process group to be up.
"""

import atexit
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.gloo_threads import wait_for_gloo
from lightning_cxl.sharding.torch_private import set_timeout_s, timeout_s

atexit.register(wait_for_gloo)


@atexit.register  # runs before `wait_for_gloo`
def leave_nccl() -> None:
    """End the process group of a process that ends well: threads of NCCL's would meet a driver that is gone."""
    if dist.is_initialized() and "nccl" in dist.get_backend_config() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


REPLICATE, SHARD = "replicate", "shard"
"""The dimensions of a mesh: ranks along `SHARD` hold one copy of the training state together."""


def backend_for(device: torch.device) -> str:
    """Return the backends of a process group whose ranks compute on such devices, as torch writes them.

    Host tensors always go through gloo: what is on the host is not copied to a device to be sent.
    """
    of_device = dist.Backend.default_device_backend_map.get(device.type, dist.Backend.GLOO)
    return dist.Backend.GLOO if of_device == dist.Backend.GLOO else f"cpu:gloo,{device.type}:{of_device}"


def group_options(device: torch.device, timeout: timedelta | None) -> dict[str, Any]:
    """Return the options of ``init_process_group`` beside backend, rank and world size.

    Args:
        timeout: for which a rank waits for the others in a collective; None is torch's own.
    """
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if backend_for(device) != dist.Backend.GLOO:
        options["device_id"] = device
    return options


def store_of_restart(environment: Mapping[str, str]) -> Store | None:
    """Return where processes meet that torchrun has started anew on one machine; None where torch itself finds it.

    The agent of torchrun keeps one store over all starts, and processes would find addresses of those that are gone in
    it. Agents of several machines may count starts differently, so there it must be torchrun that makes a new store.

    Args:
        environment: variables that torchrun has set, if it has started this process.
    """
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if start == "0" or not shares_store or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"start_{start}", store)


def make_mesh(device: torch.device, num_machines: int, per_machine: int, *, replicate: bool) -> DeviceMesh:
    """Return the ranks as a mesh. Every rank calls this.

    Args:
        per_machine: ranks on each machine; those of one machine are numbered one after the other.

    Returns:
        Dimension `SHARD` alone, over all ranks; or `REPLICATE` over the machines and `SHARD` inside them.
    """
    if num_machines * per_machine != dist.get_world_size():
        raise UnsupportedError(
            f"{num_machines} machines with {per_machine} devices each need {num_machines * per_machine} processes, and "
            f"{dist.get_world_size()} were started: make `num_nodes` and `devices` fit what the launcher starts"
        )
    if replicate and num_machines > 1:
        mesh = init_device_mesh(device.type, (num_machines, per_machine), mesh_dim_names=(REPLICATE, SHARD))
        for group in mesh.get_all_groups():  # torch gives them a timeout of their own
            set_timeout_s(group, timeout_s(dist.group.WORLD))
        return mesh
    return init_device_mesh(device.type, (num_machines * per_machine,), mesh_dim_names=(SHARD,))


def gather_on_machine(value: Any, machine: int) -> list[Any]:
    """Return what each rank of this machine gives, in their order; all ranks of all machines call it."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (machine, value))
    return [given for where, given in found if where == machine]


def broadcast(value: Any, source: int = 0) -> Any:
    """Return what rank `source` gives, on every rank; anything that can be pickled."""
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


def reduce(tensor: Tensor, group: Any = None, op: Any = "mean") -> Tensor:
    """Replace a tensor by that of all ranks together.

    Args:
        op: "mean" or "avg", "sum" (also None), "min", "max", "product", or an operation of torch.distributed.

    Returns:
        The same tensor.
    """
    means = isinstance(op, str) and op.lower() in ("mean", "avg")
    if means or op is None:
        op = dist.ReduceOp.SUM  # gloo cannot average, and one group has several backends
    elif isinstance(op, str):
        op = getattr(dist.ReduceOp, op.upper())
    dist.all_reduce(tensor, op=op, group=group)
    if not means:
        return tensor
    mean = tensor / dist.get_world_size(group)
    return tensor.copy_(mean)
