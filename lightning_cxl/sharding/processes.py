"""Processes that train one model: how they meet, agree, exchange objects and end. Every front end asks it here.

A process is one of ``world size`` ranks, each with one device. Most functions here need the process group to be up.
"""

import atexit
import os
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_cxl.errors import LightningCXLError, UnsupportedError
from lightning_cxl.torch_private import GLOO_THREAD, set_timeout_s, timeout_s

REPLICATE, SHARD = "replicate", "shard"
"""The dimensions of a mesh: ranks along `SHARD` hold one copy of the training state together."""

_T = TypeVar("_T")


def backend_for(device: torch.device) -> str:
    # host tensors always go through gloo: what is on the host is not copied to a device to be sent
    of_device = dist.Backend.default_device_backend_map.get(device.type, dist.Backend.GLOO)
    return dist.Backend.GLOO if of_device == dist.Backend.GLOO else f"cpu:gloo,{device.type}:{of_device}"


def store_of_restart(environment: Mapping[str, str]) -> Store | None:
    """Return where processes meet that torchrun has started anew on one machine; None where torch itself finds it."""
    # The agent of torchrun keeps one store over all starts, and processes would find addresses of those that are gone
    # in it. Agents of several machines may count starts differently: there torchrun must make a new store.
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    shares_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if start == "0" or not shares_store or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), is_master=False)
    return PrefixStore(f"start_{start}", store)


def make_mesh(device: torch.device, num_machines: int, per_machine: int, *, replicate: bool) -> DeviceMesh:
    """Return the ranks as a mesh: `SHARD` over all ranks, or `REPLICATE` over the machines and `SHARD` inside them.

    Every rank calls this; those of one machine are numbered one after the other.
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
    found: list[Any] = [None] * dist.get_world_size()  # all ranks of all machines call this
    dist.all_gather_object(found, (machine, value))
    return [given for where, given in found if where == machine]


def broadcast(value: Any, source: int = 0) -> Any:
    box = [value]
    dist.broadcast_object_list(box, source)
    return box[0]


def reduce(tensor: Tensor, group: Any = None, op: Any = "mean") -> Tensor:
    """Reduce a tensor over ranks in place; `op` is that of Lightning: a name, None for the sum, or torch's."""
    means = isinstance(op, str) and op.lower() in ("mean", "avg")
    if means or op is None:
        op = dist.ReduceOp.SUM  # gloo cannot average, and one group has several backends
    elif isinstance(op, str):
        op = getattr(dist.ReduceOp, op.upper())
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.copy_(tensor / dist.get_world_size(group)) if means else tensor


def on_all_ranks(step: Callable[[], _T], group: Any = None) -> list[_T]:
    """Do a step on all ranks of a group (None: all), and return what it gives on each, in the order of the ranks.

    An error of one rank is raised on all. So the step exchanges nothing: others would wait for a rank that fails.
    """
    if group is None and not dist.is_initialized():
        return [step()]
    error: BaseException | None = None
    try:
        mine = _Answer(pickle.dumps(step()))
    except BaseException as raised:
        error, mine = raised, _Answer(kind=type(raised), text=str(raised))
        if not isinstance(raised, LightningCXLError):
            mine = _Answer(text=f"{type(raised).__name__}: {raised}")
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    try:
        if error is not None and not isinstance(error, LightningCXLError):
            raise error
        for rank, answer in enumerate(found):
            if answer.text is not None:
                raise answer.kind(f"rank {rank} of the group: {answer.text}") from error
    finally:
        error = None  # its traceback leads to this frame: what the step has made would stay until a collection
    return [pickle.loads(answer.result) for answer in found]


class _Answer(NamedTuple):
    """The answer of a rank to the others. Not every result or error can be sent: bytes and text can."""

    result: bytes = b""
    kind: type[BaseException] = LightningCXLError
    text: str | None = None  # of the error, if there is one


def find_machines() -> list[int]:
    # containers of a machine count as machines: each has limits of its own
    names = on_all_ranks(lambda: (Path("/proc/sys/kernel/random/boot_id").read_text(), os.uname().nodename))
    return list(map(list(dict.fromkeys(names)).index, names))


def ranks_of_each(machines: Sequence[int]) -> int:
    """Return how many ranks each machine has, where a mesh is to have a copy of the state on each."""
    num, rest = divmod(len(machines), max(machines) + 1)
    if rest or list(machines) != [rank // num for rank in range(len(machines))]:
        raise UnsupportedError(
            "`replicate_machines` needs as many processes on each machine, numbered one after the other there, and the "
            f"machines of the ranks are {list(machines)}: start them so (`srun --distribution=block`)"
        )
    return num


_CHECKS = 3  # a thread that sleeps until it gets the lock has it by the next check, as the pause gives the lock up
_PAUSE = 0.01  # seconds
_PATIENCE = 5.0  # seconds; a collective that other ranks never join costs none, for its thread sleeps


# A thread of gloo that drops the last reference to a tensor of Python's needs the interpreter's lock. When Python ends,
# it stops a thread that waits for that lock, and a run that has done all its work fails, with SIGABRT (torch 2.13;
# https://github.com/pytorch/pytorch/pull/179291). Destroying the process group is no remedy: a device mesh holds it.
# Not covered is a collective that nobody has waited for, and one that Python runs after this, as it ends.
@atexit.register
def _wait_for_gloo() -> None:
    deadline, quiet = time.monotonic() + _PATIENCE, 0
    while quiet < _CHECKS and time.monotonic() < deadline and (states := _gloo_states()):
        quiet = quiet + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE)


def _gloo_states() -> list[str]:
    """Return what gloo's threads do, in the kernel's letters: "S" sleep, "R" run or wait for a core."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD:
                found.append(rest.split()[0])
    return found


@atexit.register  # runs before `_wait_for_gloo`
def destroy_nccl_group() -> None:
    # only of a process that ends well; threads of NCCL's would meet a driver that is gone
    if dist.is_initialized() and "nccl" in dist.get_backend_config() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()
