"""Which modules of a model are units: the blocks whose activations are offloaded and recomputed together."""

import difflib
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.host_memory import is_dense
from lightning_cxl.shards import local
from lightning_cxl.streaming.quantised import is_quantised_later, tensors_of
from lightning_cxl.torch_private import compiled_module, set_compiler, skip_compiling, storage_key

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

NamedUnits = list[tuple[str, nn.Module]]


def find_units(model: nn.Module, units: str | Sequence[str] = "auto") -> NamedUnits:
    """Return the units of `model` as ``(name, module)``, in the order of ``model.named_modules()``.

    Args:
        units: ``"auto"``: the blocks that a Hugging Face model declares in `_no_split_modules`, else the members of
            the largest `ModuleList` or `Sequential` of at least two composite blocks of one class (largest by number
            of parameters), else none. Otherwise one or more module-name globs (``"model.layers.*"``) or class names.

    Where one unit would contain another, the outer one is the unit. A block that ``torch.compile`` has wrapped is found
    as what it wraps, by class and by name; the wrapper is the unit.
    """
    if units == "auto":
        return _outermost(_blocks_of(model))
    patterns = [units] if isinstance(units, str) else list(units)
    found: set[str] = set()
    for pattern in patterns:
        matches = {
            name
            for name, module in model.named_modules()
            if _class_name(module) == pattern
            or any(name and fnmatch.fnmatchcase(each, pattern) for each in (name, name.replace("_orig_mod.", "")))
        }
        if not matches:
            names = [name for name, _ in model.named_modules() if name]
            classes = sorted({_class_name(module) for module in model.modules()})
            close = difflib.get_close_matches(pattern, names + classes, n=3, cutoff=0.4)
            hint = f" Did you mean {' or '.join(f'`{name}`' for name in close)}?" if close else ""
            automatic = [name for name, _ in find_units(model)]
            would_be = f"`{automatic[0]}` to `{automatic[-1]}`" if automatic else "nothing"
            raise ConfigError(
                f"units: `{pattern}` matches no module name and no class of {type(model).__name__}.{hint} "
                f"Classes: {', '.join(classes)}. With units='auto' it would be {would_be}."
            )
        found |= matches
    return _outermost([(name, module) for name, module in model.named_modules() if name in found])


def _class_name(module: nn.Module) -> str:
    return type(compiled_module(module)).__name__


def _blocks_of(model: nn.Module) -> NamedUnits:
    """Return the blocks that submodules list in `_no_split_modules`, else the members of the largest stack."""
    containers = [
        (name, module, list(module.named_children()))
        for name, module in model.named_modules()
        if isinstance(module, _CONTAINERS)
    ]
    classes: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        classes.update(declared if isinstance(declared, (list, tuple, set, frozenset)) else ())
    blocks = [(name, module) for name, module in model.named_modules() if _class_name(module) in classes]
    if blocks:
        # models also list what must stay on one device but is not repeated, such as embeddings: those are no units
        members = {id(child) for _, _, children in containers for _, child in children}
        return [(name, module) for name, module in blocks if id(module) in members] or blocks
    best_size = (0, 0)
    for name, container, children in containers:
        alike = [compiled_module(child) for _, child in children]
        if isinstance(container, nn.ModuleDict) or len(alike) < 2 or len({type(block) for block in alike}) > 1:
            continue
        size = (sum(p.numel() for p in container.parameters()), len(alike))
        if size > best_size and next(alike[0].children(), None) is not None:
            prefix = f"{name}." if name else ""
            blocks, best_size = [(prefix + child_name, child) for child_name, child in children], size
    return blocks


def _outermost(units: NamedUnits) -> NamedUnits:
    inner = {id(module) for _, unit in units for module in unit.modules() if module is not unit}
    return [(name, module) for name, module in units if id(module) not in inner]


