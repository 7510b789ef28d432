"""`UnitWeights`: the parameters of one unit in one piece of host memory, and in a piece of a slot while it computes."""

import operator
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_cxl.devices import Transfer, TransferEngine
from lightning_cxl.errors import ConfigError, StorageError, UnsupportedError
from lightning_cxl.memory.host_memory import aligned_nbytes, laid_out_as
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.shards import local
from lightning_cxl.streaming.on_ssd import Fetch, WeightRecord
from lightning_cxl.streaming.quantised import DATA, companions, show, tensors_of
from lightning_cxl.streaming.units import Compiler, StandIn, call_under, owners_in
from lightning_cxl.timing import named
from lightning_cxl.torch_private import (
    asks_metadata,
    caches_weights,
    is_in_transform,
    is_only_holder,
    plain_data,
    plain_grad,
    records_addresses,
    set_plain_data,
    set_plain_grad,
    tree_leaves,
)

# `AwaitedParameters`: tells when the user's code accesses a module's parameters, and lets it wait for an update.
#
# [Note: Awaited parameters]
# Everything that reads a model through its modules, be it ``module.weight``, ``named_parameters``, ``state_dict``, a
# copy or a hook of the user, goes through the dict ``module._parameters``. While a unit is not entered, that dict is
# replaced by one that first waits for an update that runs behind, and puts the plain one back. Names can be read
# without that. A parameter that someone holds a reference to is read without waiting: optimizers do, which know about
# updates.
#
# Code that has accessed a parameter may write, also through ``.data`` (peft merges adapters so), which torch does not
# count. So an access waits for copies to the device that are in flight, since the host may be ahead of the device, and
# makes those that are there old. None is made until the next unit is entered, when the code with access is over.


class AwaitedParameters(dict[str, Any]):
    """Stands in for ``module._parameters``. See [Note: Awaited parameters]."""

    def __init__(self, plain: dict[str, Any], settle: Callable[[], None]) -> None:
        super().__init__(plain)
        self.plain = plain
        self._settle = settle

    def settled(self) -> dict[str, Any]:
        self._settle()
        return self.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain)  # names alone; defined here, it keeps ``dict(self)`` from reading values directly

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return dict, (self.settled(),)  # copies and pickles are plain


def _after_settling(name: str) -> Callable[..., Any]:
    def method(self: AwaitedParameters, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.settled(), name)(*args, **kwargs)

    return method


for _name in (
    *("__getitem__", "get", "items", "values", "copy", "__eq__", "__ne__", "__or__"),
    *("__setitem__", "__delitem__", "pop", "popitem", "setdefault", "update", "clear", "__ior__"),
):
    setattr(AwaitedParameters, _name, _after_settling(_name))


