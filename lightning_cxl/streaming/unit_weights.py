"""`UnitWeights`: the parameters of one unit in one piece of host memory, and in a piece of a slot while it computes."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_cxl.errors import StorageError, UnsupportedError
from lightning_cxl.memory.host_memory import laid_out_as
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.shards import local
from lightning_cxl.streaming.quantised import DATA, companions, show, tensors_of
from lightning_cxl.torch_private import is_only_holder, plain_data, plain_grad, set_plain_data, set_plain_grad
from lightning_cxl.transfer.engine import Transfer, TransferEngine

# ----------------------------------------------------------------------------------------------------
# `UnitListener`: learns what happens to streamed units. Gradients come and are looked at in step with it.


class UnitListener(Protocol):
    """Learns what happens to streamed units."""

    def recompute_begins(self) -> None:
        """Learn that a unit is about to be recomputed, in the backward that it is a part of."""

    def unit_is_over(self, unit: Any) -> None:
        """Learn that the backward of a unit is over, and that its weights are at home."""

    def complete_for_access(self) -> None:
        """Learn that someone looks at parameters through their modules. What runs behind is done."""


class Nobody:
    """A `UnitListener` that does nothing: of units that are not trained."""

    def _ignore(self, unit: Any = None) -> None:
        pass

    recompute_begins = unit_is_over = complete_for_access = _ignore


# ----------------------------------------------------------------------------------------------------
# `AwaitedParameters`: tells when someone looks at a module's parameters, and lets them wait for an update.
#
# [Note: Awaited parameters]
# Everything that reads a model through its modules, be it ``module.weight``, ``named_parameters``, ``state_dict``, a
# copy or a hook of the user, goes through the dict ``module._parameters``. While a unit is not entered, that dict is
# replaced by one that first waits for an update that runs behind, and puts the plain one back. Names can be read
# without that. A parameter that someone holds a reference to is read without waiting: optimizers do, which know about
# updates.
#
# Who has looked may write, also through ``.data`` (peft merges adapters so), which torch does not count. So a look
# waits for copies to the device that are under way, since the host may be ahead of the device, and makes those that are
# there old; and until the next unit is entered, when the code that looked is over, none is made.


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


def guard(module: nn.Module, settle: Callable[[], None]) -> None:
    """Let whoever looks at the parameters of `module` (not of its children) call `settle` first."""
    plain = module._parameters
    if not isinstance(plain, AwaitedParameters):
        module.__dict__["_parameters"] = AwaitedParameters(plain, settle)


def peek(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of `module` and its children once each; only for what an update leaves alone."""
    seen: set[nn.Parameter] = set()  # tied ones
    for each in module.modules():
        for parameter in peek_at_own(each).values():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield parameter


def peek_at_own(module: nn.Module) -> dict[str, Any]:
    """Return the dict with the parameters of `module` (not of its children), without waiting."""
    parameters: dict[str, Any] = module.__dict__["_parameters"]
    return parameters.plain if isinstance(parameters, AwaitedParameters) else parameters


def unguard(module: nn.Module) -> None:
    """Undo `guard`; nothing where it is undone already."""
    awaited = module.__dict__["_parameters"]
    if isinstance(awaited, AwaitedParameters):
        module.__dict__["_parameters"] = awaited.plain


# ----------------------------------------------------------------------------------------------------
# `Home`: where the weights of a unit stay between its visits to the device, and how they get there.


class Home(Protocol):
    """Bytes that parameters show while their unit does not compute."""

    buffer: Buffer
    """Where the parameters' data lie."""

    def filling(self) -> AbstractContextManager[Buffer]:
        """Return a region in which all bytes are written, to the memory that it yields; they are the home's then."""

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Transfer:
        """Start copying to the device."""

    def settle(self) -> None:
        """Return when the parameters show what the latest update has made."""

    def looked_at(self) -> None:
        """Learn that someone may write to the parameters from now on."""

    def looks_are_over(self) -> None:
        """Learn that whoever has looked writes no more, and that no update runs."""

    def update_begins(self) -> None:
        """Learn that an update writes what the parameters show next."""


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

    settle = looked_at = looks_are_over = update_begins = _ignore


_ALIGNMENT = 64  # bytes: a cache line, and what vectors of every element type start at


_left_behind: "WeakKeyDictionary[nn.Module, tuple[str, set[int]]]" = WeakKeyDictionary()
"""The unit of each module, and where its parameters lie in memory that forked children do not have."""
_METADATA = frozenset(("device", "dim", "dtype", "ndim", "nelement", "numel", "requires_grad", "shape", "size"))


class AllocateWeights(Protocol):
    """Gives a home where the policy places the weights of one piece."""

    def __call__(self, nbytes: int, parameters: Sequence[nn.Parameter]) -> Home:
        """Return a home of at least `nbytes` bytes."""


