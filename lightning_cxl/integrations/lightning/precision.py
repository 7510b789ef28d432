"""Loss scaling and clipping under a precision plugin, left to the optimizer's own sweep where that is safe."""

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from lightning_cxl.errors import LightningCXLWarning, UnsupportedError
from lightning_cxl.gradients.guard import HostClip, HostUnscale, OverflowGuard
from lightning_cxl.integrations.lightning.lightning_api import (
    BaseFinetuning,
    LightningOptimizer,
    Precision,
    Trainer,
    overridden,
    own_methods,
)
from lightning_cxl.inventory.workload import Loop
from lightning_cxl.torch_private import UNSCALE, step_hooks


@dataclass(frozen=True, slots=True)
class GradientUse:
    """What user code may do to gradients after they have arrived. See [Note: Measured gradients]."""

    edits: bool
    """Somebody may write them between backward and step, perhaps through ``.data``."""
    looks: bool
    """Somebody may read them before the next backward: they must be unscaled and clipped where they are."""

    def defers(self, optimizer: Optimizer) -> bool:
        """Whether unscaling and clipping may be left to the step of `optimizer`."""
        before, _ = step_hooks(optimizer)
        return not (self.looks or before)


def watch_for_edits(trainer: Trainer) -> GradientUse:
    """Find out what user code may do to gradients."""
    manual = not trainer.lightning_module.automatic_optimization
    step = ("on_before_optimizer_step", "configure_gradient_clipping")
    edits = overridden(trainer, "backward", "on_after_backward", "optimizer_step", *step)
    looks = overridden(trainer, "on_before_zero_grad", "on_train_batch_end", *step)
    # a plugin's own clipping works on what it finds
    looks |= own_methods(trainer.precision_plugin, "clip_gradients", "clip_grad_by_norm", "main_params")
    clips_values = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"  # needs unscaled ones
    return GradientUse(edits=manual or bool(edits), looks=bool(manual or looks or clips_values))


def may_write_between_steps(trainer: Trainer) -> bool:
    """Return whether user code may write to weights, perhaps through ``.data``, between a step and the next forward."""
    hooks = ("on_train_batch_end", "on_train_batch_start", "on_before_zero_grad", "optimizer_step")
    return not trainer.lightning_module.automatic_optimization or bool(overridden(trainer, *hooks))


def reads_gradients(trainer: Trainer, use: GradientUse) -> bool:
    """Return whether anyone may read gradients between micro-batches, or before the closure of a step is over."""
    plugin = trainer.precision_plugin
    early = overridden(trainer, "on_train_batch_start", "on_before_backward") or own_methods(plugin, "optimizer_step")
    return bool(use.edits or use.looks or early or getattr(plugin, "scaler", None) is not None)


def accumulates(trainer: Trainer) -> bool:
    """Return whether several micro-batches are added up before a step, at any time of the run."""
    callbacks = getattr(trainer, "callbacks", [])
    schedules = [getattr(callback, "going_to_accumulate_grad_batches", None) for callback in callbacks]
    return trainer.accumulate_grad_batches > 1 or any(schedule() for schedule in schedules if schedule is not None)


def why_not_in_backward(trainer: Trainer, use: GradientUse, on_overflow: str) -> str | None:
    """Return why updates must wait for the end of the backward; None if they need not."""
    if not trainer.lightning_module.automatic_optimization:
        return "the module optimizes manually"
    if use.edits or use.looks:
        return "a hook of the module, a callback or a plugin may look at gradients"
    if trainer.gradient_clip_val:
        return "gradient_clip_val needs the norm of all gradients first"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "the loss scaler looks at all gradients first"
    if on_overflow != "ignore":
        return f"on_overflow={on_overflow!r} may call the step off"
    return None


def check_masters_are_found(trainer: Trainer) -> None:
    """Refuse callbacks that would not find master weights, and warn where the module does not find their gradients."""
    for callback in getattr(trainer, "callbacks", []):
        if isinstance(callback, BaseFinetuning):
            raise UnsupportedError(
                f"{type(callback).__name__} looks for the optimizer's parameters in the model, and some are master "
                "weights on the host. Freeze and unfreeze in a callback of your own, with "
                "`optimizer.add_param_group({'params': [...]})` and the model's parameters, which works."
            )
    module = trainer.lightning_module
    own = own_methods(module, "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
    if own and trainer.world_size > 1:  # shards do not show them
        warnings.warn(
            f"{type(module).__name__} overrides {', '.join(sorted(own))}: gradients are on the parameters in "
            "`optimizer.param_groups`, on the host; `p.grad` of the model's own parameters is None there.",
            LightningCXLWarning,
            stacklevel=2,
        )


def loop_of(trainer: Trainer, use: GradientUse, on_overflow: str) -> Loop:
    """Return what the Trainer, its callbacks and the module do around a step."""
    return Loop(
        accumulates=accumulates(trainer),
        needs_whole_step=why_not_in_backward(trainer, use, on_overflow),
        reads_gradients=reads_gradients(trainer, use),
        edits_gradients=use.edits,
        writes_unseen=may_write_between_steps(trainer),
    )


def attach_scaling(plugin: Precision, guard: OverflowGuard, active: ExitStack, use: GradientUse) -> None:
    """Let clipping and a loss scaler work on host gradients, without a pass of their own where `use` allows it."""
    scaler: Any = getattr(plugin, "scaler", None)
    unscale = None
    if scaler is not None:
        unscale = HostUnscale(scaler, unwrap, use.defers, guard)
        setattr(scaler, UNSCALE, unscale)
        active.callback(vars(scaler).pop, UNSCALE, None)
    before = vars(plugin).copy()
    clip = HostClip(plugin.clip_grad_by_norm, unwrap, use.defers, guard, unscale)
    plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
    active.callback(_restore, plugin, "clip_grad_by_norm", before)


def unwrap(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _restore(target: object, name: str, before: dict[str, Any]) -> None:
    """Set an attribute of an object back to what it was, which may be nothing but its class's."""
    if name in before:
        setattr(target, name, before[name])
    else:
        vars(target).pop(name, None)
