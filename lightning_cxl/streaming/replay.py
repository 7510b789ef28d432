"""Replays arguments and module state: a recompute sees what the forward of its unit saw, and changes nothing.

[Note: Replaying module state]
A recompute runs a unit's forward a second time. Batch-norm statistics, counters, power-iteration vectors and lists of
auxiliary losses must not be updated twice, and the recompute must read the values that the forward read, or gradients
are wrong without any error. So the start of each call is recorded: copies of buffers and of plain tensor attributes,
of plain lists, tuples, dicts and sets, also nested ones, with tensors in them, all else by reference. `replay` binds
fresh copies of these to the modules' names and afterwards binds what was there before: the live objects are never
written, so no version counter moves and no graph that has saved one of them is disturbed.

Versions do not tell whether a forward changed a buffer (`native_batch_norm` and ``.data`` do not count), so small
tensors are always copied, and large ones (causal masks, packed weights in buffers) are compared by value after the
forward, so that the copies of equal ones can be freed.
Parameters are not copied: one that was changed in place between forward and recompute is an error, as in autograd;
their `requires_grad` is shown as it was, since it decides what a forward saves. Tensors that someone has put in their
place for one forward (``torch.func.functional_call``) are there for the recompute, too.
Not seen: state outside the unit's modules, or in objects behind an attribute.

[Note: Random numbers of a recompute]
checkpoint() repeats what a unit draws from torch's default generators. Here the same is done for Python's and numpy's
global ones, and for generators of torch, numpy and Python among the unit's arguments and the attributes of its modules,
and in containers there; a global one's state is kept only if it has moved during the forward. The recompute starts from
that state, and afterwards the generator is where it was. As with torch's own, another thread that draws meanwhile from
a global generator moves it, too, and what it draws during the recompute is drawn once more afterwards. Not seen: a
forward that draws from a global generator and leaves it as it found it.
"""

