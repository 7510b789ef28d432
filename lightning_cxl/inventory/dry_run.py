"""`dry_run`: forward and backward of a model without any bytes, to learn what they would keep and compute.

[Note: Dry run]
The model is on the meta device, where tensors have a shape and no memory. The engine's own `ActivationOffload` wraps
its units, with an engine whose copies do nothing and an allocator that counts, so that what would be stored on the host
is decided by the code that stores it. Below, every operation that makes a tensor is seen: its bytes count from then
until torch drops the storage, which gives the peak on the device, and its floating-point operations are added up.

* Attention counts as a flash kernel does it: it keeps its inputs, its output and one number per row, no score matrix.
* Mixed precision is imitated, as torch has no autocast for this device: matrix products, convolutions and attention
  get 16-bit copies of their inputs; a weight's copy is kept until the forward ends, as autocast's cache does. Where the
  model itself switches autocast on or off, that of the CPU stands in, which does nothing to tensors on this device.
* A parameter's gradient is gone as soon as it is complete: the engine takes it away then.

Not seen: working memory inside of kernels, fragmentation of the device's allocator, what a compiler fuses, memory that
a copy still reads after torch has dropped it.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices import After, Copy, FinishedTransfer, Transfer, TransferEngine
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.streaming.activations import DEFAULT_MIN_BYTES, ActivationOffload
from lightning_cxl.streaming.quantised import numel, prepare_layers
from lightning_cxl.streaming.units import NamedUnits, find_units
from lightning_cxl.torch_private import TorchDispatchMode, run_backward, storage_key, tree_leaves, without_dispatch

_META = torch.device("meta")
_on_accumulated: Any = torch.Tensor.register_post_accumulate_grad_hook
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_PRODUCTS = frozenset(
    {
        functional.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.bmm,
        torch.addmm, torch.baddbmm, torch.einsum, functional.conv1d, functional.conv2d, functional.conv3d,
    }
)  # fmt: skip
_QUANTISED_PRODUCTS = frozenset(
    f"bitsandbytes.{name}" for name in ("gemm_4bit", "gemv_4bit", "int8_scaled_mm", "int8_mixed_scaled_mm")
)
"""Activations times weights, which their kernels read quantised."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """Bytes and flops of one forward and backward of one micro-batch."""

    stored_bytes: Mapping[str, int]
    """Inputs stored on the host, by unit; what several units share counts for the first."""
    device_peak_bytes: int
    """Most that is alive at once of what the computation makes; without weights, complete gradients and the batch."""
    forward_flops: float
    backward_flops: float
    """With the recompute of units."""
    note: str = ""
    """Why it is an estimate; empty after a dry run."""


def dry_run(
    model: nn.Module,
    units: NamedUnits,
    workload: Workload,
    compute_loss: Callable[[], torch.Tensor],
    min_bytes: int = DEFAULT_MIN_BYTES,
) -> DryRun:
    """Run forward and backward once. See [Note: Dry run]."""
    stored: dict[str, int] = {}

    def allocate(nbytes: int, unit: str) -> _NoBytes:
        stored[unit] = stored.get(unit, 0) + nbytes
        return _NoBytes()

    offload = ActivationOffload(_NoCopies(workload.computes_on_host), allocate, min_bytes=min_bytes)
    with ExitStack() as stack:
        stack.callback(prepare_layers(model, ()))
        offload.attach(units, model)
        stack.callback(offload.detach)
        for parameter in model.parameters():
            if parameter.requires_grad:  # its gradient is offloaded when it is complete
                stack.callback(_on_accumulated(parameter, lambda each: setattr(each, "grad", None)).remove)
        meter = stack.enter_context(_Meter())
        stack.enter_context(_autocast_of_cpu(workload.mixed))
        function = stack.enter_context(_Functions(meter))
        loss = compute_loss()
        function.end_forward()
        forward_flops, meter.flops = meter.flops, 0.0
        run_backward(loss)
    return DryRun(stored, meter.peak_bytes, forward_flops, meter.flops)


class _NoBytes:
    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with without_dispatch():
            return torch.empty(tuple(shape), dtype=dtype, device=_META)


class _NoCopies(TransferEngine):
    device = _META

    def __init__(self, computes_on_host: bool) -> None:
        self.computes_on_host = computes_on_host

    def d2h_all(self, copies: Sequence[Copy], *, after: After = None, from_here: bool = False) -> Transfer:
        return FinishedTransfer()

    h2d = TransferEngine.d2h


@contextmanager
def _autocast_of_cpu(mixed: bool) -> Iterator[None]:
    """Let the CPU's autocast, on if `mixed`, stand in for the one that torch has not for the meta device."""
    autocast: Any = torch.autocast
    own = autocast.__init__

    def of_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    autocast.__init__ = of_cpu
    try:
        with autocast("cpu", torch.bfloat16, enabled=mixed):
            yield
    finally:
        autocast.__init__ = own


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts living bytes of tensors that operations make, and floating-point operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_key(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.is_meta and _key(each) not in known | self._seen:
                self._count(each.untyped_storage())
        count = flop_registry.get(func.overloadpacket)
        if str(func.overloadpacket) in _QUANTISED_PRODUCTS:
            self.flops += 2.0 * result.numel() * args[0].shape[-1]
        elif str(func.overloadpacket) == "aten._grouped_mm":  # of experts; torch's own table lacks it
            rows, columns = args[:2]
            if rows.dim() == columns.dim() == 2:  # gradients of weights: each token is in one of the products
                self.flops += 2.0 * rows.numel() * columns.shape[-1]
            else:
                self.flops += 2.0 * result.numel() * rows.shape[-1]
        elif count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage_key(storage), storage.nbytes()
        self._seen.add(key)
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self._live_bytes -= nbytes


def _key(tensor: torch.Tensor) -> int:
    return storage_key(tensor.untyped_storage())


class _Functions(TorchFunctionMode):
    """Puts flash attention, and under mixed precision 16-bit inputs, in the place of what torch does on this device."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter
        self._copies: dict[int, torch.Tensor] = {}
        self._keeps_copies = True

    def end_forward(self) -> None:
        self._copies.clear()  # of weights
        self._keeps_copies = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            given = dict(zip(_ATTENTION, args, strict=False)) | kwargs
            query, key, value = (self._narrow(given[name]) for name in _ATTENTION[:3])
            attend: Any = _FlashAttention.apply
            causal = bool(given.get("is_causal"))
            return attend(query, key, value, causal, self._meter)
        if func in _PRODUCTS and torch.is_autocast_enabled("cpu"):
            args = tuple(self._narrow(each) for each in args)
            kwargs = {name: self._narrow(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)

    def _narrow(self, value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        if not is_wide or not torch.is_autocast_enabled("cpu"):
            return value
        if not (value.is_leaf and value.requires_grad and self._keeps_copies):
            return value.to(torch.bfloat16)
        if id(value) not in self._copies:
            self._copies[id(value)] = value.to(torch.bfloat16)
        return self._copies[id(value)]


class _FlashAttention(torch.autograd.Function):
    """Keeps what a flash kernel keeps, and counts its products: of a causal one half, the backward's twice."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, meter: _Meter) -> Any:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        if query.dim() == 4:  # as kernels leave it: a token's heads side by side, so that joining them copies nothing
            batch, heads, length, width = output.shape
            output = query.new_empty((batch, length, heads, width)).transpose(1, 2)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, row_sums)
        ctx.meter = meter
        products = 2.0 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        ctx.flops = products / 2 if causal else products
        meter.flops += ctx.flops
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        ctx.meter.flops += 2 * ctx.flops
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None, None


