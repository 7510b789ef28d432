"""`EvaluationSamples`: what the model writes at each evaluation, beside what held-out samples have there."""

from typing import Any

from lightning_cxl.integrations.lightning import Callback, Trainer


class EvaluationSamples(Callback):
    """Continues `count` held-out samples of `TextData` by up to `max_new_tokens` at each evaluation of a fit.

    They are printed, and logged as text to loggers that have it (TensorBoard). Training goes on as without it. A token
    takes as long as a forward of the model: with weights that stream, all units are read for each.
    """

    def __init__(self, count: int = 2, max_new_tokens: int = 64) -> None:
        self.count, self.max_new_tokens = count, max_new_tokens

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        data: Any = getattr(trainer, "datamodule", None)
        for number, (prompt, expected) in enumerate(data.held_out(self.count), 1):  # made by all, shown by one
            with trainer.precision_plugin.forward_context():
                new = pl_module.generate_tokens(prompt, max_new_tokens=self.max_new_tokens)[len(prompt) :]
            parts = (("prompt", prompt), ("model", new), ("expected", expected[: self.max_new_tokens]))
            text = "\n".join(f"{name}: {data.tokenizer.decode(ids, skip_special_tokens=True)}" for name, ids in parts)
            if not trainer.is_global_zero:
                continue
            print(f"\nstep {trainer.global_step}, held-out sample {number}\n{text}")
            for logger in trainer.loggers:
                if add_text := getattr(getattr(logger, "experiment", None), "add_text", None):
                    add_text(f"held_out_sample/{number}", text, trainer.global_step)