import collections
import copy
import ctypes
import dataclasses
import io
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.streaming.unit_weights import peek_at_own
from lightning_cxl.torch_private import PYTREE_NODES


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def stale_error(what: str, version: int | None, expected: int | None) -> RuntimeError:
    """Return the error for a tensor that changed between forward and recompute; autograd has the same."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {version}, the forward saw version {expected}. Run backward before changing it, or change a clone."
    )


_SMALL_NUMEL = 1 << 14
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
_INTERNAL = (frozenset(nn.Module().__dict__) - {"training"}) | {"forward"}
_CONTAINERS = frozenset((list, tuple, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict))


class UnitModules:
    """The modules of a unit and the names of their attributes, found anew where they have changed."""

    def __init__(self, unit: nn.Module) -> None:
        self.unit = unit
        self.inert = set(_PLAIN)  # types met that are neither tensors nor containers nor generators: nothing to do
        self._rows: list[tuple[nn.Module, tuple[str, ...], tuple[nn.Module | None, ...], list[str]]] = []

    def found(self) -> list[tuple[nn.Module, list[str]]]:
        if not self._rows or any(
            tuple(module.__dict__) != all_names or tuple(module._modules.values()) != children
            for module, all_names, children, _ in self._rows
        ):
            self._rows = [
                (each, tuple(each.__dict__), tuple(each._modules.values()), [*_attributes(each)])
                for each in self.unit.modules()
            ]
        return [(module, names) for module, _, _, names in self._rows]


class ModuleState:
    """The state of a unit's modules when a forward is about to run. See [Note: Replaying module state]."""

    def __init__(self, modules: UnitModules, arguments: "Containers") -> None:
        self._modules = modules
        self._default_dtype = torch.get_default_dtype()  # Lightning's "bf16-true" sets it in a step, not in backward
        self._bound = [
            (module, dict(zip(names, map(module.__dict__.__getitem__, names), strict=True)), module._buffers.copy())
            for module, names in modules.found()
        ]
        self._copied: list[tuple[dict[str, Any], str]] = []  # where a recompute finds copies
        self.kept: dict[int, Kept] = {}  # by the id of the tensor
        values, others, num_given, kept = [], arguments.leaves.copy(), len(arguments.leaves), self.kept
        inert = modules.inert.difference(arguments.classes.values())
        for found in (each for _, *both in self._bound for each in both):
            if inert.issuperset(map(type, found.values())):
                continue
            for name, value in found.items():
                if (kind := type(value)) in inert:
                    continue
                stands_in = _keep(value, kept)
                if stands_in is value and kind not in _CONTAINERS and id(value) not in arguments.classes:
                    others.append(value)
                    if not issubclass(kind, (torch.Tensor, *_generator_kinds())):
                        modules.inert.add(kind)
                    continue
                self._copied.append((found, name))
                values.append(stands_in)
                found[name] = None  # the forward may put into it what holds this
        # together: a list that is an argument and an attribute is one list in a recompute, too
        self._containers = arguments.take_in(values, lambda value: type(value) in _CONTAINERS)
        self._leaves = [_keep(each, kept) for each in arguments.leaves[num_given:]]
        self._draws = list(map(_Draws, _generators([*others, *self._leaves])))
        self._shown = [
            (module, name, _hold(each)) for module, *_ in self._bound for name, each in peek_at_own(module).items()
        ]
        self._parameters: list[tuple[nn.Parameter, int | None, bool]] = []  # version and requires_grad in the forward

    def settle(self) -> None:
        """Free what the forward, which has returned, did not change; note which parameters it used."""
        self._draws = [each for each in self._draws if each.may_have_moved()]
        for kept in self.kept.values():
            kept.settle()
        self.kept.clear()
        modules = [each for each, _ in self._modules.found()]
        weights = [weight for each in modules for weight in peek_at_own(each).values()]
        if modules != [each for each, *_ in self._bound] or len(weights) != len(self._shown):
            raise UnsupportedError(
                f"the forward of {type(self._modules.unit).__name__} made or dropped modules or weights, which no "
                "recompute can repeat: run it once under torch.no_grad() before training, or leave it out of `units`"
            )
        used = {id(each): each for each in weights if each is not None}  # tied ones once
        self._parameters = [(_hold(each), version_of(each), each.requires_grad) for each in used.values()]

    @contextmanager
    def replay(self, leaves: Sequence[Any] = ()) -> Iterator[Any]:
        """Show the modules as the call found them; afterwards, as they are now. Returns the arguments, of `leaves`."""
        for parameter, version, _ in self._parameters:
            if version_of(parameter) != version:
                names = [name for name, other in self._modules.unit.named_parameters() if other is parameter]
                what = f"parameter `{names[0] if names else '?'}` of {type(self._modules.unit).__name__}"
                raise stale_error(what, version_of(parameter), version)
        all_leaves = [*leaves, *self._leaves]
        fresh = {id(each): each.fresh() for each in all_leaves if isinstance(each, Kept)}
        arguments, copies = put_together(self._containers, [fresh.get(id(each), each) for each in all_leaves])
        present = [(module, _attributes(module), module._buffers.copy()) for module, *_ in self._bound]
        default_dtype = torch.get_default_dtype()
        toggled = [(each, then) for each, _, then in self._parameters if each.requires_grad != then]
        exchanged = [
            (own, name, then, own[name])
            for module, name, then in self._shown
            if name in (own := peek_at_own(module)) and own[name] is not then
        ]
        try:
            for own, name, then, _ in exchanged:
                own[name] = then
            for (found, name), value in zip(self._copied, copies, strict=True):
                found[name] = value
            for module, attributes, buffers in self._bound:
                _bind(module, attributes, buffers)
            for parameter, then in toggled:
                parameter.requires_grad_(then)
            torch.set_default_dtype(self._default_dtype)
            with ExitStack() as generators:
                for draws in self._draws:
                    generators.enter_context(draws.replay())
                yield arguments
        finally:
            torch.set_default_dtype(default_dtype)
            for parameter, then in toggled:
                parameter.requires_grad_(not then)
            for own, name, _, now in exchanged:
                own[name] = now
            for module, attributes, buffers in present:
                _bind(module, attributes, buffers)
            for found, name in self._copied:
                found[name] = None


