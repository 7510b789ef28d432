"""`loop_of`: what a Trainer of transformers, its callbacks and its subclasses do around a step."""

from collections.abc import Iterator
from typing import Any

from transformers import Trainer

from lightning_cxl.inventory.loop import Loop

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
    """Yield those methods that a class outside of known packages, or the user on the object, has replaced."""
    owners = [cls for cls in type(trainer).__mro__ if cls.__module__.partition(".")[0] not in _KNOWN]
    for name in names:
        if name in vars(trainer) or any(name in vars(cls) for cls in owners):
            yield name


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
