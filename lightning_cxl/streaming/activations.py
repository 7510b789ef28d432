"""Offloaded activation checkpointing: a unit keeps only its inputs, on a host tier, and is recomputed in backward.

[Note: Offloaded checkpointing]
`torch.utils.checkpoint` does what it is good at: RNG state, autocast, the determinism check, early stop, several
backwards, nesting. It would keep a unit's inputs on the device, so it is given none of them: its function is a
`_UnitCall`, which runs the unit's forward on the caller's own arguments when it is called first, and at every later
call (a recompute, inside backward) rebuilds the arguments from the saved inputs, see
[Note: Containers among the arguments]. The recompute yields values only; the gradient flows through the graph that the
first call made. checkpoint() gets one empty tensor on the device as argument, so that it knows whose RNG state to keep.

Ownership: graph -> saved-tensor hooks -> checkpoint frame -> `_UnitCall` -> saved inputs and module state. A graph
that is dropped, used up by a backward, or never finished because of an exception frees all of it by reference count.

Ahead by one: a call knows the call before it (weakly). When its own inputs have been asked for it starts the copies of
that one's inputs, which then run while this unit is recomputed and differentiated.
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cxl.devices import Transfer, TransferEngine
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.memory.host_memory import storage_extent
from lightning_cxl.streaming.on_ssd import InputOnSsd
from lightning_cxl.streaming.replay import (
    Containers,
    ModuleState,
    UnitModules,
    cached_tensors,
    copied,
    grows_by_replacing,
    is_cache,
    is_container,
    replaced,
    stale_error,
    version_of,
)
from lightning_cxl.streaming.unit_weights import peek
from lightning_cxl.streaming.units import Compiler, StandIn, call_under
from lightning_cxl.torch_private import (
    caches_weights,
    compiled_module,
    in_exec_group,
    is_in_transform,
    let_parametrizations_write_nothing,
    storage_key,
)

# The tensors that a unit's forward was given, kept until its recompute: on a host tier, or by reference.
#
# [Note: Life of a saved input]
# * Stored (carries gradient, is big enough): copied to the tier while the unit's forward runs; the device waits for the
#   copy at the unit's end, so code after the unit may overwrite or drop the tensor. A unit that overwrites its own
#   input must not start before the copy is done; which inputs those are is learned from the unit's first call, where
#   every copy is waited for, and a later surprise is an error (`UnitInput`). The bytes live as long as a graph needs
#   them: a unit's call holds `StoredInput`, autograd's saved tensors hold the call.
# * The newest call keeps a stored tensor itself as well, until the next call begins: the last unit's is on the device
#   when backward begins, unless it has been changed since.
# * One tensor given to several units is stored once: found again by identity (a weak reference) and version. An exact
#   image is kept: same strides, same address modulo 64, so that a recompute runs the same kernels.
# * On SSD where it belongs there: the copy lands in a host slot and is written. See [Note: Inputs on SSD].
# * Held (masks, position embeddings, ids, small or sparse tensors): a detached alias, and its version is checked.
#   Holding the tensor itself could close a cycle through the graph that no garbage collector sees.


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits: NaN is equal to itself, 0 is not -0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


_ALIGNMENT = 64  # bytes; what torch's own allocations and ours start at


Allocate = Callable[[int, str], Any]
"""Takes a number of bytes and the unit's name; returns a buffer, whose bytes are free when its last tensor has died."""
PlaceOnSsd = Callable[[int, str], InputOnSsd | None]
"""Takes the same; returns None where the image belongs in memory."""


