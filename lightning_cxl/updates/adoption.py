"""`Adoption`: turns the user's optimizers into host optimizers: same groups, same schedulers, same hyper-parameters.

[Note: Adoption]
Every parameter in a group is replaced by its master (the same object where compute is master). ``torch.optim.Adam`` and
``AdamW`` themselves (not subclasses: those may do anything) become a `CPUAdam` of the same name (`torch_names.py`). It
shares the same group dicts; the schedulers that pointed at the old object are pointed at the new one. Any other
optimizer keeps its object. The ``step`` of each becomes a `HostStep` ([Note: A step]). Parameters added later are
adopted the same way: by `add_param_group` at once, and what someone puts into a group, or into new groups
(``optimizer.param_groups = ...``), at the next batch or before a checkpoint is written or read (`adopt_joined`).
`Adoption.release` undoes what was put on optimizer objects.
"""

from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_cxl.gradients.guard import OverflowGuard
from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.gradients.offload import GradientOffload
from lightning_cxl.optim.cpu_adam import CPUAdam, Precisions
from lightning_cxl.optim.masters import MasterWeights, WeightPair
from lightning_cxl.optim.parameter_state import AwaitedParams, plain
from lightning_cxl.optim.swapped_state import StateSwapper
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.updates.step import HostStep, StateMemory, WholeUpdates, evaluates_first

# ----------------------------------------------------------------------------------------------------
# `follow_overrides`: settings of single parameters, which optimizers of bitsandbytes keep by identity.


def follow_overrides(optimizer: Optimizer, pairs: Iterable[WeightPair]) -> None:
    """Let settings of compute weights hold for their masters, such as the Trainer's: embeddings have 32-bit state.

    Args:
        optimizer: any; those of bitsandbytes share one manager of settings in a process.
    """
    manager = getattr(optimizer, "mng", None)
    settings = getattr(manager, "pid2config", None)
    if manager is None or settings is None:
        return
    of_modules = {id(getattr(module, name)): found for module, name, found in manager.module_weight_config_triple}
    for pair in pairs:
        found = of_modules.get(id(pair.compute), settings.get(id(pair.compute)))
        if found is not None:
            settings[id(pair.master)] = found


# ----------------------------------------------------------------------------------------------------
# `CPUAdam` under the names of torch's classes, for whoever asks an adopted optimizer who it is.
#
# Learning-rate monitors, loggers and profilers name values after the optimizer's class, and user code asks with
# ``isinstance``. So what takes the place of a user's AdamW is called AdamW, and is both a `CPUAdam` and torch's AdamW.


class Adam(CPUAdam, torch.optim.Adam):
    """`CPUAdam` in the place of a ``torch.optim.Adam``."""

    adds_nothing = True


class AdamW(CPUAdam, torch.optim.AdamW):
    """`CPUAdam` in the place of a ``torch.optim.AdamW``."""

    adds_nothing = True


def class_in_place_of(optimizer: Optimizer) -> type[CPUAdam]:
    """Return the class of the `CPUAdam` that takes the place of torch's Adam or AdamW, or of another `CPUAdam`."""
    if isinstance(optimizer, torch.optim.AdamW):
        return AdamW
    return Adam if isinstance(optimizer, torch.optim.Adam) else CPUAdam


