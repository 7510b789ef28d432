"""Private names of torch that the package uses, each with its purpose.

Names are looked up when the package is imported, so a torch that lacks one, or that nobody has tested, is refused
before anything runs. Only the compiler, which takes seconds to import, is looked up when a run that needs it starts.

Five private names are used where they are needed, because everybody uses them and torch keeps them: ``tensor._version``
and the tables of a module, ``_parameters``, ``_buffers``, ``_modules`` and ``_non_persistent_buffers_set``.
"""

import dataclasses
import functools
import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from lightning_cxl.errors import UnsupportedError

OLDEST, NEWEST = (2, 11), (2, 15)  # the versions of torch that the tests have run on, as `pyproject.toml` declares them

_T = TypeVar("_T")


def check_version(version: str) -> None:
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= NEWEST:
        raise UnsupportedError(f"torch {version} is not known to work with lightning_cxl. {_advice()}")


def find(module: str, path: str, purpose: str) -> Any:
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        raise UnsupportedError(
            f"torch {torch.__version__} has no `{module}.{path}`, which lightning_cxl needs to {purpose}. {_advice()}"
        ) from None


def _advice() -> str:
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return f"It is tested with torch {oldest} to {newest}: install one of these."


check_version(torch.__version__)

# --- memory

_use_count = find("torch", "_C._storage_Use_Count", "tell whether anybody else holds a tensor's memory")