def peek(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `module` and its children once each; only for what an update leaves alone."""
    seen: set[int] = set()  # tied ones
    for each in module.modules():
        for parameter in peek_at_own(each).values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def peek_at_own(module: nn.Module) -> dict[str, Any]:
    """Return the dict with the parameters of `module` (not of its children), without waiting."""
    parameters: dict[str, Any] = module.__dict__["_parameters"]
    return parameters.plain if isinstance(parameters, AwaitedParameters) else parameters


class InMemory:
    """A piece of host memory."""

    def __init__(self, buffer: Buffer, *, is_inherited: bool = True) -> None:
        self.buffer = buffer
        self.is_inherited = is_inherited

    @contextmanager
    def filling(self) -> Iterator[Buffer]:
        yield self.buffer

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Transfer:
        return engine.h2d(flat, destination, after=after)

    def _ignore(self) -> None:
        pass  # updates write here, so there is nothing to wait for

    settle = begin_access = end_access = begin_update = _ignore


HostCopy = InMemory | WeightRecord
"""Bytes that parameters show while their unit does not compute."""
_version = operator.attrgetter("_version")
_not_inherited: "WeakKeyDictionary[nn.Module, tuple[str, set[int]]]" = WeakKeyDictionary()
"""The unit of each module, and where its parameters lie in memory that forked children do not have."""


AllocateWeights = Callable[[int, Sequence[nn.Parameter]], HostCopy]
"""Gives memory of at least that many bytes, where the policy places these weights."""


class Place(NamedTuple):
    """Where a parameter and the tensors beside it lie, by key. See [Note: Quantised parameters]."""

    module: nn.Module
    parameter: nn.Parameter
    offsets: dict[str, int]  # in a slot
    on_host: dict[str, torch.Tensor]  # each has a storage of its own, so that saving one parameter saves just that

    @property
    def host(self) -> torch.Tensor:
        return self.on_host[DATA]

    def show(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        show(self.module, self.parameter, self.on_host if tensors is None else tensors)

    def views(self, slot: torch.Tensor) -> dict[str, torch.Tensor]:
        return {  # the slot's size, and what is in it, are multiples of 256 bytes
            key: slot.view(host.dtype).as_strided(host.shape, host.stride(), self.offsets[key] // host.itemsize)
            for key, host in self.on_host.items()
        }

    def put_back(self, slot: torch.Tensor) -> bool:
        """Put the parameter back into its module; return whether it still shows the slot."""
        # where the CPU computes, peft's DoRA replaces a layer's parameter by `weight.to("cpu")` in every forward: it
        # has the same bytes, and would stay there
        shown_at = slot.data_ptr() + self.offsets[DATA]
        for name, shown in self.module._parameters.items():
            if shown is not None and shown is not self.parameter and shown.data_ptr() == shown_at:
                self.module._parameters[name] = self.parameter
        return self.parameter.data_ptr() == shown_at


class WeightPiece(NamedTuple):
    """Parameters that belong on the same tier: what one transfer moves."""

    offset: int
    flat: torch.Tensor
    host: HostCopy


class UnitWeights:
    """Moves a unit's parameters to host memory of their own, piece by piece; `enter` and `exit` exchange their data.

    A parameter keeps its identity, shape, strides and values. Those that belong on the same tier are one piece.
    """

    def __init__(
        self, name: str, module: nn.Module, pieces: Iterable[Sequence[nn.Parameter]], allocate: AllocateWeights
    ) -> None:
        self.name = name
        self.module = module
        self.nbytes = 0
        self.pieces: list[WeightPiece] = []
        self.places: list[Place] = []
        self.parameters: list[nn.Parameter] = []
        self._slot: torch.Tensor | None = None  # the device memory that the parameters show
        self._sum: torch.Tensor | int | None = None  # of its bytes in the first forward; 0: that is over
        self.num_forwards = 0  # in this step, that backward repeats
        self.is_accessed = False  # the user's code has accessed parameters, and may write to them
        self.readers: Sequence[Transfer] = ()  # the latest copies to the device, in flight; those before are done then
        self._num_accesses = 0
        self.gradients: Any = None  # those of trained units are completed for an access
        self._update: Future[None] | None = None
        self._running: list[Future[None]] = []
        self._pid = os.getpid()
        self._not_inherited: set[int] = set()
        for parameters in pieces:
            self._move(parameters, allocate)
        ids = {id(place.parameter) for place in self.places}
        # not the others: FSDP2 exchanges the parameters of those around every forward, which is no access
        self._holders = [m for m in module.modules() if any(id(p) in ids for p in m.parameters(recurse=False))]
        _not_inherited.update((module, (name, self._not_inherited)) for module in self._holders)

    @torch.no_grad()
    def _move(self, parameters: Sequence[nn.Parameter], allocate: AllocateWeights) -> None:
        module_of = owners_in(self.module)
        host = allocate(piece_nbytes(self.module, parameters), parameters)
        moved: list[Place] = []
        with host.filling() as memory:
            end = 0
            for parameter in parameters:
                each = Place(module_of[id(parameter)], parameter, {}, {})
                for key, tensor in tensors_of(each.module, parameter).items():
                    new, each.on_host[key] = (
                        laid_out_as(place.tensor((tensor.numel(),), tensor.dtype, end), tensor)
                        for place in (memory, host.buffer)
                    )
                    each.on_host[key] = each.on_host[key].data  # no view: its base would hold memory, see `take_in`
                    new.copy_(tensor.detach())
                    each.offsets[key] = self.nbytes + end
                    end += aligned_nbytes(tensor)
                if memory is host.buffer:
                    each.show()  # at once: what it leaves goes back
                moved.append(each)
        for each in moved:
            each.show()
            if not (isinstance(host, InMemory) and host.is_inherited) and each.parameter.numel():
                self._not_inherited.add(each.host.data_ptr())
        self.places += moved
        self.parameters += [each.parameter for each in moved]
        self.pieces.append(WeightPiece(self.nbytes, host.buffer.tensor((end,), torch.uint8), host))
        self.nbytes += end

    def begin_step(self) -> None:
        self.num_forwards = 0

    @property
    def runs_again(self) -> bool:
        """Whether a backward of this step may still compute with it, as far as its forwards tell."""
        return self.num_forwards != 1

    @property
    def memory_bytes(self) -> int:
        return sum(flat.numel() for _, flat, host in self.pieces if isinstance(host, InMemory))

    def begin_update(self, update: "Future[None]") -> None:
        """Let readers of the weights wait for an update of them, and raise its error ([Note: Awaited parameters])."""
        self.wait()
        for piece in self.pieces:
            piece.host.begin_update()
        running = [update]  # of this update alone: what ends an earlier one may come late
        self._update, self._running = update, running
        update.add_done_callback(lambda _: running.clear())
        self.watch()

    def is_updating(self) -> bool:
        # not `done()`: its lock may have been held when this process was forked
        return self._update is not None and bool(self._running)

    def wait(self) -> None:
        update = self._update
        if update is None:
            return
        try:
            update.result()
        finally:  # not earlier: until then nobody may take the weights for new
            if self._update is update:  # else another thread has waited, and the next one has begun
                self._update = None

    def settle(self) -> None:
        """Return when the parameters show what the latest update has made."""
        self.wait()
        for piece in self.pieces:
            piece.host.settle()

    def watch(self) -> None:
        """Notice accesses to the parameters through their modules from now on."""
        for module in self._holders:
            module.__dict__["_parameters"] = AwaitedParameters(peek_at_own(module), self._begin_access)

    def unwatch(self) -> None:
        for module in self._holders:
            module.__dict__["_parameters"] = peek_at_own(module)

    def _begin_access(self) -> None:
        if os.getpid() != self._pid:  # forked: the threads and the device are the parent's
            if self.is_updating():
                raise UnsupportedError(_forked(self.name))
            self.unwatch()
            return
        try:
            self.settle()
        finally:
            self.unwatch()
            self.is_accessed = True
            self._num_accesses += 1  # in this order: see `ParamStreamer.fetch_ahead`
        if self.gradients is not None:
            self.gradients.complete_for_access()
        self.wait_for_readers()  # what the device has still to compute, it computes with the weights of now
        for piece in self.pieces:
            piece.host.begin_access()

    def wait_for_readers(self) -> None:
        """Return when no copy to the device is in flight."""
        for transfer in self.readers:
            with suppress(StorageError):  # for whoever uses the copy
                transfer.wait_host()

    def versions(self) -> tuple[int, ...]:
        """Return what changes with every write to a parameter, and with every access: writes may follow."""
        return self._num_accesses, *map(_version, self.parameters)

    def end_access(self) -> None:
        """The code with access is over: take over what it has set with ``parameter.data = ...``, watch again."""
        self.take_in()
        if not self.is_updating():
            for piece in self.pieces:
                piece.host.end_access()
        self.is_accessed = False
        self.watch()

    @torch.no_grad()
    def take_in(self) -> None:
        """Take over what someone has put in the place of a parameter's data."""
        for place in self.places:
            parameter, host = place.parameter, place.host
            data = parameter if type(parameter) is nn.Parameter else plain_data(parameter)
            if (data.data_ptr(), data.shape, data.stride()) == (host.data_ptr(), host.shape, host.stride()):
                continue
            data = plain_data(parameter)
            if (data.shape, data.dtype, data.device) != (host.shape, host.dtype, host.device):
                raise UnsupportedError(
                    f"a parameter of unit `{self.name}` was {tuple(host.shape)} {host.dtype} on the host and is now "
                    f"{tuple(data.shape)} {data.dtype} on `{data.device}`: where weights stream, convert the model "
                    "before the run, or set `stream_weights=False`. A model that something else is to train must be "
                    "let go of before (`trainer.end()`, `accelerator.free_memory()`, `fabric.strategy.teardown()`)"
                )
            host.untyped_storage()  # the first access, which counts from then on
            if not is_only_holder(host):
                raise UnsupportedError(
                    f"the data of a parameter of unit `{self.name}` was replaced (`p.data = ...`) while your code "
                    "holds the `p.data` of before, as averages do that are swapped in. Where weights stream, both "
                    "are the same memory: keep `p.data.clone()`, and write with `p.data.copy_(...)`"
                )
            self.wait_for_readers()  # one may have been fetched ahead, which is old now
            self.settle()
            set_plain_data(parameter, host)
            parameter.copy_(data)

    def enter(self, slot: torch.Tensor, views: Iterable[Mapping[str, torch.Tensor]] | None = None) -> None:
        for place, tensors in zip(self.places, self.views(slot) if views is None else views, strict=True):
            place.show(tensors)
        self._slot = slot
        if self._sum is None:
            self._sum = slot[: self.nbytes].view(torch.int64).sum()

    def views(self, slot: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [place.views(slot) for place in self.places]

    @contextmanager
    def gradients_hidden(self) -> Iterator[None]:
        """Meanwhile show no gradients. They stay on the host: a compiler fails beside weights on the device."""
        hidden = [(place, grad) for place in self.places if (grad := plain_grad(place.parameter)) is not None]
        for place, _ in hidden:
            set_plain_grad(place.parameter, None)
        try:
            yield
        finally:
            for place, grad in hidden:
                shown = plain_data(place.parameter)
                if grad.device == place.host.device:
                    set_plain_data(place.parameter, place.host)  # torch takes a gradient beside its weight only
                # else it came before its unit was entered, and `exit` refuses it
                set_plain_grad(place.parameter, grad)
                set_plain_data(place.parameter, shown)

    def is_as_entered(self) -> bool:
        """Return whether no weight has other values, the first time also through `.data`."""
        slot, total, self._sum = self._slot, self._sum, 0
        if slot is None or (isinstance(total, torch.Tensor) and slot[: self.nbytes].view(torch.int64).sum() != total):
            return slot is None
        replaced = [each for each in self.places if each.parameter.data_ptr() != slot.data_ptr() + each.offsets[DATA]]
        pairs = [(plain_data(each.parameter), each.views(slot)[DATA]) for each in replaced]
        return all(torch.equal(data, shown.to(data)) for data, shown in pairs)  # bitsandbytes casts a bias in place

    def exit(self) -> None:
        slot, self._slot = self._slot, None
        replaced = [
            place
            for place in self.places
            if slot is not None and companions(place.module, place.parameter) and not place.put_back(slot)
        ]
        unclaimed = []
        for place in self.places:
            place.show()
            if (grad := plain_grad(place.parameter)) is not None and grad.device != place.host.device:
                set_plain_grad(place.parameter, None)
                unclaimed.append(place.parameter)
        if unclaimed:
            ids = {id(parameter) for parameter in unclaimed}
            names = [f"`{name}`" for name, parameter in self.module.named_parameters() if id(parameter) in ids]
            raise UnsupportedError(
                f"unit `{self.name}`: no optimizer has {', '.join(names[:3])}{' and others' * (len(names) > 3)}, which "
                "got a gradient. Give what is trained to an optimizer, freeze the rest with `requires_grad_(False)`, "
                "or set `stream_weights=False`"
            )
        if replaced:
            raise UnsupportedError(
                f"unit `{self.name}` replaced the bytes of {len(replaced)} quantised weights in its forward: set "
                "stream_weights=False"
            )


class _Hidden:
    """A parameter in a forked process that does not have its memory: its shape and the like can be asked."""

    unit: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if asks_metadata(func):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
        raise UnsupportedError(_forked(cls.unit))


def _forked(unit: str) -> str:
    return (
        f"this process was forked, as workers of a DataLoader are, and does not have the weights of unit `{unit}`: "
        "page-locked memory and drives are not inherited, nor updates that have not ended. Use a copy that was made "
        "before (`p.detach().clone()`), or `num_workers=0`"
    )


def _hide_in_child() -> None:
    """Let whoever uses a parameter whose memory this forked process has not get an error: an access is a SIGSEGV."""
    for module, (unit, addresses) in list(_not_inherited.items()):
        for parameter in peek_at_own(module).values():
            if parameter is None or isinstance(parameter, _Hidden):  # of two modules, or in the fork of a fork
                continue
            if plain_data(parameter).data_ptr() in addresses:
                kind = type(parameter)
                parameter.__class__ = type(kind.__name__, (_Hidden, kind), {"unit": unit})


os.register_at_fork(after_in_child=_hide_in_child)


def piece_nbytes(unit: nn.Module, parameters: Sequence[nn.Parameter]) -> int:
    module_of = owners_in(unit)
    return sum(aligned_nbytes(local(t)) for p in parameters for t in tensors_of(module_of[id(p)], p).values())


def tensors_by_parameter(module: nn.Module) -> dict[int, list[torch.Tensor]]:
    """Return each parameter of a module and its children with the tensors beside it, by the parameter's id."""
    module_of = owners_in(module)
    return {id(p): list(tensors_of(module_of[id(p)], p).values()) for p in module.parameters()}


# Weights of units lie on the host, and are fetched to the device ahead of the unit that computes next.
#
# [Note: Residency of a unit]
# A streamed parameter shows (``p.data``) a piece of host memory, except while its unit computes; then it
# shows a slot on the device that holds a copy. Optimizers, checkpoints and the user's own code between units therefore
# always find the weights on the host, and only these are ever written.
#
# * Enter: a unit's forward starts. Its slot is the one that has a copy of these very weights, or gets one now. A step,
#   a loaded checkpoint or any other write makes copies old: versions count writes in place, and
#   [Note: Awaited parameters] who may write through ``.data``. The device waits for the copy.
# * Gradients so far are on the host, so the unit's own forward, which may be compiled, does not see them.
# * A user's ``torch.autocast`` keeps 16-bit casts of float32 weights, found by the parameter, until its context ends:
#   of all units, whatever the parameters show by then. They are dropped when a unit's own forward ends.
# * Exit: the forward has returned. Queued kernels may still read the slot; a later copy into it starts after them (see
#   [Note: Copies and streams]), so the host need not wait.
# * In backward the recompute of an offloaded unit enters it again, and it stays entered, because its gradients are
#   computed from views of the slot, until the recompute of another unit starts or `release` is called.
# * A backward that is differentiated itself (``create_graph=True``: gradient penalties, forces, Hessians) saves weights
#   in its own graph, which no recompute repeats. So its recomputes show a copy of the slot, which lives as long as the
#   graph and has the parameter's version: one that is older than an update is an error, as in autograd.
# * Ahead: while a unit computes, those that came after it the last time are fetched, as many as there are slots: all of
#   them between steps, when none is taken. A wrong guess costs a copy, never a result. A unit whose update still runs
#   is fetched when that is done, by the thread that ran it ([Note: Overlapped updates]); whoever enters it before
#   waits.
# * A slot that an entered unit shows is busy and is not taken away. With all of them busy a unit cannot be entered.
#
# A unit whose forward must be differentiated without a recompute keeps views of the slot in its graph, which would show
# other weights later. That is refused.


class Slot:
    """One piece of device memory, and the unit whose weights it holds."""

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=engine.device)
        self.unit: UnitWeights | None = None
        self._engine = engine
        self._transfers: list[Transfer] = []
        self._versions: tuple[int, ...] = ()
        self._users = engine.mark()  # device work that uses the memory; at first, older work on it
        self._views: dict[UnitWeights, list[dict[str, torch.Tensor]]] = {}  # kept: nine of them take 40 us

    def views(self, unit: UnitWeights) -> list[dict[str, torch.Tensor]]:
        if unit not in self._views:
            with torch.inference_mode(False):  # they outlive an evaluation that asks first
                self._views[unit] = unit.views(self.memory)
        return self._views[unit]

    def fetch(self, unit: UnitWeights, versions: tuple[int, ...]) -> None:
        """Start copying the weights of `unit` here, which are at least as new as `versions`."""
        before = [self._users, *self.drop()]  # these, if they have brought what was not needed
        self.unit, self._transfers = None, []
        for offset, flat, host in unit.pieces:
            into = self.memory[offset : offset + flat.numel()]
            self._transfers.append(host.fetch(self._engine, flat, into, before))
        self.unit, self._versions = unit, versions  # only now: a copy that cannot be started leaves nobody's weights
        unit.readers = self._transfers

    def drop(self) -> list[Transfer]:
        """Let no copy be started that has not been yet; return those of the engine's."""
        copies = []
        for transfer in self._transfers:
            if isinstance(transfer, Fetch):
                transfer.drop()
            else:
                copies.append(transfer)
        return copies

    def exit(self) -> None:
        """Note that all readers of the weights have been queued: the next copy into this slot starts after them."""
        self._users = self._engine.mark()

    def wait(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait()
        except BaseException:
            self.unit = None  # it has to be fetched again
            raise

    def is_image_of(self, unit: UnitWeights) -> bool:
        """Whether this has, or gets, the weights of `unit` as they are now."""
        return self.unit is unit and self._versions == unit.versions()


MIN_SLOTS = 2
NUM_SLOTS = 3
"""One computes, one is fetched for what comes next, one was used last."""


class ParamStreamer:
    """Brings the weights of units to the device when they compute. See [Note: Residency of a unit].

    `phase` is that of `ActivationOffload`. A slot is as large as the largest unit.
    """

    def __init__(
        self,
        engine: TransferEngine,
        units: Sequence[UnitWeights],
        phase: Callable[[], str | None],
        *,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        if num_slots < MIN_SLOTS:
            raise ConfigError(f"{num_slots} slots: one unit computes while another is fetched, so give at least 2")
        self.phase = phase
        self._gradients: Any = None  # a `GradientOffload`, where units are trained
        self.num_fetches = self.num_late = 0  # copies started; and those not requested before their unit was entered
        self._engine = engine
        self._units = list(units)
        self._num_slots = num_slots
        slot_bytes = max(unit.nbytes for unit in units)
        self._slots = [Slot(engine, slot_bytes) for _ in range(num_slots)]  # the first is evicted first
        self._slot_bytes = num_slots * slot_bytes
        # guards the slots and all below; held while copies are started, which takes long from pageable memory only
        self._lock = threading.Lock()
        self._entered: dict[int, tuple[UnitWeights, Slot]] = {}  # by id of the unit
        self._next: dict[_Entry, _Entry] = {}  # what followed what
        self._latest: _Entry | None = None
        self._attached: list[_StreamedForward] = []

    def attach(self, gradients: Any = None) -> None:
        """Let the weights of units come and go until `detach`; gradients are offloaded in step with them."""
        for unit in self._units if not self._engine.computes_on_host else ():
            if any(map(records_addresses, unit.module.modules())):
                raise UnsupportedError(
                    f"unit `{unit.name}` is compiled with CUDA graphs (`mode='reduce-overhead'` or 'max-autotune'), "
                    "which record where weights are: those that stream are elsewhere in each call. Compile it with "
                    "`mode='default'` or 'max-autotune-no-cudagraphs', or set `stream_weights=False`"
                )
        self._attached = [_StreamedForward(self, unit) for unit in self._units]
        self._gradients = gradients
        for unit in self._units:
            unit.gradients = gradients

    def refuse_inputs(self, inputs: Iterable[Any]) -> None:
        """Refuse weights that stream among ``backward(inputs=...)``.

        Torch gives a parameter that goes to the host a new node. It looks for that one, and the graph has the old one.
        """
        asked = {id(each) for each in inputs}
        for unit in self._units:
            if any(id(parameter) in asked for parameter in unit.parameters):
                raise UnsupportedError(
                    f"`backward(inputs=...)` finds no weights that stream, such as those of unit `{unit.name}`: they "
                    "would get no gradient. Before the forward, call `requires_grad_(False)` on what shall get none, "
                    "and run the backward without `inputs`; or set stream_weights=False"
                )

    def stats(self) -> dict[str, int]:
        """Return ``num_units``, ``host_bytes`` of their weights in memory, ``slot_bytes`` on the device, and copies."""
        return {
            "num_units": len(self._units),
            "host_bytes": sum(unit.memory_bytes for unit in self._units),
            "slot_bytes": self._slot_bytes,
            "num_fetches": self.num_fetches,
            "num_late": self.num_late,
        }

    def enter(self, unit: UnitWeights) -> None:
        phase = self.phase()
        in_backward = _is_recompute(phase)
        unit.num_forwards += phase == "forward"
        if in_backward:
            if self._gradients is not None:
                self._gradients.finish_at_the_end()
            self.release(keep=unit)
        if unit.is_updating():
            with self._engine.stall("stall_update_s", "wait for an update"):
                unit.wait()
        unit.wait()  # for its error
        for each in self._units:
            if each.is_accessed:
                each.end_access()
        is_new = id(unit) not in self._entered
        if is_new:
            unit.unwatch()
            unit.take_in()
        with self._lock:
            if is_new:
                slot = self._find(unit)
                is_late = slot is None
                if slot is None:
                    slot = self._fetch(unit, unit.versions(), {slot for _, slot in self._entered.values()})
                if slot is None:
                    names = ", ".join(f"`{other.name}`" for other, _ in self._entered.values())
                    raise UnsupportedError(
                        f"no slot for the weights of unit `{unit.name}`: {names} compute already. Units that compute "
                        "inside each other need more slots"
                    )
                self.num_late += is_late
                self._touch(slot)
                self._entered[id(unit)] = unit, slot
            slot = self._entered[id(unit)][1]
            entry = _Entry(unit, in_backward)
            if self._latest is not None:
                self._next[self._latest] = entry
            self._latest = entry
        if is_new:
            try:
                slot.wait()
            except BaseException:
                with self._lock:
                    del self._entered[id(unit)]
                unit.watch()
                raise
            unit.enter(slot.memory, slot.views(unit))
        if phase == "recompute in a graph":
            unit.enter(slot.memory[: unit.nbytes].clone())
        self.fetch_ahead()

    def exit(self, unit: UnitWeights) -> None:
        with self._lock:
            entered = self._entered.pop(id(unit), None)
            if entered is None:
                return
            is_unchanged = entered[1].is_image_of(unit) and unit.is_as_entered()  # before the slot is filled anew
            entered[1].exit()
        try:
            unit.exit()
        finally:
            unit.watch()
        if not is_unchanged:
            raise UnsupportedError(
                f"unit `{unit.name}` wrote to its weights in its forward or backward: the device has a copy of them, "
                "so the change would be lost. Leave the unit out of `units`, or write between steps."
            )

    def release(self, keep: UnitWeights | None = None) -> None:
        """Exit every unit except `keep`: the backward of these units is over."""
        with ExitStack() as exits:  # last in, first out; one that fails does not keep the others from coming back
            for unit, _ in reversed(list(self._entered.values())):
                if unit is not keep:
                    exits.callback(self._end, unit)

    def _end(self, unit: UnitWeights) -> None:
        self.exit(unit)
        if self._gradients is not None:
            self._gradients.unit_is_over(unit)

    def fetch_ahead(self) -> None:
        """Start bringing the units that are expected next, as far as there are slots. Safe from any thread."""
        with self._lock:
            keep = {slot for _, slot in self._entered.values()}
            for unit in self._expected():
                slot = self._find(unit)
                if slot is None:
                    # before the question: another thread may access it, or begin an update, after which the copy is old
                    versions = unit.versions()
                    if unit.is_updating() or unit.is_accessed:
                        return
                    slot = self._fetch(unit, versions, keep)
                    if slot is None:
                        return
                keep.add(slot)

    def forget(self) -> None:
        """Fetch again what is entered next: weights may have been written in a way that leaves no trace."""
        with self._lock:
            keep = {slot for _, slot in self._entered.values()}
            for slot in self._slots:
                if slot not in keep:
                    slot.unit = None
            self._latest = None  # and nothing ahead, until a unit is entered

    def detach(self) -> None:
        """Give the units their own forward back, with all weights on the host, and the slots' memory. Idempotent."""
        try:
            with ExitStack() as exits:
                for unit, _ in list(self._entered.values()):
                    exits.callback(self.exit, unit)
        finally:
            self._gradients = None
            with self._lock:
                self._latest = None
                for slot in self._slots:
                    slot.drop()
                self._slots.clear()
            while self._attached:
                self._attached.pop().remove()
            for unit in self._units:
                unit.unwatch()
                unit.gradients = None

    def _find(self, unit: UnitWeights) -> Slot | None:
        return next((slot for slot in self._slots if slot.is_image_of(unit)), None)

    def _fetch(self, unit: UnitWeights, versions: tuple[int, ...], keep: Collection[Slot]) -> Slot | None:
        """Start copying the weights of `unit` to a slot that is not in `keep`; None where all are."""
        slot = next((slot for slot in self._slots if slot not in keep), None)
        if slot is not None:
            with named(f"fetch {unit.name}"):
                slot.fetch(unit, versions)
            self._touch(slot)
            self.num_fetches += 1
        return slot

    def _touch(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)

    def _expected(self) -> Iterator[UnitWeights]:
        """Yield different units that came after the latest one, the next first: as many as there are slots at most."""
        seen: set[int] = set()
        entry = self._latest
        for _ in range(2 * self._num_slots):  # a unit may come twice, at the turn from forward to backward
            entry = None if entry is None else self._next.get(entry)
            if entry is None or len(seen) == self._num_slots:
                return
            if id(entry.unit) not in seen:
                seen.add(id(entry.unit))
                yield entry.unit


class _Entry(NamedTuple):
    unit: UnitWeights
    in_backward: bool


def _is_recompute(phase: str | None) -> bool:
    return phase in ("recompute", "recompute in a graph")


class _StreamedForward(StandIn):
    def __init__(self, streamer: ParamStreamer, unit: UnitWeights) -> None:
        if isinstance(unit.module.__dict__.get("forward"), _StreamedForward):
            raise ConfigError(f"unit `{unit.name}` is attached already: detach it first")
        super().__init__(unit.module)
        self._streamer = streamer
        self._unit = unit

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        streamer, unit = self._streamer, self._unit
        phase = streamer.phase()
        if caches_weights(unit.module) or (torch.is_grad_enabled() and is_in_transform()):
            raise UnsupportedError(
                f"unit `{unit.name}` runs in a transform of torch.func, or in `parametrize.cached()`: either keeps "
                "weights that are on the device for this call only. Use `torch.autograd`, leave `cached()` out, or set "
                "`stream_weights=False`"
            )
        try:
            streamer.enter(unit)
            with unit.gradients_hidden():
                output = call_under(compiler, self.original, args, kwargs)
        finally:  # a recompute may end in an exception of checkpoint(), which has all it needs then
            torch.clear_autocast_cache()
            if not _is_recompute(phase):
                streamer.exit(unit)
        if phase is None and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            raise UnsupportedError(
                f"the forward of unit `{unit.name}` would be differentiated without a recompute, after its weights "
                "have left the device: it is not attached to offloaded activations, or got a key/value cache that "
                "cannot be replayed. Evaluate under torch.no_grad(), pass use_cache=False, or set stream_weights=False"
            )
        return output
