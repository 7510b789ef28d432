"""`CPUAdam`: Adam and AdamW on host memory as a real torch optimizer, one pass over memory with all threads."""

import copy
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from lightning_cxl import _adam, _cpu
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.optim.layout import check_parameter, is_flat_like, is_usable, usable_gradient
from lightning_cxl.optim.reference import AdamScalars
from lightning_cxl.optim.slot import AllocateState, Slot, empty_like_parameter
from lightning_cxl.optim.state import check_moments, match_groups, parameter_name

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class CPUAdam(torch.optim.Optimizer):
    """Adam or AdamW over float32 host parameters.

    State, state dict and hyper-parameters are those of ``torch.optim.Adam``; checkpoints go both ways. Momentum and
    variance equal torch's bit for bit, the weights up to torch's rounding of ``sqrt`` (`optim/reference.py`).
    Hyper-parameters are read from the groups at every step.

    Args:
        params: as for any torch optimizer; float32 on the host.
        lr: learning rate, a number or a one-element tensor.
        betas: decay of momentum and variance, each in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the weight decay.
        decoupled: True for AdamW, False for Adam with the decay added to the gradient.
        num_threads: None for what the process may use (CPU set, cgroup quota, ``OMP_NUM_THREADS``).
        isa: None for the fastest (or ``LIGHTNING_CXL_ISA``). The result does not depend on it, nor on the threads.
        allocate_state: makes the dense float32 tensor, of the parameter's shape, for the role MOMENTUM or VARIANCE;
            its contents do not matter. Called at construction, so that a full tier shows before training, for
            every parameter that requires a gradient. None: ``torch.empty_like``.
        compute_weights: bfloat16 host tensors, shaped and laid out as their parameters, that get the new weights,
            rounded to nearest even, in the same pass. Read at every step: entries may be added later.

    Raises:
        ConfigError: a hyper-parameter out of range, a parameter that is not float32 on the host.
        UnsupportedError: amsgrad, maximize, capturable or differentiable asked for in a group.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        decoupled: bool = True,
        num_threads: int | None = None,
        isa: str | None = None,
        allocate_state: AllocateState | None = None,
        compute_weights: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.num_threads = _cpu.available_threads() if num_threads is None else num_threads
        if self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        self.isa = _cpu.best_isa() if isa is None else isa
        if self.isa not in _cpu.supported_isas():
            raise ConfigError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(_cpu.supported_isas())}")
        self.compute_weights = {} if compute_weights is None else compute_weights
        self._allocate_state = empty_like_parameter if allocate_state is None else allocate_state
        self._slots: dict[torch.Tensor, Slot] = {}
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            # torch's other options, so that its Adam can load our state dict
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": decoupled,
        }
        super().__init__(params, defaults)

    @classmethod
    def from_torch(cls, optimizer: torch.optim.Optimizer, **options: Any) -> "CPUAdam":
        """Return a CPUAdam that continues a torch Adam or AdamW.

        It takes over the very same ``param_groups`` list and ``defaults`` dict, so that learning-rate schedulers and
        callbacks that hold them keep working, the hooks, and a copy of the state. A scheduler must also be pointed
        at it (``scheduler.optimizer = new``).

        Args:
            optimizer: exactly ``torch.optim.Adam`` or ``torch.optim.AdamW``. Must not be stepped any more.
            options: `num_threads`, `isa`, `allocate_state`, `compute_weights`.

        Raises:
            UnsupportedError: another class, or an option CPUAdam does not have.
        """
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise UnsupportedError(
                f"CPUAdam can replace torch.optim.Adam and AdamW, not {type(optimizer).__qualname__}: "
                "set `cpu_adam=False` to run the optimizer as it is"
            )
        names = ("lr", "betas", "eps", "weight_decay")
        given = {name: optimizer.defaults[name] for name in names}
        decoupled = bool(optimizer.defaults.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))
        new = cls(optimizer.param_groups, **given, decoupled=decoupled, **options)
        new.param_groups = optimizer.param_groups
        new.defaults = optimizer.defaults
        for hooks in _HOOKS:
            setattr(new, hooks, getattr(optimizer, hooks))
        new._load_moments([(group, list(group["params"])) for group in new.param_groups], optimizer.state)
        return new

    def forget_allocator(self) -> None:
        """Take memory for parameters that have no state yet from torch from now on: a run's memory is closed."""
        self._allocate_state = empty_like_parameter

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group and reserve its optimizer state. A group that is refused is not added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            _check_ranges(group)
            if len(set(group["params"])) != len(group["params"]):
                raise ConfigError("a parameter is twice in the same group: it would be updated twice in each step")
            slots = {}
            for index, parameter in enumerate(group["params"]):
                check_parameter(parameter, parameter_name(group, index))
                if parameter.requires_grad:
                    slots[parameter] = Slot(parameter, self._allocate_state)
        except BaseException:
            self.param_groups.pop()
            raise
        self._slots.update(slots)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Nothing is changed if any gradient is refused.

        Args:
            closure: evaluates the loss again and returns it.

        Raises:
            UnsupportedError: a sparse gradient, or an option CPUAdam does not have.
            ConfigError: a parameter has meanwhile left the host or float32, or a hyper-parameter is out of range.
        """
        # what a learning-rate scheduler made for another optimizer looks at
        self._opt_called = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # `step` itself keeps the scheduler's mark

    def _update(self) -> None:
        work = self._collect()
        steps, values = array("Q"), array("f", bytes(4 * len(work)))
        for _, parameter, _, slot in work:
            slot.bind(parameter, self.state[parameter])
            steps.append(slot.step.data_ptr())
        _adam.advance(steps, values)

        rows: dict[tuple[int, float], int] = {}
        spans, scalars = array("Q"), array("f")
        for (group_index, parameter, grad, slot), step in zip(work, values, strict=True):
            row = rows.setdefault((group_index, step), len(rows))
            if row * _adam.SCALAR_FIELDS == len(scalars):
                scalars.extend(_scalars(self.param_groups[group_index], step))
            compute = self.compute_weights.get(parameter) if self.compute_weights else None
            spans.extend(
                (
                    parameter.data_ptr(),
                    grad.data_ptr(),
                    slot.momentum.data_ptr(),
                    slot.variance.data_ptr(),
                    0 if compute is None else compute.data_ptr(),
                    slot.numel,
                    row,
                )
            )
        _adam.update(spans, scalars, self.num_threads, self.isa)
        written = [parameter for _, parameter, _, _ in work]
        written += [self.compute_weights[parameter] for parameter in written if parameter in self.compute_weights]
        torch.autograd.graph.increment_version(written)

    def _collect(self) -> list[tuple[int, torch.Tensor, torch.Tensor, Slot]]:
        """Return group index, parameter, gradient and slot of all there is to update; refuses before any change."""
        work = []
        for group_index, group in enumerate(self.param_groups):
            _check_options(group)
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                if parameter.dtype is not torch.float32 or not parameter.is_cpu:
                    check_parameter(parameter, parameter_name(group, index))
                slot = self._slots.get(parameter)
                if slot is None:  # was frozen when its group was added
                    check_parameter(parameter, parameter_name(group, index))
                    slot = self._slots[parameter] = Slot(parameter, self._allocate_state)
                grad = parameter.grad
                if not is_usable(grad, parameter):
                    grad = usable_gradient(parameter, parameter_name(group, index))
                compute = self.compute_weights.get(parameter) if self.compute_weights else None
                if compute is not None and not (compute.dtype is torch.bfloat16 and is_flat_like(compute, parameter)):
                    raise _unfit_compute_weights(compute, parameter, parameter_name(group, index))
                work.append((group_index, parameter, grad, slot))
        return work

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of CPUAdam, ``torch.optim.Adam`` or ``torch.optim.AdamW`` into the memory held already.

        Parameters are matched by name when both sides carry names, else by order. Whether weight decay is decoupled
        stays as constructed. Everything is checked before anything is written.

        Raises:
            CheckpointError: it is for other parameters, of another shape, or not the state of an Adam.
            UnsupportedError: it was written with amsgrad, maximize, capturable or differentiable.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        if not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError(
                f"an optimizer state dict has `state` and `param_groups`, this has {', '.join(map(str, state_dict))}"
            )
        matched = match_groups(self.param_groups, state_dict["param_groups"])
        for saved, _ in matched:
            _check_options(saved)
        self._load_moments(
            [(g, ids) for g, (_, ids) in zip(self.param_groups, matched, strict=True)], state_dict["state"]
        )
        for group, (saved, _) in zip(self.param_groups, matched, strict=True):
            kept = {"params", "decoupled_weight_decay"} | ({"param_names"} & group.keys())
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key not in kept})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_moments(
        self,
        sources: list[tuple[dict[str, Any], list[Any]]],
        saved: Mapping[Any, Mapping[str, Any]],
    ) -> None:
        """Copy saved states in. `sources` has for each group the key in `saved` of each of its parameters."""
        found: list[tuple[torch.Tensor, Mapping[str, Any] | None]] = []
        for group, keys in sources:
            for index, (parameter, key) in enumerate(zip(group["params"], keys, strict=True)):
                entry = saved.get(key)
                if entry:
                    check_moments(parameter_name(group, index), parameter, entry)
                found.append((parameter, entry))
        with torch.no_grad():
            for parameter, entry in found:
                if not entry:
                    self.state.pop(parameter, None)
                    continue
                if parameter not in self._slots:
                    self._slots[parameter] = Slot(parameter, self._allocate_state)
                # binding copies the saved tensors into our memory
                state = {key: entry[key] for key in ("step", "exp_avg", "exp_avg_sq")}
                self._slots[parameter].bind(parameter, state)
                self.state[parameter] = state

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: all but the allocator, which belongs to this process."""
        own = ("num_threads", "isa", "compute_weights", "_slots")
        return {
            **super().__getstate__(),
            **{name: getattr(self, name) for name in own},
            "_allocate_state": empty_like_parameter,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, perhaps on another machine."""
        super().__setstate__(state)
        if self.isa not in _cpu.supported_isas():
            self.isa = _cpu.best_isa()


def _unfit_compute_weights(compute: torch.Tensor, parameter: torch.Tensor, name: str) -> ConfigError:
    return ConfigError(
        f"the compute weights of {name} must be bfloat16 on the host with shape {tuple(parameter.shape)} and strides "
        f"{parameter.stride()}, got {compute.dtype} on {compute.device} with shape {tuple(compute.shape)} and "
        f"strides {compute.stride()}"
    )


def _scalars(group: Mapping[str, Any], step: float) -> AdamScalars:
    return AdamScalars.at_step(
        step,
        lr=group["lr"],
        betas=group["betas"],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group["decoupled_weight_decay"],
    )


def _check_options(group: Mapping[str, Any]) -> None:
    """Refuse torch's options that the kernel does not have."""
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise UnsupportedError(
                f"CPUAdam has no `{option}`: set `{option}=False`, or `cpu_adam=False` to run torch's optimizer itself"
            )


def _check_ranges(group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that torch refuses too."""
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if (isinstance(value, torch.Tensor) and value.numel() != 1) or not float(value) >= 0.0:
            raise ConfigError(f"`{name}` must be one number, at least 0, got {value}")
    betas = group["betas"]
    if len(betas) != 2 or not all(0.0 <= float(beta) < 1.0 for beta in betas):
        raise ConfigError(f"`betas` must be two numbers in [0, 1), got {betas}")
