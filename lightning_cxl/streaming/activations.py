"""Offloaded activation checkpointing: a unit keeps only its inputs, on a host tier, and is recomputed in backward.

[Note: Offloaded checkpointing]
`torch.utils.checkpoint` does what it is good at: RNG state, autocast, the determinism check, early stop, several
backwards, nesting. It would keep a unit's inputs on the device, so it is given none of them: its function is a
`_UnitCall`, which runs the unit's forward on the caller's own arguments when it is called first, and at every later
call (a recompute, inside backward) rebuilds the arguments from the saved inputs, see
[Note: Containers among the arguments]. The recompute yields values only; the gradient flows through the graph that the
first call made. checkpoint() gets one empty tensor on the device as argument, so that it knows whose RNG state to keep.

Who holds what: graph -> saved-tensor hooks -> checkpoint frame -> `_UnitCall` -> saved inputs and module state. A graph
that is dropped, used up by a backward, or never finished because of an exception frees all of it by reference count.

Ahead by one: a call knows the call before it (weakly). When its own inputs have been asked for it starts the copies of
that one's inputs, which then run while this unit is recomputed and differentiated.
"""

import collections
import copy
import dataclasses
import itertools
import logging
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.streaming.module_state import ModuleState
from lightning_cxl.streaming.saved_inputs import (
    Allocate,
    HeldInput,
    PlaceOnSsd,
    SavedBytes,
    StoredInput,
    UnitInput,
    all_in_memory,
    can_store,
)
from lightning_cxl.streaming.stand_in import Compiler, StandIn, call_under
from lightning_cxl.streaming.unit_weights import peek
from lightning_cxl.torch_private import (
    PYTREE_NODES,
    caches_weights,
    compiled_module,
    in_exec_group,
    is_in_backward,
    is_in_transform,
    let_parametrizations_write_nothing,
)
from lightning_cxl.transfer.engine import TransferEngine

# ----------------------------------------------------------------------------------------------------
# Models that checkpoint their blocks themselves: switched off while units are recomputed anyway.
#
# [Note: A model's own checkpointing]
# Two checkpoints around one block give the same losses, but a reentrant one runs its forward three times (one that is
# not, twice, and keeps its inputs twice). Hugging Face models show that they checkpoint by a flag, which is set on
# blocks and on what contains them: it is False while the model is attached, and True again afterwards. A
# ``torch.utils.checkpoint`` in the user's own forward shows itself only when a unit's first forward runs within a
# backward. It may span more than a unit, so it is left to the user, who is told once. Where it is not reentrant and
# spans units alone, it has saved nothing that needs a recompute of its own.

log = logging.getLogger("lightning_cxl")
_FLAG = "gradient_checkpointing"


class OwnCheckpointing:
    """Switches off what a model does itself, and says so once. See [Note: A model's own checkpointing]."""

    def __init__(self) -> None:
        self._switched: list[nn.Module] = []
        self._has_told = False

    def switch_off(self, modules: Iterable[nn.Module]) -> None:
        on = [module for module in modules if getattr(module, _FLAG, False) is True]
        if on and not self._switched:
            log.info(
                "the model's own gradient checkpointing is switched off during the run: units are recomputed from "
                "inputs on the host instead"
            )
        for module in on:
            setattr(module, _FLAG, False)
        self._switched += on

    def restore(self) -> None:
        while self._switched:
            setattr(self._switched.pop(), _FLAG, True)

    def look_around(self, unit: str) -> None:
        """Tell the user if the first forward of a unit runs in a backward: in a checkpoint of the user's own."""
        if not self._has_told and is_in_backward():
            self._has_told = True
            log.info(
                f"unit `{unit}` runs within a checkpoint of the model's own, which recomputes it in addition to "
                "lightning_cxl: leave torch.utils.checkpoint out. Inputs are offloaded anyway, which is faster and "
                "gives the same losses"
            )


