"""A shard of a parameter that lies on the host, for FSDP2 on a device with memory of its own.

[Note: Shards on the host]
FSDP2 can keep shards on the host itself (`CPUOffloadPolicy`). But where a hook is to see a gradient, its thread waits
for the copy of each one. A `HostShard` says that it is on the device, so for FSDP2 nothing is offloaded:

* Gather. Just before it gathers a unit, FSDP2 asks each shard what to gather (`fsdp_pre_all_gather`). The shard starts
  the copy to the device and gives the tensor that it arrives in. Current then is the stream in which FSDP2 puts
  together what a unit gathers; this stream waits for the copy, and the host does not. Units that FSDP2 fetches ahead
  are copied ahead.
* Gradients. They stay on the device, views of one tensor for all parameters of a unit. FSDP2 calls the hooks of
  `register_post_accumulate_grad_hook`, parameter by parameter, and current then is the stream that has reduced them:
  a copy that a hook starts, without naming what it begins after, begins after that. When the hook sets `.grad` to None,
  the unit's tensor may go. It needs no event and no `record_stream`: [Note: Copies and streams] keeps the tensor.
* Updates. A thread may write `host` behind the training (`ShardedUnit`): a gather waits for that on the host, and so
  does whoever reads or writes the shard.
* Drives. `host` may only show what lies on drives, and a gather brings it from there: [Note: Shards on SSD].
* Bytes. `host` is written by who updates weights, on the host. When the host has run ahead, a copy to the device may
  still read it: `settle` waits for that. Torch's own writes through the shard wait by themselves.
* Everything else is as with a tensor of the device: who reads the shard gets its values there, who writes it changes
  the bytes on the host. Copies to the CPU do not go over the device.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, nn

from lightning_cxl import torch_private
from lightning_cxl.devices import Transfer, TransferEngine
from lightning_cxl.errors import UnsupportedError

_aten = torch.ops.aten
SHAPE_ALONE = frozenset(
    (
        *(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default),
        *(_aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default, _aten.new_zeros.default),
        *(_aten.new_ones.default, _aten.new_full.default, _aten.new_empty_strided.default),
    )
)
"""Operators that make a tensor on the device and read no value."""


def made_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(shape_of(args[0]), *args[1:], **{**kwargs, "device": kwargs.get("device") or args[0].device})


def shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class _Bytes:
    """Shared by all views of one shard: the way to the device, and the last copy that reads the host."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine
        self._reading: Transfer | None = None
        self.drives: Any = None  # a `ShardsOnSsd`, where the host only shows what lies on drives
        self.unit: ShardedUnit | None = None  # whose updates run behind the training

    def wait(self) -> None:
        if self.unit is not None:
            self.unit.wait()

    def to_device(self, host: Tensor, arrived: Tensor) -> None:
        self._reading = self.engine.h2d(host, arrived)
        self._reading.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Bytes":
        return self  # DCP copies what tensors hold, and takes their values from the storage

    def written(self) -> None:
        if self.drives is not None:
            self.drives.written()

    def wait_for_readers(self) -> None:
        if self._reading is not None:
            self._reading.wait_host()  # of all: copies to the device are done in order
            self._reading = None

    def settle(self) -> None:
        self.wait()
        self.wait_for_readers()
        if self.drives is not None:
            self.drives.settle()