class Place(NamedTuple):
    """Where a parameter and the tensors beside it lie, by key. See [Note: Quantised parameters]."""

    module: nn.Module
    parameter: nn.Parameter
    offsets: dict[str, int]  # in a slot
    homes: dict[str, torch.Tensor]  # each has a storage of its own, so that saving one parameter saves just that

    @property
    def home(self) -> torch.Tensor:
        return self.homes[DATA]

    @property
    def is_quantised(self) -> bool:
        return len(companions(self.module, self.parameter)) > 0

    def show(self, slot: torch.Tensor | None = None) -> None:
        tensors = self.homes
        if slot is not None:
            tensors = {key: _in_slot(slot, self.offsets[key], home) for key, home in tensors.items()}
        show(self.module, self.parameter, tensors)

    def put_back(self, slot: torch.Tensor) -> bool:
        """Put the parameter back where its module has got another one with the same bytes, which would stay there.

        Where the CPU computes, peft's DoRA replaces the parameter of a layer by ``weight.to("cpu")`` in every forward.

        Returns:
            Whether the parameter still shows the slot.
        """
        shown_at = slot.data_ptr() + self.offsets[DATA]
        for name, shown in self.module._parameters.items():
            if shown is not None and shown is not self.parameter and shown.data_ptr() == shown_at:
                self.module._parameters[name] = self.parameter
        return self.parameter.data_ptr() == shown_at


class Piece(NamedTuple):
    """Parameters that belong on the same tier: what one transfer moves."""

    offset: int
    flat: torch.Tensor
    home: Home