# ----------------------------------------------------------------------------------------------------
# What a unit is called with: containers and key/value caches, kept as they were when its forward began.
#
# [Note: Containers among the arguments]
# A unit may append to a list that it is given (losses of experts, collected states) or write to a dict, and its caller
# reads them afterwards. So the forward gets the caller's own objects, and `rebuilt` makes twice another tree of them:
# as the forward begins, with what stands for each tensor, and for a recompute, with these tensors. An object that
# appears twice is one object in the copy as well. Containers are lists, dicts, sets and deques, classes derived from
# them, dataclasses, and what pytree knows. All else is given to the recompute as it is then, also a container whose
# class refuses to be copied.
#
# [Note: Key/value caches]
# Hugging Face models hand every block a cache that it appends to, by default also in training; a recompute would append
# again. In training, what a unit gets instead of a cache that is an argument of its own is:
#
# * for an empty cache None, as those models do when they checkpoint, so the cache that the model returns is empty;
# * for a cache that already holds something (prefix tuning) a copy with the same tensors, a new one for every run of
#   the unit, so the model's own cache keeps just what it held. Only for caches that grow by replacing their tensors.
#
# A cache inside a container is the caller's own in the forward, and such a copy in a recompute. Otherwise (other
# caches, evaluation with gradients on) the unit runs as it is, without a recompute.

_PLAIN = frozenset((int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque)
_MAX_DEPTH = 100  # far below what Python allows to call, as the model's own calls come on top
_CACHES = ("DynamicCache",)
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


def rebuilt(value: Any, stand_in: Callable[[Any], Any]) -> Any:
    """Return `value` with a copy in place of each container, and ``stand_in(leaf)`` in place of all else.

    Numbers, strings and the like stay as they are, and so do containers that refuse to be copied or lie too deep.
    """
    return _rebuilt(value, stand_in, {}, 0)


def _rebuilt(value: Any, stand_in: Callable[[Any], Any], done: dict[int, tuple[Any, Any]], depth: int) -> Any:
    if type(value) in _PLAIN:
        return value
    if id(value) in done:  # original and copy by id of the original, which must live as long
        return done[id(value)][1]

    def again(each: Any) -> Any:
        return each if type(each) in _PLAIN else _rebuilt(each, stand_in, done, depth + 1)

    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        twin = stand_in(value)
    elif is_cache(value):
        twin = _copied(stand_in(value))
    elif depth > _MAX_DEPTH:
        twin = stand_in(value)
    elif isinstance(value, tuple):
        parts = [again(each) for each in value]
        is_same = all(one is other for one, other in zip(parts, value, strict=True))
        twin = value if is_same else _tuple_of(parts, value)
    elif isinstance(value, _CONTAINERS) or dataclasses.is_dataclass(type(value)):
        twin = _shallow(value)
        done[id(value)] = value, twin  # before what is in it, which may contain it
        if twin is value:
            twin = stand_in(value)
        else:
            _fill(twin, value, again)
    elif isinstance(value, _Apart):
        twin = value.unflatten([again(each) for each in value.children], value.context)
    elif (node := PYTREE_NODES.get(type(value))) is not None:
        children, context = node.flatten_fn(value)
        twin = _Apart([again(each) for each in children], context, node.unflatten_fn)
    else:
        twin = stand_in(value)
    done[id(value)] = value, twin
    return twin


def _shallow(value: Any) -> Any:
    """Return a copy of a container; itself where its class refuses that, or gives something else."""
    try:
        twin = copy.copy(value)
    except Exception:
        return value
    return twin if type(twin) is type(value) else value


def _fill(twin: Any, value: Any, again: Callable[[Any], Any]) -> None:
    """Put copies of what is in `value` into `twin`, past what its class has made of the methods of the base."""
    base: Any = next((each for each in _CONTAINERS if isinstance(value, each)), None)
    if base is not None:
        base.clear(twin)
        if issubclass(base, dict):
            for key, each in base.items(value):
                base.__setitem__(twin, key, again(each))
        else:
            (base.update if base is set else base.extend)(twin, [again(each) for each in base.__iter__(value)])
    for name, each in getattr(value, "__dict__", {}).items():
        twin.__dict__[name] = again(each)
    if dataclasses.is_dataclass(type(value)):
        for name in [field.name for field in dataclasses.fields(value)]:
            slot = getattr(type(value), name, None)
            if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name):
                slot.__set__(twin, again(getattr(value, name)))  # it may be frozen