class HostShard(Tensor):
    """Bytes on the host that look like a tensor of the training device; see [Note: Shards on the host]."""

    host: Tensor  # the values: what kernels of the host read and write, once `settle` has returned
    _bytes: _Bytes

    @staticmethod
    def __new__(cls, host: Tensor, engine: TransferEngine) -> "HostShard":
        return cls._of(host.detach(), _Bytes(engine))

    @classmethod
    def _of(cls, host: Tensor, shared: _Bytes) -> "HostShard":
        shard: HostShard = torch_private.make_wrapper(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=shared.engine.device,
        )
        shard.host, shard._bytes = host, shared
        return shard

    def settle(self) -> None:
        """Wait until no update writes the bytes and no copy to a device reads them; then the host may write them."""
        self._bytes.settle()

    def move(self, memory: Tensor) -> "HostShard":
        """Copy the bytes to other host memory, 1-D and as large, and lie there from now on; return this shard."""
        self.settle()
        return self.lie_in(memory.view(self.host.shape).copy_(self.host))

    def lie_in(self, host: Tensor, drives: Any = None) -> "HostShard":
        self.host, self._bytes.drives = host, drives
        return self

    def forget_drives(self, drives: object) -> None:
        """Use these drives no more, where they are those of the bytes: `host` goes on to show them."""
        if self._bytes.drives is drives:
            self._bytes.drives = None

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        shape = list(self.shape)
        if self.shape[1:] == outer_size[1:]:  # sharded by rows; the processes give the same number of them
            shape[0] = -(-outer_size[0] // mesh.size())
        self._bytes.wait()
        drives = self._bytes.drives
        if drives is not None and list(self.shape) == shape:
            arrived = drives.to_device(self.host)
        else:
            arrived = torch.empty(shape, dtype=self.dtype, device=self.device)
            if drives is not None:
                arrived[: self.shape[0]] = drives.to_device(self.host)
            elif self.numel():
                self._bytes.to_device(self.host, arrived[: self.shape[0]])
        if mp_policy.param_dtype is not None and self.is_floating_point():
            arrived = arrived.to(mp_policy.param_dtype)
        return (arrived,), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[()]] | None:
        return None if out is not None else (outputs[0], ())

    def untyped_storage(self) -> torch.UntypedStorage:
        self._bytes.wait()
        return self.host.untyped_storage()  # FSDP2 asks whether it is still the one that it knows, DCP copies it

    def data_ptr(self) -> int:
        return self.host.data_ptr()  # without one, an asynchronous save of DCP would take the shard for empty

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostShard({self.host!r}, device='{self.device}')"

    __torch_function__ = torch_private.no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SHAPE_ALONE:
            return made_like(func, args, kwargs)
        if func is _aten.is_pinned.default:
            return False  # as any tensor of a device; the bytes' own allocator knows of `host`
        if func.is_view:
            views, shared = func(args[0].host, *args[1:], **kwargs), args[0]._bytes
            return torch_private.tree_map(lambda view: HostShard._of(view, shared), views)
        for leaf in torch_private.tree_leaves((args, kwargs)):
            if isinstance(leaf, HostShard):
                leaf._bytes.wait()
        if func is torch_private.TO_COPY and torch.device(kwargs.get("device") or "meta").type == "cpu":
            return func(args[0].host, **kwargs)
        if (arguments := torch_private.written_by(func, args, kwargs)) is None:
            return func(*_to_device(args), **_to_device(kwargs))
        # it writes: on the host, unless it needs the device to do so
        written = [leaf for leaf in torch_private.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        shards = [tensor for tensor in written if isinstance(tensor, HostShard)]
        for shard in shards:
            shard.settle()
        random = torch.Tag.nondeterministic_seeded in func.tags  # DTensor prepares the device's generator, rank by rank
        if not random and all(isinstance(tensor, HostShard) or tensor.is_cpu for tensor in written):
            result = func(*_to_host(args), **_to_host(kwargs))
        else:
            copies: dict[int, Tensor] = {}
            result = func(*_to_device(args, copies), **_to_device(kwargs, copies))
            for shard in shards:
                shard.host.copy_(copies[id(shard)])
        for shard in shards:
            shard._bytes.written()
        return written[0] if isinstance(result, Tensor) else result


def _to_host(values: Any) -> Any:
    def on_host(value: Any) -> Any:
        return value.host if isinstance(value, HostShard) else value.cpu() if isinstance(value, Tensor) else value

    return torch_private.tree_map(on_host, values)


def _to_device(values: Any, copies: dict[int, Tensor] | None = None) -> Any:
    """Return the values with copies of shards on the device, each shard once in `copies`."""
    copies = {} if copies is None else copies

    def on_device(value: Any) -> Any:
        if not isinstance(value, HostShard):
            return value
        if id(value) not in copies:
            arrived = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            value._bytes.to_device(value.host, arrived)
            copies[id(value)] = arrived
        return copies[id(value)]

    return torch_private.tree_map(on_device, values)


class ShardedUnit:
    """What FSDP2 gathers together: its gradients leave the device together, and its update may run behind the training.

    It does for an update what `UnitWeights` does for weights that stream.
    """

    def __init__(self, group: Any) -> None:
        self.parameters: list[nn.Parameter] = [each.sharded_param for each in group.fsdp_params]
        self._group = group
        self._repeats = False
        self._update: Future[None] | None = None
        self._pid = os.getpid()
        self._bytes: list[_Bytes] = [p._local_tensor._bytes for p in self.parameters]  # type: ignore[attr-defined]
        for each in self._bytes:
            each.unit = self

    def begin_step(self) -> None:
        torch_private.forget_forwards(self._group)  # of a validation: FSDP2 does so at the end of the next backward
        self._repeats = False

    @property
    def runs_again(self) -> bool:
        """Whether a backward of this step has gathered it before another one did, or still may."""
        self._repeats |= torch_private.num_awaited_backwards(self._group) > 0
        return self._repeats

    def begin_update(self, update: "Future[None]") -> None:
        self.wait()
        self._update = update

    def wait(self) -> None:
        """Return when no update writes the shards; raises what went wrong in one."""
        update = self._update
        if update is None:
            return
        if os.getpid() != self._pid:
            raise UnsupportedError(
                "this process was forked, as workers of a DataLoader are, from one that updates its shards of weights "
                "behind the training, and may have half of the new values. Use a copy that was made before "
                "(`p.detach().clone()`), or `num_workers=0`"
            )
        try:
            with self._bytes[0].engine.stall("stall_update_s", "wait for an update"):
                update.result()
        finally:  # not earlier: until then nobody may take the weights for new
            if self._update is update:  # else another thread has waited, and the next one has begun
                self._update = None

    def wait_for_readers(self) -> None:
        for each in self._bytes:
            each.wait_for_readers()

    def settle(self) -> None:
        for each in self._bytes:
            each.settle()


def sharded_units(model: nn.Module) -> list[ShardedUnit]:
    """Return what FSDP2 gathers from memory of the host; none where something lies on a device or on drives."""
    groups = [group for group in torch_private.gather_groups(model) if group.fsdp_params]
    shards = [each.sharded_param._local_tensor for group in groups for each in group.fsdp_params]
    in_memory = all(isinstance(shard, HostShard) and shard._bytes.drives is None for shard in shards)
    return [ShardedUnit(group) for group in groups] if in_memory else []


Allocate = Callable[[str, torch.Size, torch.dtype], Tensor]
"""Gives host memory for the shard of the parameter of this name, of this shape and dtype."""


def host_shards(model: nn.Module, allocate: Allocate, engine: TransferEngine) -> dict[str, HostShard]:
    """Move the shards of all parameters that FSDP2 manages to the host, between two runs; return the new ones by name.

    Parameters stay the objects that they are; optimizers may know them already. Tied ones are one, under their first
    name. A shard on the meta device has the values that the memory has.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    shards, copies = {}, []
    for managed in torch_private.sharded_parameters(model):
        name, local = names[managed.sharded_param], managed.sharded_param.detach().to_local()
        if isinstance(local, HostShard):
            continue
        mesh_device = managed.sharded_param.device_mesh.device_type
        if managed.offload_to_cpu or mesh_device != engine.device.type:
            raise UnsupportedError(
                f"`{name}` is sharded on a mesh of `{mesh_device}` or with an `offload_policy`, and the model trains "
                f"on `{engine.device}`: call fully_shard with a mesh of this device and without an `offload_policy`"
            )
        if managed.sharded_param.grad is not None:
            raise UnsupportedError(
                f"`{name}` has a gradient of before the run: call `zero_grad()` before you set it up"
            )
        # on the CPU a run before has left it
        memory = local if local.is_cpu else allocate(name, local.shape, local.dtype)
        if (memory.shape, memory.dtype, memory.device.type) != (local.shape, local.dtype, "cpu"):
            raise ValueError(
                f"the shard of `{name}` needs {tuple(local.shape)} {local.dtype} on the CPU, and was given "
                f"{tuple(memory.shape)} {memory.dtype} on `{memory.device}`"
            )
        if not memory.numel():  # a process without rows; FSDP2 knows storage by its address, so there must be one
            memory = memory.new_empty(1)[:0].view(local.shape)
        if not (local.is_cpu or local.is_meta):
            copies.append(engine.d2h(local, memory))
        shards[name] = HostShard(memory, engine)
        torch_private.put_shard(managed, shards[name], memory)
    for copy in copies:
        copy.wait_host()
    return shards
