"""Cut a model over processes with torch's own FSDP2, and keep the shards where the policy places them.

[Note: Sharded models]
FSDP2 (``torch.distributed.fsdp.fully_shard``) cuts, gathers and reduces; we say what is gathered together, and where
shards lie. Each unit is gathered by itself, before its forward and before its backward; everything else belongs to the
root, the smallest module that has all parameters, which is gathered once in a step. Where Lightning optimizes, that is
the LightningModule, so that its step may call any method of its models. A model that its user has cut already stays as
it is.

* Whole: what quantised layers have is not cut, for bytes have no rows, and not gathered: every process has all of it
  and streams it to its own device ([Note: Residency of a unit]). It is frozen, so nothing of it is reduced.
* Scalars: a parameter without dimensions has no rows, so every process has it whole and makes the same updates. FSDP2
  ignores it; a hook averages its gradients when those of shards are reduced (`_average_gradients`).
* Shards: when a run begins they move to the memory that the policy gives; FSDP2 gathers from there.
* Offloaded checkpointing is inside of what FSDP2 wraps: FSDP2's hooks belong to the call of a module, ours stand in
  for its ``forward``. So weights are gathered when the recompute in the backward needs them.
* Gradients: FSDP2 reduces those of a unit when its backward is over, cuts them like the weights, puts them into
  ``.grad``, or adds them to what is there, and calls the hooks on the shard. We take away what is there before the
  backward, so that they come alone and are added up in float32. See [Note: Life of a gradient].
* Without reductions (`without_reducing`): FSDP2 leaves gradients whole where they were computed, and autograd adds
  those of the next micro-batch to them, in their own type. We see nothing of them before the sum is reduced.
* The step: each process updates its own shards. Norms and the decision to leave a step out are of all processes:
  see `shards.py`.
"""

import mmap
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_cxl import torch_private
from lightning_cxl.devices import TransferEngine
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.host_memory import large_blocks_apart
from lightning_cxl.memory.resource import Buffer, MemoryResource, PoolResource
from lightning_cxl.sharding.host_shard import HostShard, host_shards
from lightning_cxl.sharding.processes import on_all_ranks, reduce
from lightning_cxl.shards import is_sharded, local, shard_of

PlaceShard = Callable[[nn.Parameter, torch.Tensor, int], torch.Tensor | None]
"""Gives 1-D memory of so many elements of a shard's type; None where the shard is in place already."""