class Adoption:
    """Adopts the optimizers of one run.

    Args:
        precisions: which optimizers become `CPUAdam`, and in which precision their masters and state are kept.
        meter: knows the sums of squares of this run's gradients; its number of threads is that of `CPUAdam`, too.
    """

    def __init__(
        self,
        precisions: Precisions,
        masters: MasterWeights,
        grads: GradientOffload,
        guard: OverflowGuard,
        updates: WholeUpdates,
        memory: StateMemory,
        meter: GradientMeter,
        swapper: StateSwapper | None,
    ) -> None:
        self._precisions = precisions
        self._masters = masters
        self._grads = grads
        self._guard = guard
        self._updates = updates
        self._memory = memory
        self._meter = meter
        self._swapper = swapper
        # the user's object, the one in use, and what gives their methods back
        self._adopted: list[tuple[Optimizer, Optimizer, ExitStack]] = []

    def adopt(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that takes the place of `optimizer` (itself unless it is torch's Adam or AdamW).

        On failure `release` undoes what has been done so far.
        """
        undo = ExitStack()
        self._adopted.append((optimizer, optimizer, undo))
        self._take_in(optimizer, optimizer.param_groups)
        current = optimizer
        if self._precisions.becomes_cpu_adam(optimizer):
            current = self._make_cpu_adam(optimizer)
            current.enter_run(self._meter.sums_of, self._updates.wait)
        else:
            self.rehome_state(optimizer)  # some, such as Adagrad, make theirs when they are constructed
        self._await(current)
        self._adopted[-1] = (optimizer, current, undo)

        def add_param_group(param_group: dict[str, Any]) -> None:
            type(current).add_param_group(current, self._adopt_group(current, param_group))

        step = HostStep(current, self._grads, self._guard, self._updates, self._masters, self._memory)
        _replace(undo, current, "step", step)
        _replace(undo, current, "add_param_group", add_param_group)
        for name in ("train", "eval"):
            if callable(getattr(current, name, None)):
                _replace(undo, current, name, self._showing_new_values(current, getattr(current, name)))
        if current is not optimizer:  # a reference the user kept steps the same one
            own_step = vars(optimizer).get("step")  # a scheduler's wrapper
            optimizer.step = step  # type: ignore[method-assign]
            undo.callback(_set_or_delete, optimizer, "step", own_step)
        return current

    def _showing_new_values(self, optimizer: Optimizer, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `train` or `eval` of an optimizer without a schedule, which swaps all values: the model gets them."""

        def call(*args: Any, **kwargs: Any) -> Any:
            parameters = [p for group in optimizer.param_groups for p in plain(group["params"])]
            versions = [p._version for p in parameters]
            self._updates.prepare()
            result = method(*args, **kwargs)
            written = [p for p, version in zip(parameters, versions, strict=True) if p._version != version]
            if written:
                self._updates.write_back(optimizer, written)
            return result

        return call

    def rehome_state(self, optimizer: Optimizer) -> None:
        """Move optimizer state in ordinary memory (loaded, or made too early) to where the policy wants it."""
        self._memory.rehome(optimizer, self._masters.compute_of)

    def adopt_joined(self) -> None:
        """Adopt parameters of the model that have come into groups by another way than `add_param_group`."""
        for _, optimizer, _ in self._adopted:
            joined = [group for group in optimizer.param_groups if not self._knows(plain(group["params"]))]
            if joined:
                self._take_in(optimizer, joined)
            self._await(optimizer)

    def _await(self, optimizer: Optimizer) -> None:
        """Let whoever reads the parameters of a group find new weights and complete gradients."""
        if isinstance(optimizer, LBFGS) or not evaluates_first(optimizer):
            return  # it has, or may have, a reference of its own to the list
        for group in optimizer.param_groups:
            if not isinstance(group["params"], AwaitedParams):
                group["params"] = AwaitedParams(group["params"], self._settle, self._grads.complete_for_access)

    def _settle(self) -> None:
        self._updates.wait()
        self._grads.complete_for_access()

    def _knows(self, parameters: list[torch.Tensor]) -> bool:
        pairs = map(self._masters.find, parameters)
        return all(pair is not None and pair.master is p for pair, p in zip(pairs, parameters, strict=True))

    def _take_in(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Put masters in the place of the model's parameters, and receive their gradients."""
        pairs: list[WeightPair] = []
        for group in groups:
            own = self._pairs_of(optimizer, group["params"])
            group["params"][:] = [pair.master for pair in own]  # in place: LBFGS has a reference of its own
            pairs += own
        for pair in pairs:
            _rekey(optimizer, pair.compute, pair.master)
        follow_overrides(optimizer, pairs)
        self._grads.watch(pairs)

    def _pairs_of(self, optimizer: Optimizer, parameters: Iterable[Parameter]) -> list[WeightPair]:
        return [self._masters.adopt(p, self._precisions.form_for(optimizer, p)) for p in parameters]

    def release(self) -> None:
        """Give the user's optimizers back as they were, on the model's own parameters, with the state they have now."""
        adopted, self._adopted = self._adopted, []
        with ExitStack() as rest:
            for each in adopted:
                rest.callback(self._release, *each)

    def _release(self, original: Optimizer, current: Optimizer, undo: ExitStack) -> None:
        try:
            if isinstance(current, CPUAdam):
                current.leave_run()  # first: who looks at state of a run waits for writes, which may fail again
        finally:
            undo.close()
            for group in current.param_groups:
                own = [self._give_back(current, p) for p in group["params"]]
                if isinstance(group["params"], AwaitedParams):
                    group["params"] = own
                else:
                    group["params"][:] = own
            if original is not current:
                original.state, original.param_groups = _state_of(current), current.param_groups

    def _give_back(self, optimizer: Optimizer, parameter: Parameter) -> Parameter:
        pair = self._masters.find(parameter)
        if pair is None:
            return parameter
        _rekey(optimizer, pair.master, pair.compute)
        return pair.compute

    def _adopt_group(self, optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        entries: list[Any] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        pairs = self._pairs_of(optimizer, parameters)
        follow_overrides(optimizer, pairs)
        self._grads.watch(pairs)
        masters = [
            (entry[0], pair.master) if isinstance(entry, tuple) else pair.master  # (name, parameter) stays a tuple
            for entry, pair in zip(entries, pairs, strict=True)
        ]
        return {**group, "params": masters}

    def _make_cpu_adam(self, optimizer: Optimizer) -> CPUAdam:
        options: dict[str, Any] = {
            "num_threads": self._meter.num_threads,
            "swapper": self._swapper,
            "compute_weights": self._masters.kernel_weights,
            "state": self._precisions.state,
            "fp32_state": _Sensitive(self._masters, partial(self._precisions.is_sensitive, optimizer)),
        }
        if isinstance(optimizer, CPUAdam):  # the user's own: what it was constructed with holds
            options |= {
                "num_threads": optimizer.num_threads,
                "isa": optimizer.isa,
                "state": optimizer.state_precision,
                "seed": optimizer.seed,
                "compute_weights": ChainMap[Any, Any](
                    self._masters.kernel_weights, cast(Any, optimizer.compute_weights)
                ),
            }
        return class_in_place_of(optimizer).from_torch(optimizer, allocate_state=self._allocate_state, **options)

    def _allocate_state(self, master: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._memory.flat(self._masters.compute_of(master), role, dtype, numel)


class _Sensitive:
    """The masters whose state stays float32, as a collection."""

    def __init__(self, masters: MasterWeights, is_sensitive: Callable[[torch.Tensor], bool]) -> None:
        self._masters = masters
        self._is_sensitive = is_sensitive

    def __contains__(self, master: object) -> bool:
        return isinstance(master, torch.Tensor) and self._is_sensitive(self._masters.compute_of(master))

    def __reduce__(self) -> tuple[type[dict[torch.Tensor, None]], tuple[dict[torch.Tensor, None]]]:
        # a copied optimizer has most of its state already, and makes that of parameters that were frozen so far
        return dict, ({pair.master: None for pair in self._masters if self._is_sensitive(pair.compute)},)


def _replace(undo: ExitStack, target: object, name: str, method: Callable[..., Any]) -> None:
    """Put a method on an object, until `undo`, unless someone has put another one there meanwhile."""
    before = vars(target).get(name)
    setattr(target, name, method)

    def restore() -> None:
        if vars(target).get(name) is method:
            _set_or_delete(target, name, before)

    undo.callback(restore)


def _set_or_delete(target: object, name: str, value: Any) -> None:
    if value is None:
        vars(target).pop(name, None)
    else:
        setattr(target, name, value)


def _rekey(optimizer: Optimizer, old: Parameter, new: Parameter) -> None:
    """State of an optimizer is keyed by parameter: move it along."""
    state = _state_of(optimizer)
    if old is not new and old in state:
        state[new] = state.pop(old)


def _state_of(optimizer: Optimizer) -> defaultdict[torch.Tensor, Any]:
    """Return the state of an optimizer, which no update changes now; empty where it was lost with a drive."""
    if not isinstance(optimizer, CPUAdam):
        return optimizer.state
    optimizer.wait()
    return optimizer.plain_state


def describe_optimizer(optimizer: Optimizer) -> str:
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    own = type(optimizer).__name__
    rest = f"on the host, {len(optimizer.param_groups)} groups, {count} parameters"
    if not isinstance(optimizer, CPUAdam):
        return f"{own} {rest}"
    name = own if type(optimizer) is CPUAdam else f"{own} by CPUAdam"
    return f"{name} {rest}, {optimizer.state_precision} state, {optimizer.isa}, {optimizer.num_threads} threads"


def repoint_scheduler(scheduler: object, old: Optimizer, new: Optimizer) -> None:
    """Make a scheduler, and the schedulers it contains, drive `new` instead of `old`."""
    for name, value in list(vars(scheduler).items()):
        if value is old:
            setattr(scheduler, name, new)
        elif isinstance(value, (LRScheduler, ReduceLROnPlateau)):
            repoint_scheduler(value, old, new)
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, (LRScheduler, ReduceLROnPlateau)):
                    repoint_scheduler(item, old, new)