_ROUTER = (
    ("num_experts_per_tok", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
)
"""Names in configs of transformers: how many experts compute a token, and of how many."""


def measure(
    model: nn.Module, config: OffloadConfig, workload: Workload, compute_loss: Callable[[], torch.Tensor]
) -> DryRun:
    """Run one micro-batch dry; a model that cannot be run without values gets an estimate."""
    units = units_of(model, config)
    try:
        return dry_run(model, units, workload, compute_loss)
    except Exception as error:  # the user's model may do anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return estimate(model, config, workload, f"the model cannot be run without values ({reason})")


def estimate(model: nn.Module, config: OffloadConfig, workload: Workload, why: str) -> DryRun:
    tokens = workload.batch * workload.sequence
    width = next((m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)), 0)
    itemsize = 4 if workload.mixed else next((p.element_size() for p in model.parameters()), 4)
    nbytes = tokens * width * itemsize
    forward = 2.0 * tokens * _active_numel(model)
    note = (
        f"{why}: activations are estimated as batch x sequence x {width} per unit, flops as 2 per token and "
        f"parameter that it meets, and memory on the device is not known"
    )
    stored = {name: nbytes for name, _ in units_of(model, config)} if nbytes else {}
    return DryRun(stored, 0, forward, 3 * forward, note)


def _active_numel(model: nn.Module) -> float:
    """Return how many numbers of parameters a token is computed with: of experts, its router's choice."""
    total = sum(numel(p) for p in model.parameters())
    experts = sum(numel(p) for name, p in model.named_parameters() if "experts" in name.split("."))
    if not experts:
        return total
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    configs += [config.ffn_config for config in configs if hasattr(config, "ffn_config")]
    for config in configs:
        chosen, of = (max(getattr(config, name, None) or 0 for name in names) for names in _ROUTER)
        if chosen and of:
            return total - experts * (1 - min(chosen, of) / of)
    return total


def units_of(model: nn.Module, config: OffloadConfig) -> NamedUnits:
    return find_units(model, config.units) if config.activation_offload else []