def _tuple_of(parts: list[Any], value: Any) -> Any:
    if hasattr(type(value), "n_sequence_fields"):  # what torch.max and others return
        return type(value)(parts)
    twin = tuple.__new__(type(value), parts)
    if hasattr(value, "__dict__"):
        twin.__dict__.update(value.__dict__)
    return twin


class _Apart:
    """What pytree knows, taken apart: it may refuse to hold what stands for a tensor."""

    def __init__(self, children: list[Any], context: Any, unflatten: Callable[[Any, Any], Any]) -> None:
        self.children, self.context, self.unflatten = children, context, unflatten


def leaves_of(value: Any) -> list[Any]:
    """Return what is neither a container nor plain (a number, a string, ...) in `value`, each object once."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    rebuilt(value, note)
    return found


def is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def can_replace(cache: Any) -> bool:
    """Return whether what `replaced` gives for `cache` can be had any number of times."""
    return cache.get_seq_length() == 0 or grows_by_replacing(cache)


def cached_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a cache of a known kind: a gradient may flow into them alone."""
    if not is_cache(value) or not grows_by_replacing(value):
        return []
    found = [getattr(layer, name, None) for layer in value.layers for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def replaced(value: Any) -> Any:
    """Return what the forward is given for an argument: for an empty cache None, for another a copy."""
    if not is_cache(value):
        return value
    return None if value.get_seq_length() == 0 else _copied(value)


def grows_by_replacing(cache: Any) -> bool:
    """Return whether a copy of a cache goes on as the cache would, without a change to it."""
    return type(cache).__name__ in _CACHES and all(type(layer).__name__ in _LAYERS for layer in cache.layers)


def _copied(cache: Any) -> Any:
    if not grows_by_replacing(cache):
        return cache
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


Phase = Literal["forward", "recompute", "recompute in a graph"]
DEFAULT_MIN_BYTES = 1 << 16
"""Smaller inputs are not worth a transfer and stay where they are."""


class ActivationOffload:
    """Recomputes units in backward from inputs that wait on a host tier. See [Note: Offloaded checkpointing].

    Args:
        engine: copies between the device and the tier; its device is where the units run.
        allocate: gives host memory for ``(nbytes, unit_name)``; the bytes are free again when the last tensor over
            them has died. Its errors reach the caller of the unit.
        place_on_ssd: gives a place on SSD for the same; None for what lies in memory.
    """

    def __init__(
        self,
        engine: TransferEngine,
        allocate: Allocate,
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        place_on_ssd: PlaceOnSsd = all_in_memory,
    ) -> None:
        self.engine = engine
        self.placeholder = torch.empty(0, device=engine.device)
        self._allocate = allocate
        self._place_on_ssd = place_on_ssd
        self._min_bytes = min_bytes
        self._saved = SavedBytes()
        self._stored: weakref.WeakValueDictionary[int, StoredInput] = weakref.WeakValueDictionary()  # by id of source
        self.phase: Phase | None = None
        """Why a unit's own forward runs now: for the first time, to be repeated; again, in a backward, and in one that
        is to be differentiated itself (``create_graph=True``); or neither."""
        self._latest: Callable[[], _UnitCall | None] = _no_call
        self._attached: list[UnitForward] = []
        self.own_checkpointing = OwnCheckpointing()

    def attach(self, units: Iterable[tuple[str, nn.Module]], model: nn.Module | None = None) -> None:
        """Wrap the forward of each unit.

        Args:
            model: what they are part of, to switch off its checkpointing of them.
        """
        new = list(units)
        seen: set[int] = set()
        for name, module in new:
            if isinstance(module.__dict__.get("forward"), UnitForward) or id(module) in seen:
                raise ConfigError(f"unit `{name}` ({type(module).__name__}) is attached already: detach it first")
            seen.add(id(module))
        let_parametrizations_write_nothing()
        for name, module in new:
            self._attached.append(UnitForward(self, name, module))
        self.own_checkpointing.switch_off(_around_and_inside([module for _, module in new], model))

    def detach(self) -> None:
        """Give every unit its own forward back. Graphs that exist can still run backward. Idempotent."""
        while self._attached:
            self._attached.pop().remove()
        self.own_checkpointing.restore()

    def stats(self) -> dict[str, int]:
        """Return ``saved_bytes`` and ``num_saved`` (inputs on the tier now) and ``peak_saved_bytes``."""
        return self._saved.stats()

    def store(self, tensor: torch.Tensor, unit: str) -> StoredInput | None:
        """Return the image of `tensor` on the tier, made now or found again; None if it does not belong there."""
        if not can_store(tensor, self.engine.device, self._min_bytes):
            return None
        stored = self._stored.get(id(tensor))
        if stored is None or not stored.is_image_of(tensor) or not self._has_bits_of(stored, tensor):
            stored = StoredInput(tensor, self.engine, self._allocate, unit, self._saved, self._place_on_ssd)
            self._stored[id(tensor)] = stored
        return stored

    def _has_bits_of(self, stored: StoredInput, tensor: torch.Tensor) -> bool:
        """Compare where that is cheap: a write between two units may have had no version."""
        return not self.engine.computes_on_host or stored.has_bits_of(tensor)

    @contextmanager
    def running(self, phase: Phase) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def follow(self, call: "_UnitCall") -> "Callable[[], _UnitCall | None]":
        """Note that `call` is the latest; return a weak reference to the one before it."""
        before, self._latest = self._latest, weakref.ref(call)
        return before


class UnitForward(StandIn):
    def __init__(self, offload: ActivationOffload, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.offload = offload
        self.name = name
        self.changed_inputs: set[int] = set()  # positions among the tensors of a call; see UnitInput
        self.is_observed = False

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or is_in_transform() or caches_weights(self.module):
            return call_under(compiler, self.original, args, kwargs)
        leaves = leaves_of((args, kwargs))
        if not self._carries_gradient(leaves) or not self._can_repeat_caches(leaves, (*args, *kwargs.values())):
            return call_under(compiler, self.original, args, kwargs)
        self.offload.own_checkpointing.switch_off([compiled_module(self.module)])  # it may be on since the last call
        self.offload.own_checkpointing.look_around(self.name)
        args, kwargs = tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}
        call = _UnitCall(self, compiler, args, kwargs, leaves)
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, call.begin_recompute):  # of the placeholder alone
            output = checkpoint(call, self.offload.placeholder, use_reentrant=False)
        if call.errors:
            raise call.errors.pop()
        return output

    def _carries_gradient(self, leaves: list[Any]) -> bool:
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        cached = [tensor for leaf in leaves for tensor in cached_tensors(leaf)]
        return any(tensor.requires_grad for tensor in (*inputs, *cached, *peek(self.module)))

    def _can_repeat_caches(self, leaves: list[Any], arguments: tuple[Any, ...]) -> bool:
        """See [Note: Key/value caches]."""
        own = {id(each) for each in arguments}
        caches = [leaf for leaf in leaves if is_cache(leaf)]
        can_repeat = all((can_replace if id(each) in own else grows_by_replacing)(each) for each in caches)
        return not caches or (self.module.training and can_repeat)

    def keep(self, tensor: torch.Tensor, position: int) -> UnitInput:
        """Keep a tensor that a call is given; `position` counts the different tensors of the call."""
        cautious = not self.is_observed or position in self.changed_inputs
        stored = self.offload.store(tensor, self.name)
        return UnitInput(tensor, stored or HeldInput(tensor, self.name), self.name, cautious=cautious)