class Kept:
    """A tensor as it was at the start of a call."""

    __slots__ = ("_copy", "_version", "original")

    def __init__(self, original: torch.Tensor) -> None:
        self.original: torch.Tensor | None = original
        self._copy: torch.Tensor | None = original.detach().clone()
        self._version: int | None = None

    def settle(self) -> None:
        """Keep the original of a large tensor that is unchanged, otherwise the copy."""
        original, copied = self.original, self._copy
        assert original is not None and copied is not None
        alike = (original.shape, original.dtype, original.device) == (copied.shape, copied.dtype, copied.device)
        # a comparison waits for the device; only units with large buffers pay. NaN differs from NaN: its copy is kept
        if alike and original.numel() > _SMALL_NUMEL and (original.is_meta or torch.equal(original, copied)):
            self._version, self._copy = version_of(original), None
        else:
            self.original = None

    def fresh(self) -> torch.Tensor:
        """Return a copy of its own for one recompute (the unchanged original itself where that is kept)."""
        if self._copy is not None:
            return self._copy.clone()
        assert self.original is not None
        if version_of(self.original) != self._version:
            what = f"a buffer of shape {tuple(self.original.shape)} and {self.original.dtype}"
            raise stale_error(what, version_of(self.original), self._version)
        return self.original


class _Draws:
    """A generator and its state at the start of a call. See [Note: Random numbers of a recompute]."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._start = self._state()
        self._memory = b""
        # a normal number that waits for the next call is elsewhere, and is used up without a change of these
        if hasattr(generator, "get_bit_generator") and not pickle.loads(self._start)["has_gauss"]:
            self._memory = self._numpy_words()

    def _state(self) -> Any:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return generator.get_state()
        if hasattr(generator, "getstate"):  # `random`, and what is in it
            return generator.getstate()
        # numpy, likewise; pickled, since its arrays do not compare as a whole
        legacy = hasattr(generator, "get_state")
        return pickle.dumps(generator.get_state(legacy=False) if legacy else generator.bit_generator.state)

    def _set(self, state: Any) -> None:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif hasattr(generator, "setstate"):
            generator.setstate(state)
        elif hasattr(generator, "set_state"):
            generator.set_state(pickle.loads(state))
        else:
            generator.bit_generator.state = pickle.loads(state)

    def may_have_moved(self) -> bool:
        # others may have been used and set back; to replay a global one costs time and repeats what threads draw
        if not isinstance(self._generator, types.ModuleType):
            return True
        if self._memory and self._memory == self._numpy_words():
            return False
        return bool(self._state() != self._start)

    def _numpy_words(self) -> bytes:
        """Return the words and the position of numpy's global generator: to ask for its state takes 0.1 ms."""
        generator = self._generator.get_bit_generator()
        is_known = isinstance(generator, self._generator.MT19937)
        return ctypes.string_at(generator.ctypes.state_address, 4 * 625) if is_known else b""

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Start again from the start, and go on afterwards as if nothing had been drawn."""
        now = self._state()
        self._set(self._start)
        try:
            yield
        finally:
            self._set(now)


def _generator_kinds() -> tuple[type, ...]:
    numpy_random = sys.modules.get("numpy.random")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    return kinds if numpy_random is None else (*kinds, numpy_random.Generator, numpy_random.RandomState)


def _generators(values: Iterable[Any]) -> list[Any]:
    """Return the global generators besides torch's, and those among `values`."""
    numpy_random, kinds = sys.modules.get("numpy.random"), _generator_kinds()
    found: dict[int, Any] = {id(each): each for each in (random, numpy_random) if each is not None}
    # not `isinstance`: it asks for `__class__`, which is slow for configurations of transformers
    found |= {id(each): each for each in values if issubclass(type(each), kinds)}
    return [each for each in found.values() if not isinstance(each, random.SystemRandom)]  # which has no state


def _hold(parameter: Any) -> Any:
    """Return the parameter, or an alias of what is shown in its place: one with a graph could close a cycle."""
    return parameter if parameter is None or parameter.is_leaf else parameter.detach().requires_grad_()


def _keep(value: Any, kept: dict[int, Kept]) -> Any:
    """Return what stands for an attribute: for a tensor that can change in place, one `Kept` under all its names."""
    # one that carries gradient belongs to a graph and is replaced, not written
    if not issubclass(type(value), torch.Tensor) or isinstance(value, nn.Parameter) or value.requires_grad:
        return value
    if id(value) not in kept:
        kept[id(value)] = Kept(value)
    return kept[id(value)]


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in _INTERNAL}