def is_cut(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def root_of(model: nn.Module) -> nn.Module:
    """Return the smallest module of `model` that has all uses of its parameters: of a tied one there are several."""
    wanted, inside = _num_uses(model), model
    while True:
        child = next((each for each in inside.children() if _num_uses(each) == wanted), None)
        if child is None or isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # these have no forward
            return inside
        inside = child


def cut(
    model: nn.Module,
    units: Sequence[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    engine: TransferEngine,
    root: nn.Module | None = None,
    whole: Collection[nn.Parameter] = (),
) -> nn.Module:
    """Cut a model over the processes of a mesh; return the root, which gathers parameters outside of units.

    See [Note: Sharded models]. The model is on the host, the same on all processes. Its parameters are replaced, so
    optimizers are made later; its buffers move to the device. `whole`: frozen parameters that are not cut.
    """
    root, whole = root_of(model) if root is None else root, set(whole)
    scalars = [p for p in model.parameters() if not p.ndim and p not in whole]
    ignored = {*whole, *scalars}
    if is_cut(model):
        refuse_other_cuts(model)
        reshard(model)
    else:
        values = {} if engine.computes_on_host else _without_values(model, engine.device, ignored)
        with large_blocks_apart():  # shards go on to their tiers, and must leave no holes
            for _, unit in units:
                if unit is not root and next(unit.parameters(), None) is not None:
                    fully_shard(unit, mesh=mesh, ignored_params=ignored)
            fully_shard(root, mesh=mesh, ignored_params=ignored)
            if not engine.computes_on_host:
                owners = dict(model.named_parameters())
                host_shards(
                    model, lambda name, *_: shard_of(values.pop(name), owners[name]).to("cpu", copy=True), engine
                )
        _agree_on_values(model, mesh)
        if scalars:
            _average_gradients(root, scalars, mesh)
        root.register_forward_hook(_reshard_after_evaluation)
    return root


def reshard(model: nn.Module) -> None:
    """Let a model have its shards as parameters: the root keeps what it has gathered until a backward is over."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Return a region in which all processes call the same units of a model without its root; no backward."""
    root = next((module for module in model.modules() if isinstance(module, FSDPModule)), None)
    if root is None:
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # what is gathered is trained with later
        root.unshard()
        try:
            yield
        finally:
            reshard(model)


@contextmanager
def without_reducing(model: nn.Module) -> Iterator[None]:
    """Return a region whose backwards exchange no gradients; the first one after it reduces the sum of all.

    Until then each rank has whole gradients of all that is trained on its device. One process exchanges none anyway.
    """
    cuts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in cuts:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in cuts:
            module.set_requires_gradient_sync(True, recurse=False)


def _reshard_after_evaluation(root: nn.Module, _inputs: object, _output: object) -> None:
    """No backward comes that would: parameters are looked up next, or shards written, which the root would not see."""
    if not torch.is_grad_enabled() and isinstance(root, FSDPModule):
        root.reshard()


def refuse_other_cuts(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and any(p.is_shard() and not p.is_shard(0) for p in parameter.placements):
            raise UnsupportedError(
                f"`{name}` is cut as {parameter.placements}: shards of rows alone (`Shard(0)`) can be kept on tiers. "
                "Leave `shard_placement_fn` and tensor parallelism out, or leave the model to be cut here"
            )
    for name, module in model.named_modules():
        # reduced gradients are of another stream
        if isinstance(module, FSDPModule) and torch_private.has_all_reduce_hook(module):
            raise UnsupportedError(
                f"`{name}` has an all-reduce hook, and gradients leave the device while it may still run: take "
                "`set_all_reduce_hook` out. Machines that replicate a model reduce with `replicate_machines=True`"
            )


def _average_gradients(root: Any, scalars: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Let gradients of parameters that every process has whole be means over processes, as those of shards are.

    As in FSDP2, those that come while `root` reduces nothing are not shown, and the next one is the mean of the sum.
    What `torch.autograd.grad` returns is of this process.
    """
    reduces, held, set_plainly = True, dict[int, torch.Tensor](), root.set_requires_gradient_sync

    def set_requires_gradient_sync(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        nonlocal reduces
        reduces = requires_gradient_sync
        set_plainly(requires_gradient_sync, recurse=recurse)

    def average(scalar: weakref.ref[nn.Parameter], index: int, grad: torch.Tensor) -> torch.Tensor:
        parameter = scalar()
        if parameter is None or not torch_private.is_being_accumulated(parameter):
            return grad
        if grad.requires_grad:
            raise UnsupportedError(
                "several processes average the gradient of a parameter without dimensions, and it is part of a graph "
                "(`create_graph=True`): train with one process"
            )
        total = grad.to(torch.promote_types(grad.dtype, torch.float32)) + held.pop(index, 0)
        if not reduces:
            held[index] = total
            return torch.zeros_like(grad)
        for group in mesh.get_all_groups():
            reduce(total, group)
        return total.to(grad.dtype)

    for index, scalar in enumerate(scalar for scalar in scalars if scalar.is_floating_point()):
        is_trained = scalar.requires_grad
        scalar.requires_grad_(True)  # else it takes no hooks; what is frozen may be trained later
        scalar.register_hook(partial(average, weakref.ref(scalar), index))  # type: ignore[no-untyped-call]
        scalar.requires_grad_(is_trained)
    root.set_requires_gradient_sync = set_requires_gradient_sync  # FSDP2 notes it in shards, if there are some


@torch.no_grad()
def _without_values(model: nn.Module, device: torch.device, whole: set[nn.Parameter]) -> dict[str, torch.Tensor]:
    """Put parameters without memory in the place of those that are cut, and buffers on the device; return the values.

    So FSDP2 cuts shapes alone, and no weights are on the device.
    """
    values = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter not in whole}
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in whole:
                if id(parameter) not in empty:
                    stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                    stand_in.__dict__.update(parameter.__dict__)
                    empty[id(parameter)] = stand_in
                module._parameters[name] = empty[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return values


@torch.no_grad()
def _agree_on_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let copies of a shard be equal, scalars and buffers on all processes: models may be made with other seeds."""
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        if group.size() > 1:
            first = torch.distributed.get_global_rank(group, 0)
            shards = [] if dim == mesh.ndim - 1 else [local(p.detach()) for p in model.parameters() if is_sharded(p)]
            scalars = (p.detach() for p in model.parameters() if not p.ndim)
            for tensor in (*shards, *scalars, *model.buffers()):
                if not tensor.is_meta:
                    values = tensor.contiguous()
                    torch.distributed.broadcast(values, first, group)
                    if values is not tensor:
                        tensor.copy_(values)


@torch.no_grad()
def place_shards(model: nn.Module, place: PlaceShard, engine: TransferEngine) -> None:
    """Move the shards of a model to the memory that `place` gives. FSDP2 gathers from there from now on."""
    reshard(model)
    shards = list(torch_private.sharded_parameters(model))
    if shards and not engine.computes_on_host:
        refuse_other_cuts(model)

    def move() -> None:
        if not engine.computes_on_host:  # the user has cut the model, or a run before has brought it to the host
            with large_blocks_apart():
                host_shards(model, lambda _, shape, dtype: torch.empty(shape, dtype=dtype), engine)
        for managed in shards:
            parameter, size = managed.sharded_param, torch_private.padded_size(managed)
            shard = parameter._local_tensor
            is_apart = isinstance(shard, HostShard)
            memory = place(parameter, local(parameter), shard.numel() if is_apart else size.numel())
            if memory is None:
                continue
            if is_apart:
                memory = memory[: shard.numel()]
                torch_private.put_shard(managed, shard.move(memory), memory)
            else:
                padded, dim = memory.view(size).zero_(), managed.fsdp_placement.dim
                padded.narrow(dim, 0, shard.size(dim) if shard.numel() else 0).copy_(shard)
                torch_private.move_shard(managed, memory)

    if shards:
        mesh = shards[0].sharded_param.device_mesh
        on_all_ranks(move, mesh.get_group(mesh.ndim - 1))


def _num_uses(module: nn.Module) -> int:
    return sum(1 for _ in module.named_parameters(remove_duplicate=False))


class PooledCollective:
    """The collectives that FSDP2 calls to gather or to reduce, in memory of a pool. For a CPU that computes.

    FSDP2 takes an output for each unit and drops it soon. From the C library's heap such blocks leave holes, and it is
    trimmed in every step (`memory/host_memory.py`); from a pool the same pages serve all units.
    """

    def __init__(self, collective: Any, pool: PoolResource) -> None:
        self.collective = collective
        self._pool = pool

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._pool.allocate(torch.Size(size).numel() * dtype.itemsize).tensor(size, dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.collective(*args, **kwargs)


@contextmanager
def pooled_exchanges(model: nn.Module) -> Iterator[None]:
    """Inside, FSDP2 gathers and reduces a model in memory of a pool, unless somebody has replaced its collectives."""
    pool = PoolResource(_Pages())
    cuts = [
        each for each in model.modules() if isinstance(each, FSDPModule) and torch_private.has_default_collectives(each)
    ]
    for module in cuts:
        gather, reduce = torch_private.collectives_of(module)
        module.set_custom_all_gather(PooledCollective(gather, pool))  # type: ignore[arg-type]
        module.set_custom_reduce_scatter(PooledCollective(reduce, pool))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for module in cuts:
            gather, reduce = torch_private.collectives_of(module)
            if isinstance(gather, PooledCollective):
                module.set_custom_all_gather(gather.collective)
            if isinstance(reduce, PooledCollective):
                module.set_custom_reduce_scatter(reduce.collective)
        pool.close()


class _Pages(MemoryResource):
    """New pages of this process, which lie where its threads first write them, as torch's own memory does."""

    def allocate(self, nbytes: int, *, alignment: int = mmap.PAGESIZE) -> Buffer:
        # not shared, or a forked child would have the pages, too, and keep them
        own = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages = torch.frombuffer(own, dtype=torch.uint8)
        return Buffer(pages.data_ptr(), nbytes, (), None, pages)  # which keeps them
