"""Turn the user's optimizers into host optimizers: same groups, same schedulers, same hyper-parameters.

[Note: Adoption]
Every parameter in a group is replaced by its master (the same object where compute is master). ``torch.optim.Adam`` and
``AdamW`` themselves (not subclasses: those may do anything) become a `CPUAdam` of the same name (`adopted.py`), which
shares the same group dicts; the schedulers that pointed at the old object are pointed at the new one. Any other
optimizer keeps its object and gets a `HostStep`. Parameters added later are adopted the same way: by `add_param_group`
at once, and what someone puts into a group, or into new groups (``optimizer.param_groups = ...``), at the next batch or
before a checkpoint is written or read (`adopt_joined`). `Adoption.release` undoes what was put on optimizer objects.
"""

import logging
from collections import ChainMap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_cxl.gradients.meter import GradientMeter
from lightning_cxl.gradients.overflow import OverflowGuard
from lightning_cxl.gradients.sink import GradientSink
from lightning_cxl.optim.awaited_params import AwaitedParams, plain
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.forms import Forms
from lightning_cxl.optim.masters import HostParameter, MasterWeights
from lightning_cxl.optim.moment import AllocateState
from lightning_cxl.optim.number_formats import MasterForm, StatePrecision
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.updates.adopted import class_in_place_of
from lightning_cxl.updates.host_step import (
    AllocationScope,
    HostStep,
    Overlap,
    evaluates_closure_first,
    has_step_hooks,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdoptionOptions:
    """How optimizers are adopted."""

    use_cpu_adam: bool
    """Replace torch's Adam and AdamW by `CPUAdam`."""
    num_threads: int | None
    """For `CPUAdam`; None uses the cores this process may use."""
    state: StatePrecision
    """How `CPUAdam` keeps momentum and variance."""
    master: MasterForm
    """How it keeps master weights beside bfloat16 ones."""
    is_sensitive: Callable[[torch.Tensor], bool]
    """Whether the state of a compute parameter stays float32 when it is 8 bit otherwise."""
    allocate_state: AllocateState
    """Gives host memory for the state of a compute parameter."""
    scope: AllocationScope
    """Places the state that a torch optimizer creates by itself."""
    adopted: Callable[[list[HostParameter]], None]
    """Called with the parameters of each adopted optimizer, and of groups added to it later."""
    place_state: Callable[[Optimizer], None]
    """Moves state of an optimizer that lies in ordinary memory."""
    guard: OverflowGuard
    """Asked before every update."""
    meter: GradientMeter
    """Knows the gradients of this run."""
    may_write: Callable[[], None] = lambda: None
    """Returns when no copy reads weights that a step writes."""
    overlap: Overlap | None = None
    """Makes the steps of `CPUAdam`, where that is not the optimizer itself."""


class Adoption:
    """Adopts the optimizers of one run.

    Args:
        masters: finds or makes master weights.
        grads: receives the gradients of adopted parameters.
        options: see there.
    """

    def __init__(self, masters: MasterWeights, grads: GradientSink, options: AdoptionOptions) -> None:
        self._masters = masters
        self._grads = grads
        self._options = options
        # the user's object, the one in use, and the `step` that the user's had of its own: a scheduler's wrapper
        self._adopted: list[tuple[Optimizer, Optimizer, Any]] = []
        self.forms = Forms(options.use_cpu_adam, options.state, options.master, options.is_sensitive)

    def adopt(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that takes the place of `optimizer` (itself unless it is torch's Adam or AdamW).

        On failure `release` undoes what has been done so far.
        """
        self._adopted.append((optimizer, optimizer, None))
        self._take_in(optimizer, optimizer.param_groups)
        current = optimizer
        if self.forms.becomes_cpu_adam(optimizer):
            current = self._make_cpu_adam(optimizer)
            current.meter = self._options.meter
            if self._options.overlap is not None:
                current.wait = self._options.overlap.wait
        else:
            self._options.place_state(optimizer)  # some, such as Adagrad, make theirs when they are constructed
        self._await(current)
        self._adopted[-1] = (optimizer, current, vars(optimizer).get("step"))
        current.step = HostStep(current, _Hooks(self._masters, self._grads, self._options))  # type: ignore[method-assign]
        adopt_group = partial(self._adopt_group, current)
        current.add_param_group = _AddParamGroup(current, adopt_group)  # type: ignore[method-assign]
        if current is not optimizer:
            optimizer.step = current.step  # type: ignore[method-assign]  # a reference the user kept steps the same one
        return current

    def adopt_joined(self) -> None:
        """Adopt parameters of the model that have come into groups by another way than `add_param_group`."""
        for _, optimizer, _ in self._adopted:
            joined = [group for group in optimizer.param_groups if not self._knows(plain(group["params"]))]
            if joined:
                self._take_in(optimizer, joined)
            self._await(optimizer)

    def _await(self, optimizer: Optimizer) -> None:
        """Let whoever reads the parameters of a group find new weights and complete gradients."""
        if not evaluates_closure_first(optimizer):
            return  # LBFGS has a reference of its own to the list
        for group in optimizer.param_groups:
            if not isinstance(group["params"], AwaitedParams):
                group["params"] = AwaitedParams(group["params"], partial(self._settle, optimizer))

    def _settle(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, CPUAdam):
            optimizer.wait()
        self._grads.look()

    def _knows(self, parameters: list[torch.Tensor]) -> bool:
        hosts = map(self._masters.find, parameters)
        return all(host is not None and host.master is p for host, p in zip(hosts, parameters, strict=True))

    def _take_in(self, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
        """Put masters in the place of the model's parameters, and receive their gradients."""
        hosts: list[HostParameter] = []
        for group in groups:
            own = [self._masters.adopt(p, self.forms.form_for(optimizer, p)) for p in group["params"]]
            group["params"][:] = [host.master for host in own]  # in place: LBFGS has a reference of its own
            hosts += own
        for host in hosts:
            _rekey(optimizer, host.compute, host.master)
        self._options.adopted(hosts)
        self._grads.watch(hosts)

    def release(self) -> None:
        """Give the user's optimizers back as they were, on the model's own parameters, with the state they have now."""
        while self._adopted:
            original, current, own_step = self._adopted.pop()
            step = vars(current).get("step")
            if isinstance(step, HostStep):
                step.remove()
            current.__dict__.pop("add_param_group", None)
            for group in current.param_groups:
                own = [self._give_back(current, p) for p in group["params"]]
                if isinstance(group["params"], AwaitedParams):
                    group["params"] = own
                else:
                    group["params"][:] = own
            if isinstance(current, CPUAdam):
                current.leave_run()
            if original is not current:
                vars(original).pop("step", None)
                if own_step is not None:
                    original.step = own_step  # type: ignore[method-assign]
                original.state, original.param_groups = current.state, current.param_groups

    def _give_back(self, optimizer: Optimizer, parameter: Parameter) -> Parameter:
        host = self._masters.find(parameter)
        if host is None:
            return parameter
        _rekey(optimizer, host.master, host.compute)
        return host.compute

    def _adopt_group(self, optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
        entries: list[Any] = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        parameters = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        hosts = [self._masters.adopt(p, self.forms.form_for(optimizer, p)) for p in parameters]
        self._options.adopted(hosts)
        self._grads.watch(hosts)
        masters = [
            (entry[0], host.master) if isinstance(entry, tuple) else host.master  # (name, parameter) pairs stay pairs
            for entry, host in zip(entries, hosts, strict=True)
        ]
        return {**group, "params": masters}

    def _make_cpu_adam(self, optimizer: Optimizer) -> CPUAdam:
        options: dict[str, Any] = {
            "num_threads": self._options.num_threads,
            "compute_weights": self._masters.kernel_weights,
            "state": self._options.state,
            "fp32_state": _Sensitive(self._masters, partial(self.forms.is_sensitive, optimizer)),
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
        return self._options.allocate_state(self._masters.compute_of(master), role, dtype, numel)


class _Sensitive:
    """The masters whose state stays float32, as a collection."""

    def __init__(self, masters: MasterWeights, is_sensitive: Callable[[torch.Tensor], bool]) -> None:
        self._masters = masters
        self._is_sensitive = is_sensitive

    def __contains__(self, master: object) -> bool:
        return isinstance(master, torch.Tensor) and self._is_sensitive(self._masters.compute_of(master))

    def __reduce__(self) -> tuple[type[dict[torch.Tensor, None]], tuple[dict[torch.Tensor, None]]]:
        # a copied optimizer has most of its state already, and makes that of parameters that were frozen so far
        return dict, ({host.master: None for host in self._masters if self._is_sensitive(host.compute)},)


class _Hooks:
    """What happens around the update of one optimizer; see `StepHooks`."""

    def __init__(self, masters: MasterWeights, grads: GradientSink, options: AdoptionOptions) -> None:
        self._masters = masters
        self._grads = grads
        self._options = options

    def scope(self) -> AbstractContextManager[Any]:
        return self._options.scope()

    def before_closure(self, optimizer: Optimizer) -> None:
        self._grads.begin_step()
        overlap = self._options.overlap
        if overlap is not None and isinstance(optimizer, CPUAdam):
            overlap.begin(optimizer)
        elif overlap is not None:
            overlap.give_up()
            overlap.wait()  # it may read and write anything, at any time

    def closure_failed(self) -> None:
        if self._options.overlap is not None:
            self._options.overlap.give_up()

    def update(self, optimizer: Optimizer, step: Callable[[], Any]) -> None:
        if self._options.overlap is None:
            step()
        elif not isinstance(optimizer, CPUAdam) or has_step_hooks(optimizer):
            self._options.overlap.wait()
            step()
        else:
            self._options.overlap.update(optimizer)

    def before_update(self) -> None:
        self._grads.end_step()
        self._options.may_write()
        self._masters.wait()
        self._masters.absorb_changes()

    def accepts(self, optimizer: Optimizer, parameters: list[torch.Tensor], *, can_skip: bool) -> bool:
        return self._options.guard.accepts(optimizer, parameters, can_skip=can_skip)

    def after_update(self, optimizer: Optimizer, updated: list[torch.Tensor]) -> None:
        self._masters.write_back(updated, kernel_wrote=isinstance(optimizer, CPUAdam))
        if self._options.overlap is None or not isinstance(optimizer, CPUAdam):
            self._masters.wait()  # else whoever gets at the masters waits
        if not evaluates_closure_first(optimizer):
            self._options.place_state(optimizer)


def _rekey(optimizer: Optimizer, old: Parameter, new: Parameter) -> None:
    """State of an optimizer is keyed by parameter: move it along."""
    if old is not new and old in optimizer.state:
        optimizer.state[new] = optimizer.state.pop(old)


def describe_optimizer(optimizer: Optimizer) -> str:
    """Return one line for the report."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    own = type(optimizer).__name__
    rest = f"on the host, {len(optimizer.param_groups)} groups, {count} parameters"
    if not isinstance(optimizer, CPUAdam):
        return f"{own} {rest}"
    name = own if type(optimizer) is CPUAdam else f"{own} by CPUAdam"
    return f"{name} {rest}, {optimizer.state_precision} state, {optimizer.isa}, {optimizer.num_threads} threads"


class _AddParamGroup:
    """`add_param_group` of an adopted optimizer: adopts the new parameters first."""

    def __init__(self, optimizer: Optimizer, adopt_group: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._optimizer = optimizer
        self._adopt_group = adopt_group

    def __call__(self, param_group: dict[str, Any]) -> None:
        type(self._optimizer).add_param_group(self._optimizer, self._adopt_group(param_group))


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