def _bind(module: nn.Module, attributes: dict[str, Any], buffers: dict[str, Any]) -> None:
    for name in [name for name in module.__dict__ if name not in _INTERNAL and name not in attributes]:
        del module.__dict__[name]
    module.__dict__.update(attributes)
    module._buffers.clear()
    module._buffers.update(buffers)


# Containers and key/value caches among the arguments of a unit, kept as they were when its forward began.
#
# [Note: Containers among the arguments]
# A unit may append to a list that it is given (losses of experts, collected states) or write to a dict, and its caller
# reads them afterwards. So the forward gets the caller's own objects, and each recompute a copy of them as they were
# when the forward began. Python's pickle makes these copies: it keeps cycles, and an object that appears twice, also
# among attributes, is one object. Containers are lists, tuples, dicts, sets and deques, classes derived from them,
# dataclasses, and what pytree knows. All else is a *leaf*: the pickle has its number, a recompute what stands for it.
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

_PICKLED = (tuple, list, dict, set, collections.deque)
_read_back: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes of containers that came back from a pickle once."""
_CACHES = ("DynamicCache",)
_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


class _ContainerUnpickler(pickle.Unpickler):
    """Lets `persistent_load` be set: CPython 3.13.0 does not in its own class."""


def is_container(value: Any) -> bool:
    """Whether an argument, or what is in it, is copied for a recompute."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or is_cache(value):
        return False
    kind = type(value)
    return isinstance(value, _PICKLED) or dataclasses.is_dataclass(kind) or kind in PYTREE_NODES


class Containers(pickle.Pickler):
    """Containers as they were when they were taken in, and the leaves in them: each once, in whatever it occurs."""

    def __init__(self, unit: str) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file, pickle.HIGHEST_PROTOCOL)
        self._unit = unit
        self._num_values = 0
        self.leaves: list[Any] = []  # each once
        self._numbers: dict[int, int] = {}  # of leaves, by their ids
        self.classes: dict[int, type] = {}  # of containers, likewise

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in _PLAIN:
            return None
        if id(value) in self.classes or self._is_container(value):
            self.classes[id(value)] = type(value)
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.leaves)
            self.leaves.append(value)
        return self._numbers[id(value)]

    def take_in(self, value: Any, is_container: Callable[[Any], bool]) -> bytes:
        """Return what `put_together` takes, for this value after all before it."""
        self._is_container = is_container
        try:
            self.dump(value)
            self._num_values += 1
            # a class may be written and refuse to be read: better here than in the backward
            if unknown := set(self.classes.values()).difference(_CONTAINERS, _read_back):
                put_together(self._file.getvalue(), self.leaves, self._num_values)
                _read_back.update(unknown)
        except Exception as error:
            raise UnsupportedError(
                f"a recompute of unit `{self._unit}` needs copies of the containers among its arguments and attributes,"
                f" and one cannot be copied ({error}): pass its contents on their own, or leave it out of `units`"
            ) from error
        return self._file.getvalue()


def put_together(containers: bytes, leaves: Sequence[Any], num_values: int = 2) -> list[Any]:
    """Return what `Containers` were given, in new containers."""
    unpickler = _ContainerUnpickler(io.BytesIO(containers))
    unpickler.persistent_load = leaves.__getitem__  # type: ignore[method-assign]
    return [unpickler.load() for _ in range(num_values)]


def is_cache(value: Any) -> bool:
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def cached_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a cache of a known kind: a gradient may flow into them alone."""
    if not is_cache(value) or not grows_by_replacing(value):
        return []
    found = [getattr(layer, name, None) for layer in value.layers for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def replaced(value: Any) -> Any:
    """Return what the forward is given for an argument: for an empty cache None, for another a copy."""
    return None if is_cache(value) and value.get_seq_length() == 0 else copied(value)


def grows_by_replacing(cache: Any) -> bool:
    """Return whether a copy of a cache goes on as the cache would, without a change to it."""
    return type(cache).__name__ in _CACHES and all(type(layer).__name__ in _LAYERS for layer in cache.layers)


def copied(value: Any) -> Any:
    """Return a copy of a cache that grows by replacing its tensors, and anything else as it is."""
    if not is_cache(value) or not grows_by_replacing(value):
        return value
    twin = copy.copy(value)
    twin.layers = [copy.copy(layer) for layer in value.layers]
    return twin
