"""`loop_of`: what a Trainer of transformers, its callbacks and its subclasses do around a step."""

from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from lightning_cxl.inventory.workload import Loop

_KNOWN = ("transformers", "trl", "lightning_cxl")
"""Packages whose trainers neither read nor write gradients, but through the accelerator."""
_STEP = ("training_step", "_clip_grad_norm", "_get_grad_norm", "_run_epoch", "_inner_training_loop")
"""Methods that run with gradients at hand."""
_BETWEEN_STEPS = ("log", "_maybe_log_save_evaluate", "evaluate", "_save_checkpoint", *_STEP)


def loop_of(trainer: Trainer) -> Loop:
    """Return what is known of the loop of a Trainer as it is now.

    `compute_loss` is the user's own in most subclasses, and taken for what it is for: it reads no gradients.
    """
    uses_gradients = any(_overridden(trainer, *_STEP)) or any(
        _listening(trainer, "on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
    )
    return Loop(
        accumulates=trainer.args.gradient_accumulation_steps > 1,
        needs_whole_step="the Trainer takes the norm of all gradients before a step",
        reads_gradients=uses_gradients,
        edits_gradients=uses_gradients,
        writes_unseen=any(_overridden(trainer, *_BETWEEN_STEPS)) or any(_listening(trainer)),
    )


def _overridden(trainer: Trainer, *names: str) -> Iterator[str]:
    """Yield those methods that code outside of known packages has replaced: in a subclass, a patch, on the object."""
    for name in names:
        methods = [(cls, vars(cls)[name]) for cls in type(trainer).__mro__ if name in vars(cls)]
        if name in vars(trainer) or not all(_is_known(cls) and _is_known(method) for cls, method in methods):
            yield name


def _is_known(definition: Any) -> bool:
    return definition.__module__.partition(".")[0] in _KNOWN


def _listening(trainer: Trainer, *events: str) -> Iterator[Any]:
    """Yield the callbacks that are not transformers' own, and have a method for one of these events; without: for any.

    Those of trl count: one of them writes weights of the reference model.
    """
    for callback in trainer.callback_handler.callbacks:
        for cls in type(callback).__mro__:
            if cls.__module__.partition(".")[0] in ("transformers", "builtins"):
                continue
            if any(name in events or (not events and name.startswith("on_")) for name in vars(cls)):
                yield callback
                break