class UnitWeights:
    """Moves a unit's parameters to host memory of their own, piece by piece; `enter` and `leave` exchange their data.

    A parameter keeps its identity, shape, strides and values.

    Args:
        pieces: its parameters, dense, on the host; those that belong on the same tier together. INOUT.
    """

    def __init__(
        self, name: str, module: nn.Module, pieces: Iterable[Sequence[nn.Parameter]], allocate: AllocateWeights
    ) -> None:
        self.name = name
        self.module = module
        self.nbytes = 0
        self.pieces: list[Piece] = []
        self.places: list[Place] = []
        self._slot: torch.Tensor | None = None  # the device memory that the parameters show
        self.num_forwards = 0
        """How often the unit was entered for a forward that backward repeats; whoever counts sets it back."""
        self.is_seen = False
        """Whether someone may be about to write to parameters that they have looked up."""
        self.readers: Sequence[Transfer] = ()
        """The latest copies of the homes, which may still be under way; those before them are done by then."""
        self._num_looks = 0
        self._listener: UnitListener = Nobody()
        self._update: Future[None] | None = None
        self._running: list[Future[None]] = []
        self._pid = os.getpid()
        self._left_behind: set[int] = set()
        for parameters in pieces:
            self._move(parameters, allocate)
        ids = {id(place.parameter) for place in self.places}
        # not the others: FSDP2 exchanges the parameters of those around every forward, which is no look
        self._holders = [m for m in module.modules() if any(id(p) in ids for p in m.parameters(recurse=False))]
        _left_behind.update((module, (name, self._left_behind)) for module in self._holders)

    @torch.no_grad()
    def _move(self, parameters: Sequence[nn.Parameter], allocate: AllocateWeights) -> None:
        module_of = owners_in(self.module)
        home = allocate(piece_nbytes(self.module, parameters), parameters)
        moved: list[Place] = []
        with home.filling() as memory:
            end = 0
            for parameter in parameters:
                each = Place(module_of[id(parameter)], parameter, {}, {})
                for key, tensor in tensors_of(each.module, parameter).items():
                    new, each.homes[key] = (
                        laid_out_as(place.slice(end, tensor.nbytes).tensor((tensor.numel(),), tensor.dtype), tensor)
                        for place in (memory, home.buffer)
                    )
                    each.homes[key] = each.homes[key].data  # no view, whose base would hold the memory: see `take_in`
                    new.copy_(tensor.detach())
                    each.offsets[key] = self.nbytes + end
                    end += aligned_nbytes(tensor)
                if memory is home.buffer:
                    each.show()  # at once: what it leaves goes back
                moved.append(each)
        for each in moved:
            each.show()
            if not (isinstance(home, InMemory) and home.is_inherited) and each.parameter.numel():
                self._left_behind.add(each.home.data_ptr())
        self.places += moved
        self.pieces.append(Piece(self.nbytes, home.buffer.tensor((end,), torch.uint8), home))
        self.nbytes += end

    @property
    def memory_bytes(self) -> int:
        return sum(flat.numel() for _, flat, home in self.pieces if isinstance(home, InMemory))

    def attach(self, listener: UnitListener) -> None:
        """Tell `listener` from now on when someone looks at the parameters through their modules."""
        self._listener = listener

    def begin_update(self, update: "Future[None]") -> None:
        """Let whoever needs the weights wait for an update of the homes. See [Note: Awaited parameters].

        Args:
            update: ends when the homes have been written; its error is raised where it is waited for.
        """
        self.wait()
        for piece in self.pieces:
            piece.home.update_begins()
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
            self._update = None

    def settle(self) -> None:
        """Return when the homes have their new values and show them."""
        self.wait()
        for piece in self.pieces:
            piece.home.settle()

    def watch(self) -> None:
        """Notice from now on when someone looks at the parameters through their modules."""
        for module in self._holders:
            guard(module, self._see)

    def unwatch(self) -> None:
        for module in self._holders:
            unguard(module)

    def _see(self) -> None:
        if os.getpid() != self._pid:  # forked: the threads and the device are the parent's
            if self.is_updating():
                raise UnsupportedError(_forked(self.name))
            self.unwatch()
            return
        try:
            self.settle()
        finally:
            self.unwatch()
            self.is_seen = True
            self._num_looks += 1  # in this order: see `ParamStreamer.fetch_ahead`
        self._listener.complete_for_access()
        self.wait_for_readers()  # what the device has still to compute, it computes with the weights of now
        for piece in self.pieces:
            piece.home.looked_at()

    def wait_for_readers(self) -> None:
        """Return when no copy of the homes is under way."""
        for transfer in self.readers:
            with suppress(StorageError):  # for whoever uses the copy
                transfer.wait_host()

    def versions(self) -> tuple[int, ...]:
        """Return what changes whenever someone writes to a parameter, or looks it up and so can write unnoticed."""
        return (self._num_looks, *(place.parameter._version for place in self.places))

    def forget_looks(self) -> None:
        """The code that has looked is over: bring home what it has set with ``parameter.data = ...``, watch again."""
        if not self.is_seen:
            return
        self.take_in()
        if not self.is_updating():
            for piece in self.pieces:
                piece.home.looks_are_over()
        self.is_seen = False
        self.watch()

    @torch.no_grad()
    def take_in(self) -> None:
        """Take over what someone has put in the place of a parameter's data since it was home."""
        for place in self.places:
            parameter, home = place.parameter, place.home
            data = plain_data(parameter)
            if data.data_ptr() == home.data_ptr() and (data.shape, data.stride()) == (home.shape, home.stride()):
                continue
            if (data.shape, data.dtype, data.device) != (home.shape, home.dtype, home.device):
                raise UnsupportedError(
                    f"a parameter of unit `{self.name}` was {tuple(home.shape)} {home.dtype} on the host and is now "
                    f"{tuple(data.shape)} {data.dtype} on `{data.device}`: where weights stream, convert the model "
                    "before the run, or set `stream_weights=False`. A model that something else is to train must be "
                    "let go of before (`trainer.end()`, `accelerator.free_memory()`, `fabric.strategy.teardown()`)"
                )
            home.untyped_storage()  # the first look, which counts from then on
            if not is_only_holder(home):
                raise UnsupportedError(
                    f"the data of a parameter of unit `{self.name}` was replaced (`p.data = ...`) while your code "
                    "holds the `p.data` of before, as averages do that are swapped in. Where weights stream, both "
                    "are the same memory: keep `p.data.clone()`, and write with `p.data.copy_(...)`"
                )
            self.wait_for_readers()  # one may have been fetched ahead, which is old now
            self.settle()
            set_plain_data(parameter, home)
            parameter.copy_(data)

    def enter(self, slot: torch.Tensor) -> None:
        for place in self.places:
            place.show(slot)
        self._slot = slot

    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        """Meanwhile show no gradients. They stay on the host: a compiler fails beside weights on the device."""
        aside = [(place, grad) for place in self.places if (grad := plain_grad(place.parameter)) is not None]
        for place, _ in aside:
            set_plain_grad(place.parameter, None)
        try:
            yield
        finally:
            for place, grad in aside:
                shown = plain_data(place.parameter)
                if grad.device == place.home.device:
                    set_plain_data(place.parameter, place.home)  # torch takes a gradient beside its weight only
                # else it came before its unit was entered, and `leave` refuses it
                set_plain_grad(place.parameter, grad)
                set_plain_data(place.parameter, shown)

    def leave(self) -> None:
        slot, self._slot = self._slot, None
        replaced = [
            place for place in self.places if slot is not None and place.is_quantised and not place.put_back(slot)
        ]
        unclaimed = []
        for place in self.places:
            place.show()
            if (grad := plain_grad(place.parameter)) is not None and grad.device != place.home.device:
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
        if getattr(getattr(func, "__self__", func), "__name__", "") in _METADATA:
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
    for module, (unit, addresses) in list(_left_behind.items()):
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


def owners_in(unit: nn.Module) -> dict[int, nn.Module]:
    return {id(p): module for module in unit.modules() for p in module.parameters(recurse=False)}


def aligned_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _in_slot(slot: torch.Tensor, offset: int, home: torch.Tensor) -> torch.Tensor:
    flat = slot[offset : offset + home.nbytes].view(home.dtype)
    return flat.as_strided(home.shape, home.stride())