def streamable(model: nn.Module, units: NamedUnits) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yield every unit with the parameters that can stream: its alone, dense, in plain memory of this host.

    Others (tied to a module outside of the unit, not quantised yet, data of a tensor subclass, views of shared
    storage) stay where they are. On the meta device, for planning, memory counts as this host's. Of a parameter that is
    cut over processes its shard counts.
    """
    units_of: dict[int, set[str]] = {id(module): {""} for module in _outside(model, {id(unit) for _, unit in units})}
    for name, unit in units:
        for module in unit.modules():
            units_of.setdefault(id(module), set()).add(name)
    owners: dict[int, set[str]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).update(units_of[id(module)])
    num_tensors: Counter[int] = Counter()  # in each storage
    distinct = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    for tensor in map(local, distinct.values()):
        if tensor.layout is torch.strided and tensor.numel():
            num_tensors[_storage_of(tensor)] += 1
    for name, unit in units:
        module_of = owners_in(unit)
        own = [p for p in unit.parameters() if owners[id(p)] == {name} and not is_quantised_later(p)]
        own = [p for p in own if all(map(_is_plain, tensors_of(module_of[id(p)], p).values()))]
        chosen = [p for p in own if num_tensors[_storage_of(p)] <= 1]
        if chosen:
            yield name, unit, chosen


def _outside(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    """Yield the modules that are reached without a unit; one that is also in a unit among them."""
    if id(module) not in units:
        yield module
        for child in module._modules.values():
            yield from () if child is None else _outside(child, units)


def owners_in(unit: nn.Module) -> dict[int, nn.Module]:
    return {id(p): module for module in unit.modules() for p in module.parameters(recurse=False)}


def _is_plain(tensor: torch.Tensor) -> bool:
    shard = local(tensor.data)
    plain = type(shard) is torch.Tensor and shard.device.type in ("cpu", "meta")
    return plain and shard.numel() > 0 and shard.layout is torch.strided and is_dense(shard)


def _storage_of(tensor: torch.Tensor) -> int:
    """Return what tells storages apart: where their bytes are, for those without bytes torch's own object."""
    storage = local(tensor).untyped_storage()
    return storage_key(storage) if tensor.is_meta else storage.data_ptr()


# `StandIn`: takes the place of a module's forward, outside of whatever the user compiles.
#
# [Note: Compiled units]
# A stand-in decides, copies and counts: none of that belongs into a graph of ``torch.compile``. There are three ways to
# compile a unit, and in all of them its own forward is what is compiled, and what we do is not:
#
# * The unit is wrapped (``torch.compile(block)`` in a `ModuleList`): the stand-in is on the wrapper, outside.
# * The stand-in is inside what is compiled (``block.compile()``, ``torch.compile(model)``, a block that was wrapped
#   after it was attached): the compiler leaves its graph at the stand-in. It would go on with every function that we
#   call, so it is switched off while we run, and is back while the unit's own forward runs.
# * The recompute, in backward, where no compiler is active, runs under the compiler of the call that it repeats: a
#   compiled forward that a plain one repeats would have saved other tensors, with other rounding.
#
# ``torch.compiler.disable`` switches the compiler off but cannot bring it back, so two private functions of torch are
# used.

Compiler = Any
"""Called by torch with a frame to compile; None for none."""
_REASON = (
    "lightning_cxl moves a unit's weights and inputs here, so a unit cannot be part of a bigger graph. Where "
    "fullgraph=True is wanted, let `torch.compile(block, fullgraph=True)` take the place of each block in the model "
    "before the run"
)


class StandIn:
    """Takes the place of the forward of one module. A copy of the model (deepcopy, pickle) gets the plain forward."""

    stays_outside = False
    """Whether later stand-ins of the module come under this one."""

    def __init__(self, module: nn.Module) -> None:
        skip_compiling(StandIn.__call__, _REASON)
        self.module = module
        self._had_own = module.__dict__.get("forward")
        self._is_removed = False
        self._outer: StandIn | None = None
        if isinstance(self._had_own, StandIn) and self._had_own.stays_outside:
            self._outer = self._had_own
            self.original: Callable[..., Any] = self._outer.original
            self._had_own, self._outer.original, self._outer._had_own = self._outer._had_own, self, self
        else:
            self.original = module.forward
            module.__dict__["forward"] = self
        functools.update_wrapper(self, self.original, updated=())  # name, docstring, signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run` with the active compiler switched off. See [Note: Compiled units]."""
        compiler = set_compiler(None)
        try:
            if self._is_removed:
                return call_under(compiler, self.original, args, kwargs)
            return self.run(compiler, args, kwargs)
        finally:
            set_compiler(compiler)

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what is to be done instead of ``original(*args, **kwargs)``, which is to run under `compiler`."""
        raise NotImplementedError

    def remove(self) -> None:
        """Undo the wrapping; where someone has wrapped this object meanwhile, stay in place and pass calls through."""
        self._is_removed = True
        if self._outer is not None and self._outer.original is self:
            self._outer.original, self._outer._had_own = self.original, self._had_own
        if self.module.__dict__.get("forward") is not self:
            return
        if self._had_own is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self._had_own

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _same_object, (self.original,)


def call_under(compiler: Compiler, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = set_compiler(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_compiler(before)


def _same_object(value: Any) -> Any:
    return value