class _UnitCall:
    """One call of a unit's forward, and what its recomputes need. Called by checkpoint()."""

    def __init__(
        self,
        unit: UnitForward,
        compiler: Compiler,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> None:
        self._unit = unit
        self._compiler = compiler  # See [Note: Compiled units]
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = args, kwargs  # gone when the forward starts
        self._inputs: list[UnitInput] = []
        self._kept: tuple[tuple[Any, ...], dict[str, Any]] = rebuilt((args, kwargs), self._keep)
        self._state = ModuleState(unit.module, leaves)
        self.errors: list[BaseException] = []  # that the forward has raised
        self._phase: Phase = "recompute"  # of the next one
        self._before = unit.offload.follow(self)
        before = self._before()
        if before is not None:
            before.let_go()

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self._inputs.append(self._unit.keep(leaf, len(self._inputs)))
        return self._inputs[-1]

    def __call__(self, _placeholder: torch.Tensor) -> Any:
        if self._arguments is None:
            return self._recompute()
        try:
            return self._run_forward()
        except BaseException as error:  # torch 2.11 stays inside of a checkpoint whose function raises
            self.errors.append(error)
            return None

    def _run_forward(self) -> Any:
        assert self._arguments is not None
        (args, kwargs), self._arguments = self._arguments, None
        with self._unit.offload.running("forward"):
            output = call_under(self._compiler, self._unit.original, args, kwargs)
        self._settle()
        return output

    def _settle(self) -> None:
        """The forward has returned: learn what it changed and let go of what a recompute does not need."""
        self._state.settle()
        changed = [position for position, each in enumerate(self._inputs) if each.observe()]
        self._unit.changed_inputs.update(changed)
        self._unit.is_observed = True
        for one, other in itertools.combinations([self._inputs[position] for position in changed], 2):
            if one.shares_memory_with(other):
                raise UnsupportedError(
                    f"unit `{self._unit.name}` changed an input in place that shares memory with another input: a "
                    "recompute cannot repeat that. Let it work on a clone, or leave it out of `units`."
                )
        for each in self._inputs:
            each.release(self._unit.offload.engine)

    def begin_recompute(self, placeholder: torch.Tensor) -> torch.Tensor:
        """Give checkpoint() its argument back. A recompute itself always runs with gradients; this is just before."""
        in_graph = torch.is_grad_enabled() or in_exec_group()
        self._phase = "recompute in a graph" if in_graph else "recompute"
        return placeholder

    def _recompute(self) -> Any:
        engine = self._unit.offload.engine
        tensors = {id(each): each.load(engine) for each in self._inputs}
        before = self._before()
        if before is not None:
            before.prefetch()
        args, kwargs = rebuilt(self._kept, lambda leaf: tensors.get(id(leaf), leaf))
        with self._state.replay(), self._unit.offload.running(self._phase):
            return call_under(self._compiler, self._unit.original, args, kwargs)

    def let_go(self) -> None:
        """Drop the device copies of the inputs: another unit runs."""
        for each in self._inputs:
            each.let_go()

    def prefetch(self) -> None:
        for each in self._inputs:
            each.prefetch(self._unit.offload.engine)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _no_call() -> None:
    """Stand for a dead reference: there is no latest call."""


def _around_and_inside(units: list[nn.Module], model: nn.Module | None) -> list[nn.Module]:
    """Return what the units consist of and what contains them."""
    parts = {id(part): part for unit in units for part in unit.modules()}
    for module in () if model is None else model.modules():
        if id(module) not in parts and any(id(child) in parts for child in module.modules()):
            parts[id(module)] = module
    return list(parts.values())