def _holders(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    count: int = _use_count(storage._cdata)
    return count + sys.getrefcount(storage)


_alone = torch.empty(1)
_holders(_alone)  # the first look makes torch's object for the storage, which counts from then on
_ONE_HOLDER = _holders(_alone)


def is_only_holder(tensor: Tensor) -> bool:
    """Return whether nothing else reaches the memory of a tensor whose storage object exists already."""
    return _holders(tensor) == _ONE_HOLDER


def _references(grad: Tensor) -> tuple[int, int]:
    return sys.getrefcount(grad), _holders(grad)


def is_only_gradient(grad: Tensor) -> bool:
    """Return whether only its parameter, and one object of the caller, hold a gradient or reach its memory."""
    names, holders = _references(grad)
    return names <= _ONLY_GRADIENT[0] and holders <= _ONLY_GRADIENT[1]


_alone.grad = torch.frombuffer(bytearray(4), dtype=_alone.dtype).view(1)  # as a gradient in memory of ours
_in_one_object = (_alone.grad,)
_holders(_in_one_object[0])
_ONLY_GRADIENT = (lambda grad: _references(grad))(_in_one_object[0])  # as deep in calls as above


_map_file = find("torch", "UntypedStorage.from_file", "read checkpoints that are larger than memory")
_maps = threading.RLock()


@contextmanager
def mapping_files_with(show: Callable[[str, int], torch.UntypedStorage]) -> Iterator[None]:
    """Return a region in which ``torch.load(mmap=True)`` gets the bytes of a file from `show`; of one thread at a time.

    Torch's own maps ask the kernel to keep memory for writes, so it refuses files that are larger than memory. Writes
    to what `show` returns for a path and a size must not reach the file.
    """

    def from_file(filename: str, shared: bool = False, nbytes: int = 0) -> torch.UntypedStorage:
        return _map_file(filename, shared, nbytes) if shared else show(filename, nbytes)

    with _maps:
        torch.UntypedStorage.from_file = staticmethod(from_file)  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.from_file = _map_file  # type: ignore[method-assign]


# --- the autograd engine

_run_backward = find("torch.autograd", "Variable._execution_engine.run_backward", "run the backward of a dry run")
_queue_callback = find("torch.autograd", "Variable._execution_engine.queue_callback", "learn when a backward ends")
_graph_task = find("torch", "_C._current_graph_task_id", "tell which backward is running")
_will_run = find("torch", "_C._will_engine_execute_node", "tell `backward` from `torch.autograd.grad` in a hook")
_hooks_after = find("torch", "Tensor._post_accumulate_grad_hooks", "know who sees a gradient that has been accumulated")


def run_backward(loss: Tensor) -> None:
    """Do what ``loss.backward()`` does, which would set function modes aside meanwhile, also for recomputes."""
    _run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward that is running, before it returns; not where it fails."""
    calls = [callback]  # a thread of autograd keeps what it was given for a moment after `loss.backward()` has returned
    _queue_callback(lambda: calls.pop()())


def backward_id() -> int | None:
    """Return what tells the backward that this thread runs in from all others; None if it runs in none."""
    number = int(_graph_task())
    return None if number == -1 else number


def is_being_accumulated(parameter: Tensor) -> bool:
    """Return, in a hook of a parameter, whether its gradient goes to ``.grad``, not out of `torch.autograd.grad`."""
    try:
        return bool(_will_run(torch.autograd.graph.get_gradient_edge(parameter).node))
    except RuntimeError:  # torch refuses to answer for a leaf that `torch.autograd.grad` asks for
        return False


def hooks_after_accumulation(parameter: Tensor) -> dict[int, Callable[[Tensor], None]]:
    """Return the hooks that run when a gradient has been accumulated, by id, in their order. Not a copy."""
    hooks: dict[int, Callable[[Tensor], None]] | None = _hooks_after.__get__(parameter)
    return {} if hooks is None else hooks


MOVE = "_apply"  # of a module: `.to`, `.cpu` and others come there
find("torch", "nn.Module._apply", "see that a model is moved")
_transforms = find("torch", "_C._functorch.peek_interpreter_stack", "run units plainly in torch.func transforms")
_exec_group: Callable[[], object] = getattr(torch._C, "_get_graph_exec_group", lambda: None)  # of newer torch
find("torch.nn.utils.parametrize", "_cache_enabled", "know whether parametrizations are computed once for several uses")


def is_in_transform() -> bool:
    return _transforms() is not None


def in_exec_group() -> bool:
    """Return whether what a recompute yields serves several backwards: `torch.utils.checkpoint.GraphExecGroup`."""
    return bool(_exec_group() is not None)


def caches_weights(module: nn.Module) -> bool:
    return bool(parametrize._cache_enabled) and any(map(parametrize.is_parametrized, module.modules()))


# --- `.grad` and `.data` of a parameter whose class says something else

plain_grad: Callable[[Tensor], Tensor | None] = find("torch", "Tensor.grad.__get__", "see what autograd has made")
set_plain_grad: Callable[[Tensor, Tensor | None], None] = find("torch", "Tensor.grad.__set__", "take gradients away")
plain_data: Callable[[Tensor], Tensor] = find("torch", "Tensor.data.__get__", "look at weights without autograd")
set_plain_data: Callable[[Tensor, Tensor], None] = find("torch", "Tensor.data.__set__", "let weights move to a device")


# --- profilers

_profiler = find("torch.autograd", "profiler", "give names to what profilers show")
find("torch.autograd.profiler", "_is_profiler_enabled", "give names to what profilers show")


def is_profiling() -> bool:
    """Return whether a profiler of torch runs, in any thread."""
    return bool(_profiler._is_profiler_enabled)


# --- operators

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = find("torch.utils._python_dispatch", "TorchDispatchMode", "see the operators of a thread")
dispatch_modes: Callable[[], list[Any]] = find(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", "tell whether host tensors are being placed"
)
without_dispatch: Callable[[], AbstractContextManager[Any]] = find(
    "torch", "_C._DisableTorchDispatch", "make tensors that no dispatch mode sees"
)
TO_COPY: Any = find("torch", "ops.aten._to_copy.default", "place the copies that `tensor.to` makes")
PIN_MEMORY: Any = find("torch", "ops.aten._pin_memory.default", "place the copies that `tensor.pin_memory` makes")
is_zero_tensor: Callable[[Tensor], bool] = find("torch", "Tensor._is_zerotensor", "leave tensors without memory alone")
_storage_object = find("torch", "UntypedStorage._cdata", "tell apart storages that have no bytes")

find("torch", "ops.aten.empty.memory_format._schema", "know what an operator takes and returns")


def schema_of(operator: Any) -> Any:
    return operator._schema


def written_by(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return the arguments that a call of an operator writes to; None if its kind never writes."""
    if not schema_of(operator).is_mutable:
        return None
    arguments = schema_of(operator).arguments
    given = [*zip(arguments, args, strict=False), *((each, kwargs.get(each.name)) for each in arguments)]
    return [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return torch's own object behind a storage: what tells storages without bytes apart, as long as they live."""
    return _storage_object.__get__(storage)


# --- trees of arguments and results

PYTREE_NODES: dict[type, Any] = find("torch.utils._pytree", "SUPPORTED_NODES", "find and replace inputs of units")
tree_leaves: Callable[[Any], list[Any]] = find("torch.utils._pytree", "tree_leaves", "find tensors in results")
tree_map: Callable[[Callable[[Any], Any], Any], Any] = find("torch.utils._pytree", "tree_map", "replace arguments")

# --- tensors of a class of their own, and hooks of modules

make_wrapper: Callable[..., Any] = find("torch", "Tensor._make_wrapper_subclass", "stand for tensors elsewhere")
no_torch_function = find("torch", "_C._disabled_torch_function_impl", "see operators on shards behind autograd")
plain_tensor_functions: Callable[[], AbstractContextManager[Any]] = find(
    "torch", "_C.DisableTorchFunctionSubclass", "ask such a stand-in for its shape"
)
_METADATA = frozenset(("device", "dim", "dtype", "is_floating_point", "is_meta", "layout", "ndim", "nelement", "numel"))
_METADATA |= {"requires_grad", "shape", "size"}


def asks_metadata(func: Any, more: Collection[str] = ()) -> bool:
    """Whether a `__torch_function__` is called for what reads no bytes of a tensor, or for one of these names."""
    name = getattr(getattr(func, "__self__", func), "__name__", "")
    return name in _METADATA or name in more


_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
for _name in _BACKWARD_HOOKS:
    if not hasattr(nn.Module(), _name):
        find("torch", f"nn.Module.{_name}", "know whether a module's backward is hooked")
_hooks_of_all_backwards = tuple(
    find("torch.nn.modules.module", f"_global{name}", "know whether the backward of all modules is hooked")
    for name in _BACKWARD_HOOKS
)


def wrapper_tensor(cls: type[_T], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _T:
    return make_wrapper(cls, shape, dtype=dtype, device=device)


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether somebody looks at gradients that pass through the module."""
    return any(getattr(module, name) for name in _BACKWARD_HOOKS) or any(_hooks_of_all_backwards)


_set = find("torch.nn.utils.parametrize", "_maybe_set", "see whether a parametrization writes to a weight")


def let_parametrizations_write_nothing() -> None:
    """Let a parametrization without an inverse leave its weight as it is, from now on.

    torch sets the weight to itself, which counts as a write: a unit whose forward registers one, as peft's adapters of
    experts do, would look like a unit that writes to its weights, and slots like old ones.
    """

    def set_to_another(weight: Tensor, value: Tensor) -> None:
        if weight is not value:
            _set(weight, value)

    sys.modules["torch.nn.utils.parametrize"].__dict__["_maybe_set"] = set_to_another


# --- optimizers, their schedulers and loss scalers

_hooks_of_all = tuple(
    find("torch.optim.optimizer", f"_global_optimizer_{when}_hooks", "know who looks at gradients when a step is made")
    for when in ("pre", "post")
)
_HOOKS = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)
UNSCALE = "_unscale_grads_"  # the method of a loss scaler that is replaced where gradients are on the host
find("torch.amp", f"GradScaler.{UNSCALE}", "unscale gradients on the host")
_ORTHOGONALISE = "_zeropower_via_newtonschulz"
find("torch.optim._muon", _ORTHOGONALISE, "orthogonalise updates of Muon on the device")


_fused: Mapping[bool, Any] = {
    decoupled: find("torch", name, "updates on the device")
    for decoupled, name in ((True, "_fused_adamw_"), (False, "_fused_adam_"))
}


def fused_adam_(*lists: list[Tensor], decoupled: bool, **options: Any) -> None:
    """Update float32 parameters on a device: lists of them, gradients, momenta, variances and steps."""
    _fused[decoupled](*lists[:4], [], lists[4], amsgrad=False, maximize=False, **options)


def step_hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    before, after = ({**own, **all_} for own, all_ in zip(_hooks_of(optimizer), _hooks_of_all, strict=False))
    return before, after


@contextmanager
def between_hooks(optimizer: Optimizer, first: Callable[[], None], last: Callable[[], None]) -> Iterator[None]:
    """Return a region in which a step of `optimizer` makes calls of its own after and before the hooks around it."""
    handles = optimizer.register_step_pre_hook(lambda *_: first()), optimizer.register_step_post_hook(lambda *_: last())
    _hooks_of(optimizer)[1].move_to_end(handles[1].id, last=False)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loading_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    before, after = _hooks_of(optimizer)[-2:]
    return list(before.values()), list(after.values())


def share_hooks(source: Optimizer, target: Optimizer) -> None:
    for name, hooks in zip(_HOOKS, _hooks_of(source), strict=True):
        setattr(target, name, hooks)


def _hooks_of(optimizer: Optimizer) -> list[OrderedDict[int, Callable[..., Any]]]:
    missing = [name for name in _HOOKS if not hasattr(optimizer, name)]
    if missing:
        raise UnsupportedError(f"optimizers of torch {torch.__version__} have no `{missing[0]}`. {_advice()}")
    return [getattr(optimizer, name) for name in _HOOKS]


def mark_as_called(optimizer: Optimizer) -> None:
    """Tell schedulers, which warn where it is not so, that a step of `optimizer` has been made before theirs."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def keeps_mark(step: _T) -> _T:
    """Tell schedulers that this `step`, or objects of this class in its place, call `mark_as_called` themselves."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


@contextmanager
def orthogonalising_by(function: Callable[..., Tensor]) -> Iterator[None]:
    """Let Muon call ``function(torch's function, matrix, *options)`` where it orthogonalises an update."""
    muon = sys.modules["torch.optim._muon"]
    plain = getattr(muon, _ORTHOGONALISE)
    setattr(muon, _ORTHOGONALISE, functools.partial(function, plain))
    try:
        yield
    finally:
        setattr(muon, _ORTHOGONALISE, plain)


def unscale(scaler: Any, *args: Any) -> Any:
    """Unscale the gradients of an optimizer as the class of `scaler` does it, whatever replaces it in the object."""
    return getattr(type(scaler), UNSCALE)(scaler, *args)


# --- tensors that are cut over processes


def dtensor_like(shard: Tensor, owner: DTensor) -> DTensor:
    """Return a DTensor cut like `owner`, of which this process holds `shard`, on any device and of any type."""
    spec: Any = owner._spec
    if shard.dtype is not owner.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=shard.dtype))
    return DTensor(shard, spec, requires_grad=False)  # type: ignore[no-untyped-call]


_own_part = find(
    "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset", "know which rows of a tensor are here"
)


def own_part(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, offsets = _own_part(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offsets)


# --- FSDP2 and process groups

_FSDP = "torch.distributed.fsdp._fully_shard"
_default_gather = find(f"{_FSDP}._fsdp_collectives", "DefaultAllGather", "gather into memory that is used again")
_default_reduce = find(f"{_FSDP}._fsdp_collectives", "DefaultReduceScatter", "reduce in memory that is used again")
for _name in ("_get_fsdp_state", "set_custom_all_gather", "set_custom_reduce_scatter"):
    find("torch.distributed.fsdp", f"FSDPModule.{_name}", "replace the collectives of sharded modules")
find(f"{_FSDP}._fsdp_param", "FSDPParam.to_sharded_dtensor", "put shards where the policy places them")
find(f"{_FSDP}._fsdp_param", "FSDPParam._init_extensions", "gather from shards on the host")
_set_timeout = find(
    "torch.distributed.distributed_c10d", "_set_pg_timeout", "give every process group the timeout of the first"
)
GLOO_THREAD = "pt_gloo_runloop"
"""The name that torch gives each thread of a process group in which gloo's collectives run."""


def sharded_parameters(model: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 knows of each parameter that it manages in a model, one for tied ones; see `put_shard`."""
    for group in gather_groups(model):
        yield from group.fsdp_params


def gather_groups(model: nn.Module) -> Iterator[Any]:
    """Yield what FSDP2 gathers as one: `fsdp_params` are what `sharded_parameters` yields."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from _groups(module)


def num_awaited_backwards(group: Any) -> int:
    """Return how many forwards of what is gathered as one no backward has followed yet, those without one included."""
    return len(group._post_forward_indices)


def forget_forwards(group: Any) -> None:
    """Count forwards of what is gathered as one from here on; for the earlier ones FSDP2 prefetches nothing."""
    group._post_forward_indices.clear()


def _groups(module: Any) -> list[Any]:
    """Return what a module gathers by itself: one group where all of it is cut alike."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    return list(groups)


def has_all_reduce_hook(module: Any) -> bool:
    return any(group._all_reduce_hook is not None for group in _groups(module))


def put_shard(managed: Any, shard: Tensor, memory: Tensor) -> None:
    """Put `shard` in the place of the local part of a parameter, while nothing of the model is gathered.

    FSDP2 takes a parameter with the storage that it knows (`memory`, of the same storage as `shard`) for unchanged, and
    does not pad it, which would move it to other memory.
    """
    parameter = managed.sharded_param
    if parameter.device != shard.device:  # the parameter itself says which device it is on
        there = nn.Parameter(managed.to_sharded_dtensor(shard), requires_grad=parameter.requires_grad)
        there.__dict__.update(parameter.__dict__)
        torch.utils.swap_tensors(parameter, there)  # type: ignore[no-untyped-call]
    else:
        parameter._local_tensor = shard
    managed._sharded_param_data = memory.view(-1)
    managed._init_extensions()  # a model that has run a forward does so no more


def padded_size(fsdp_param: Any) -> torch.Size:
    return fsdp_param.padded_sharded_param_size


def move_shard(shard: Any, flat: Tensor) -> None:
    """Let a sharded parameter lie in other memory: the parameter stays the object that it is."""
    local = shard.sharded_param._local_tensor
    padded = flat.view(shard.padded_sharded_param_size)
    with torch.no_grad():
        shard.sharded_param._local_tensor = padded.as_strided(local.size(), local.stride())
    shard._sharded_param_data = flat


def collectives_of(module: Any) -> tuple[Any, Any]:
    """Return what gathers and what reduces for a module; None each where it has no parameters of its own."""
    groups = _groups(module)
    return (groups[0]._all_gather_comm, groups[0]._reduce_scatter_comm) if groups else (None, None)


def has_default_collectives(module: Any) -> bool:
    """Return whether a module gathers something, and nobody has replaced what gathers and what reduces."""
    gather, reduce = collectives_of(module)
    return type(gather) is _default_gather and type(reduce) is _default_reduce


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


# --- the compiler

set_compiler: Callable[[Any], Any] = find("torch._C._dynamo.eval_frame", "set_eval_frame", "set the compiler aside")
"""Make this thread's frames go to a compiler (None for none), and return the one before."""


def skip_compiling(function: Any, reason: str) -> None:
    """Keep the compiler from tracing `function`, but not what it calls. Idempotent; imports the compiler."""
    find("torch._dynamo.decorators", "skip", "leave a graph where a unit begins")(function)
    function._torchdynamo_disable_msg = reason


def records_addresses(module: nn.Module) -> bool:
    """Whether ``torch.compile`` runs a module, or what it wraps, as CUDA graphs."""
    asked = (getattr(each, "get_compiler_config", None) for each in (module._compiled_call_impl, module.forward))
    return any((config() or {}).get("triton.cudagraphs") for config in asked if config is not None)


def compiled_module(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of ``torch.compile``; any other module as it is."""
    return getattr(module, "_orig_mod", module) if type(module).__name__ == "OptimizedModule" else module
