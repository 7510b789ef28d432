"""Loss scaling and clipping under a precision plugin, left to the optimizer's own sweep where that is safe."""

from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from lightning_cxl._lightning import LightningOptimizer, Precision, Trainer, overridden
from lightning_cxl.optim.clip import HostClip
from lightning_cxl.optim.host_unscale import HostUnscale
from lightning_cxl.runtime import OffloadRuntime


def watch_for_edits(trainer: Trainer, runtime: OffloadRuntime) -> bool:
    """Find out what user code may do to gradients between backward and step. See [Note: Measured gradients].

    Returns:
        Whether unscaling and clipping may be left to the step: nobody looks at ``.grad`` in between, or edits it.
    """
    automatic = trainer.lightning_module.automatic_optimization
    step = ("on_before_optimizer_step", "configure_gradient_clipping")
    edits = overridden(trainer, "backward", "on_after_backward", "optimizer_step", *step)
    runtime.meter.trusts_versions = automatic and not edits
    looks = overridden(trainer, "on_before_zero_grad", *step)
    clips_values = trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value"  # needs unscaled ones
    return bool(automatic and not looks and not clips_values)


def attach_scaling(plugin: Precision, runtime: OffloadRuntime, active: ExitStack, *, defer: bool) -> None:
    """Let clipping and a loss scaler work on host gradients, without a pass of their own where `defer`.

    Args:
        plugin: of the Trainer.
        runtime: of this run.
        active: undoes it when it closes.
        defer: what `watch_for_edits` returned.
    """
    scaler: Any = getattr(plugin, "scaler", None)
    if scaler is not None:
        scaler._unscale_grads_ = HostUnscale(scaler, runtime.guard, defer=defer)
        active.callback(scaler.__dict__.pop, "_unscale_grads_", None)
    if defer:
        clip = HostClip(plugin.clip_grad_by_norm, unwrap, runtime.meter)
        plugin.clip_grad_by_norm = clip  # type: ignore[method-assign]
        active.callback(plugin.__dict__.pop, "clip_grad_by_norm", None)


def unwrap(optimizer: Any) -> Optimizer:
    """Return the torch optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