class StoredInput:
    """An exact image of one tensor on a host tier, or on SSD. See [Note: Life of a saved input]."""

    def __init__(
        self,
        tensor: torch.Tensor,
        engine: TransferEngine,
        allocate: Allocate,
        unit: str,
        place_on_ssd: PlaceOnSsd | None = None,
    ) -> None:
        self._size, self._stride = tensor.shape, tensor.stride()
        self._lead = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
        extent = storage_extent(tensor)
        nbytes = (self._lead + extent) * tensor.element_size()
        self._numel, self._dtype = self._lead + extent, tensor.dtype
        flat = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        self._on_ssd = None if place_on_ssd is None else place_on_ssd(nbytes, unit)
        if self._on_ssd is not None:
            self.transfer = self._on_ssd.store(flat, self._lead)
        else:
            self._host: torch.Tensor = allocate(nbytes, unit).tensor((self._numel,), tensor.dtype)
            # no leaf (`can_store`): an operator has computed it on the current stream
            self.transfer = engine.d2h(flat, self._host[self._lead :], from_here=True)
        self.source = weakref.ref(tensor)
        self.version = version_of(tensor)
        self._address = tensor.data_ptr()

    def is_image_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this holds the values that `tensor` has now, as far as torch counts writes."""
        is_known = self.source() is tensor and self.version == version_of(tensor)
        return is_known and self._address == tensor.data_ptr()  # another one where `.data` has been replaced

    def must_move(self, engine: TransferEngine) -> bool:
        """Return whether a recompute needs a copy of the image."""
        return self._on_ssd is not None or not engine.computes_on_host

    def fetch(self, engine: TransferEngine) -> tuple[torch.Tensor, Transfer]:
        """Start bringing the image to the device; once the transfer is waited for, `shape_like_source` it."""
        destination = torch.empty(self._numel, dtype=self._dtype, device=engine.device)
        if self._on_ssd is not None:
            return destination, self._on_ssd.fetch(destination)
        return destination, engine.h2d(self._host, destination, after=(self.transfer, engine.mark()))

    def on_host(self) -> torch.Tensor:
        """Return the image, not to be written to, or a copy of one on SSD; for a device that computes on the host."""
        if self._on_ssd is not None:
            image = torch.empty(self._numel, dtype=self._dtype)
            self._on_ssd.fetch(image).wait_host()
            return image
        self.transfer.wait_host()
        return self._host

    def shape_like_source(self, image: torch.Tensor) -> torch.Tensor:
        """Return the tensor that `image`, or a copy of it, is the image of: without gradient, same strides."""
        return image.as_strided(self._size, self._stride, image.storage_offset() + self._lead)


class UnitInput:
    """One tensor among a call's arguments: watched during the forward, given to recomputes.

    See [Note: Life of a saved input]. `cautious`: the unit is known to change it in place, or not known yet.
    """

    def __init__(self, tensor: torch.Tensor, stored: StoredInput | None, unit: str, *, cautious: bool) -> None:
        self._stored = stored
        self._unit = unit
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor)
        self.alias: Any = tensor.detach()  # shares the version counter; gone with `release`
        self._held: torch.Tensor | None = None  # what is not stored, from the end of the forward on
        self._spare: torch.Tensor | None = None
        self._on_the_way: tuple[torch.Tensor, Transfer] | None = None
        self.near: torch.Tensor | None = None  # the tensor itself, while no other unit has run
        self._is_changed = True  # for all we know, until the forward has returned
        self._is_safe = cautious
        if stored is not None:
            if cautious:
                stored.transfer.wait()
            self._is_safe = cautious or stored.transfer.done()
        elif cautious:
            with torch.no_grad():
                self._spare = self.alias.clone()

    def observe(self) -> bool:
        """Return whether the forward, which has just returned, changed the tensor in place."""
        self._is_changed = version_of(self.alias) != self._version
        return self._is_changed

    def release(self, engine: TransferEngine) -> None:
        """Keep what a recompute needs and drop the rest."""
        if self._is_changed and not self._is_safe:
            raise UnsupportedError(
                f"unit `{self._unit}` changed an input in place (shape {tuple(self.alias.shape)}) in this call, but "
                f"not in its first, before its values were saved. Let it work on a clone, or leave the unit out of "
                "`units`."
            )
        if self._stored is not None:
            self._stored.transfer.wait()
            self.near = None if self._is_changed or engine.computes_on_host else self.alias
        elif self._is_changed and self._spare is not None:
            self._held, self._version = self._spare, version_of(self._spare)
        else:
            self._held = self.alias
        self.alias = self._spare = None

    def prefetch(self, engine: TransferEngine) -> None:
        """Start bringing a stored tensor to the device, unless it need not move or is on the way."""
        if self.near is not None and version_of(self.near) == self._version:
            return
        if self._stored is not None and self._stored.must_move(engine) and self._on_the_way is None:
            self._on_the_way = self._stored.fetch(engine)

    def load(self, engine: TransferEngine) -> torch.Tensor:
        tensor = self._values(engine).detach()
        if self._requires_grad:
            tensor.requires_grad_()
        # a private copy, no leaf: a leaf that requires gradient must not be changed in place, nor must the saved bytes
        return tensor.clone() if self._is_changed else tensor

    def _values(self, engine: TransferEngine) -> torch.Tensor:
        if self._stored is None:
            assert self._held is not None
            if (version := version_of(self._held)) != self._version:
                what = f"an input of unit `{self._unit}`, shape {tuple(self._held.shape)} and {self._held.dtype},"
                raise stale_error(what, version, self._version)
            return self._held
        if not self._stored.must_move(engine):
            return self._stored.shape_like_source(self._stored.on_host())
        near, self.near = self.near, None
        if near is not None and version_of(near) == self._version:
            return near
        self.prefetch(engine)
        assert self._on_the_way is not None
        (image, transfer), self._on_the_way = self._on_the_way, None
        transfer.wait()
        return self._stored.shape_like_source(image)


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.layout is other.layout is torch.strided and one.numel() and other.numel()):
        return False
    return storage_key(one.untyped_storage()) == storage_key(other.untyped_storage())


def can_store(tensor: torch.Tensor, device: torch.device, min_bytes: int) -> bool:
    """Return whether an input belongs on the tier: it carries gradient and an image of it is exact and not wasteful."""
    if type(tensor) is not torch.Tensor or not tensor.requires_grad or tensor.is_leaf or not tensor.is_floating_point():
        return False
    if tensor.device != device or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    nbytes = tensor.numel() * tensor.element_size()
    return 0 < nbytes >= min_bytes and storage_extent(tensor) <= 2 * tensor.numel()


# Models that checkpoint their blocks themselves: switched off while units are recomputed anyway.
#
# [Note: A model's own checkpointing]
# Two checkpoints around one block give the same losses, but a reentrant one runs its forward three times (one that is
# not, twice, and keeps its inputs twice). Hugging Face models show that they checkpoint by a flag, which is set on
# blocks and on what contains them: it is False while the model is attached, and True again afterwards. A
# ``torch.utils.checkpoint`` in the user's own forward is left as it is: it may span more than a unit.

log = logging.getLogger("lightning_cxl")
_FLAG = "gradient_checkpointing"


Phase = Literal["forward", "recompute", "recompute in a graph"]
DEFAULT_MIN_BYTES = 1 << 16
"""Smaller inputs are not worth a transfer and stay where they are."""


class ActivationOffload:
    """Recomputes units in backward from inputs that wait on a host tier. See [Note: Offloaded checkpointing]."""

    def __init__(
        self,
        engine: TransferEngine,
        allocate: Allocate,
        *,
        min_bytes: int = DEFAULT_MIN_BYTES,
        place_on_ssd: PlaceOnSsd | None = None,
    ) -> None:
        self.engine = engine
        self.placeholder = torch.empty(0, device=engine.device)
        self._allocate = allocate
        self._place_on_ssd = place_on_ssd
        self._min_bytes = min_bytes
        self._stored: weakref.WeakValueDictionary[int, StoredInput] = weakref.WeakValueDictionary()  # by id of source
        self.phase: Phase | None = None
        """Why a unit's own forward runs now: for the first time, to be repeated; again, in a backward, and in one that
        is to be differentiated itself (``create_graph=True``); or neither."""
        self.latest: Callable[[], _UnitCall | None] = lambda: None
        """A weak reference to the call before."""
        self._attached: list[UnitForward] = []
        self._switched_off: list[nn.Module] = []  # see [Note: A model's own checkpointing]

    def attach(self, units: Iterable[tuple[str, nn.Module]], model: nn.Module | None = None) -> None:
        """Wrap the forward of each unit, and switch off the checkpointing of the model that they are part of."""
        new = list(units)
        seen: set[int] = set()
        for name, module in new:
            if isinstance(module.__dict__.get("forward"), UnitForward) or id(module) in seen:
                raise ConfigError(f"unit `{name}` ({type(module).__name__}) is attached already: detach it first")
            seen.add(id(module))
            if any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
                raise UnsupportedError(f"unit `{name}` has a module of torch.jit, which no recompute can show")
        let_parametrizations_write_nothing()
        for name, module in new:
            self._attached.append(UnitForward(self, name, module))
        parts = {id(part): part for _, unit in new for part in unit.modules()}
        around = [
            module
            for module in (() if model is None else model.modules())
            if id(module) not in parts and any(id(child) in parts for child in module.modules())
        ]
        self.switch_off_own_checkpointing([*parts.values(), *around])

    def detach(self) -> None:
        """Give every unit its own forward back. Graphs that exist can still run backward. Idempotent."""
        while self._attached:
            self._attached.pop().remove()
        while self._switched_off:
            setattr(self._switched_off.pop(), _FLAG, True)

    def switch_off_own_checkpointing(self, modules: Iterable[nn.Module]) -> None:
        on = [module for module in modules if getattr(module, _FLAG, False) is True]
        if on and not self._switched_off:
            log.info(
                "the model's own gradient checkpointing is switched off during the run: units are recomputed from "
                "inputs on the host instead"
            )
        for module in on:
            setattr(module, _FLAG, False)
        self._switched_off += on

    def store(self, tensor: torch.Tensor, unit: str) -> StoredInput | None:
        """Return the image of `tensor` on the tier, made now or found again; None if it does not belong there."""
        if not can_store(tensor, self.engine.device, self._min_bytes):
            return None
        stored = self._stored.get(id(tensor))
        if stored is not None and not stored.is_image_of(tensor):
            stored = None
        # compared where that is cheap: a write between two units may have had no version
        if stored is not None and self.engine.computes_on_host:
            stored = stored if same_bits(tensor, stored.shape_like_source(stored.on_host())) else None
        if stored is None:
            stored = StoredInput(tensor, self.engine, self._allocate, unit, self._place_on_ssd)
            self._stored[id(tensor)] = stored
        return stored

    @contextmanager
    def running(self, phase: Phase, unit: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            with self.engine.computing(f"{phase} of {unit}"):
                yield
        finally:
            self.phase = before


class UnitForward(StandIn):
    def __init__(self, offload: ActivationOffload, name: str, module: nn.Module) -> None:
        super().__init__(module)
        self.offload = offload
        self.name = name
        self.modules = UnitModules(module)
        self.changed_inputs: set[int] = set()  # positions among the tensors of a call; see UnitInput
        self.is_observed = False

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or is_in_transform() or caches_weights(self.module):
            return call_under(compiler, self.original, args, kwargs)
        containers = Containers(self.name)
        containers.take_in((args, kwargs), is_container)
        leaves = containers.leaves
        own = {id(each) for each in (*args, *kwargs.values())}
        caches = [leaf for leaf in leaves if is_cache(leaf)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tensors += [tensor for cache in caches for tensor in cached_tensors(cache)]
        carries_gradient = any(tensor.requires_grad for tensor in (*tensors, *peek(self.module)))
        can_repeat_caches = self.module.training and all(
            grows_by_replacing(cache) or (id(cache) in own and cache.get_seq_length() == 0) for cache in caches
        )
        if not carries_gradient or (caches and not can_repeat_caches):
            return call_under(compiler, self.original, args, kwargs)
        self.offload.switch_off_own_checkpointing([compiled_module(self.module)])  # it may be on since the last call
        arguments = tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}
        leaves = [replaced(leaf) if id(leaf) in own else leaf for leaf in leaves]
        call = _UnitCall(self, compiler, arguments, containers, leaves)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: tensor, call.begin_recompute
        ):  # of the placeholder alone
            output = checkpoint(call, self.offload.placeholder, use_reentrant=False)
        if call.errors:
            raise call.errors.pop()
        return output

    def keep(self, tensor: torch.Tensor, position: int) -> UnitInput:
        """Keep a tensor that a call is given; `position` counts the different tensors of the call."""
        cautious = not self.is_observed or position in self.changed_inputs
        return UnitInput(tensor, self.offload.store(tensor, self.name), self.name, cautious=cautious)


class _UnitCall:
    """One call of a unit's forward, and what its recomputes need. Called by checkpoint()."""

    def __init__(
        self, unit: UnitForward, compiler: Compiler, arguments: Any, containers: Containers, leaves: list[Any]
    ) -> None:
        self._unit = unit
        self._compiler = compiler  # See [Note: Compiled units]
        self._arguments = arguments  # gone when the forward starts
        self._inputs: list[UnitInput] = []
        self._state = ModuleState(unit.modules, containers)
        self._leaves = list(map(self._keep, leaves))
        self.errors: list[BaseException] = []  # that the forward has raised
        self._phase: Phase = "recompute"  # of the next one
        self._before, unit.offload.latest = unit.offload.latest, weakref.ref(self)
        before = self._before()
        for each in before._inputs if before is not None else ():
            each.near = None

    def _keep(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copied(leaf)
        if id(leaf) in self._state.kept:
            return self._state.kept[id(leaf)]
        self._inputs.append(self._unit.keep(leaf, len(self._inputs)))
        return self._inputs[-1]

    def __call__(self, _placeholder: torch.Tensor) -> Any:
        if self._arguments is None:
            return self._recompute()
        (args, kwargs), self._arguments = self._arguments, None
        try:
            with self._unit.offload.running("forward", self._unit.name):
                output = call_under(self._compiler, self._unit.original, args, kwargs)
            self._settle()
            return output
        except BaseException as error:  # torch 2.11 stays inside of a checkpoint whose function raises
            self.errors.append(error)
            return None

    def _settle(self) -> None:
        """The forward has returned: learn what it changed and let go of what a recompute does not need."""
        changed = [position for position, each in enumerate(self._inputs) if each.observe()]
        self._unit.changed_inputs.update(changed)
        self._unit.is_observed = True
        written = [self._inputs[position].alias for position in changed]
        others = [*written, *(each.original for each in self._state.kept.values())]
        if any(_share_memory(one, other) for index, one in enumerate(written) for other in others[index + 1 :]):
            raise UnsupportedError(
                f"unit `{self._unit.name}` changed an input in place that shares memory with another input, or with a "
                "buffer: a recompute cannot repeat that. Let it work on a clone, or leave it out of `units`."
            )
        self._state.settle()
        for each in self._inputs:
            each.release(self._unit.offload.engine)

    def begin_recompute(self, placeholder: torch.Tensor) -> torch.Tensor:
        """Give checkpoint() its argument back. A recompute itself always runs with gradients; this is just before."""
        in_graph = torch.is_grad_enabled() or in_exec_group()
        self._phase = "recompute in a graph" if in_graph else "recompute"
        return placeholder

    def _recompute(self) -> Any:
        engine = self._unit.offload.engine
        leaves = [leaf.load(engine) if isinstance(leaf, UnitInput) else copied(leaf) for leaf in self._leaves]
        before = self._before()
        for each in before._inputs if before is not None else ():
            each.prefetch(engine)
        with self._state.replay(leaves) as (args, kwargs), self._unit.offload.running(self._phase, self._unit.name):
            return call_under(self._compiler, self._unit.original, args, kwargs)
