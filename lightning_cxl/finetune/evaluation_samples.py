"""`EvaluationSamples`: what the model writes at each evaluation, beside what held-out samples have there."""

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.data import HeldOut, TextData
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning.lightning_api import Callback, LightningModule, Trainer


class EvaluationSamples(Callback):
    """Continues held-out samples of `TextData` with a `CausalLM` at each evaluation of a fit.

    They are printed, and logged as text to loggers that have it (TensorBoard). Training goes on as without it. A token
    takes as long as a forward of the model: with weights that stream, each is a whole visit of all units.
    """

    def __init__(self, count: int = 2, max_new_tokens: int = 64) -> None:
        """Choose how much is shown.

        Args:
            count: Held-out samples, always the same.
            max_new_tokens: Longest continuation of each.

        Raises:
            ConfigError: a number below 1.
        """
        if min(count, max_new_tokens) < 1:
            raise ConfigError(f"need count and max_new_tokens of at least 1; got {count} and {max_new_tokens}")
        self.count = count
        self.max_new_tokens = max_new_tokens

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Generate and show.

        Raises:
            ConfigError: module or data are not those of the main job.
        """
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        data = getattr(trainer, "datamodule", None)
        if not isinstance(pl_module, CausalLM) or not isinstance(data, TextData):
            raise ConfigError(
                f"EvaluationSamples is for a CausalLM with TextData, not a {type(pl_module).__name__} with "
                f"{type(data).__name__}: remove the callback"
            )
        with trainer.precision_plugin.forward_context():
            texts = [self._continued(pl_module, sample) for sample in data.held_out(self.count)]
        for number, text in enumerate(texts if trainer.is_global_zero else [], 1):  # made by all, shown by one
            print(f"\nstep {trainer.global_step}, held-out sample {number}\n{text}")
            for logger in trainer.loggers:
                add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
                if add_text is not None:
                    add_text(f"held_out_sample/{number}", text, trainer.global_step)

    def _continued(self, module: CausalLM, sample: HeldOut) -> str:
        assert module.tokenizer is not None  # TextData has one
        tokens = module.generate_tokens(sample.prompt, max_new_tokens=self.max_new_tokens)
        parts = {
            "prompt": sample.prompt,
            "model": tokens[len(sample.prompt) :],
            "expected": sample.expected[: self.max_new_tokens],
        }
        return "\n".join(
            f"{name}: {module.tokenizer.decode(ids, skip_special_tokens=True)}" for name, ids in parts.items()
        )
