"""Weights, configuration and tokenizer as a folder that `transformers` loads."""

from pathlib import Path
from typing import Any

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_cxl.run.session import whole_state
from lightning_cxl.sharding.fsdp import is_cut
from lightning_cxl.weights.hf import save_pretrained


def export_pretrained(module: CausalLM, folder: str | Path, weights: dict[str, Any] | None = None) -> Path:
    """Write a folder for `from_pretrained` of ``AutoModelForCausalLM`` and ``AutoTokenizer``, or of ``PeftModel``.

    With `lora` it has the adapters alone. Of a model that is sharded over processes, `weights` are the whole ones.
    """
    model, given = module.model, {} if weights is None else {"state_dict": weights}
    if model is None or (weights is None and is_cut(model)):
        what = "the module has no model yet" if model is None else "each process has a part of the weights"
        raise ConfigError(f"cannot export: {what}. Add the callback ExportPretrained, or export a checkpoint")
    if module.options.lora is None and weights is None:
        save_pretrained(model, folder)
    else:  # of embeddings, peft would ask the hub
        model.save_pretrained(str(folder), **({"save_embedding_layers": False} if module.options.lora else {}), **given)
    if module.tokenizer is not None:
        module.tokenizer.save_pretrained(folder)
    return Path(folder)


class ExportPretrained(Callback):
    """Exports a `CausalLM` when training ends, to `dirpath` or ``export`` in the Trainer's log folder."""

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, CausalLM):
            kind = type(pl_module).__name__
            raise ConfigError(f"ExportPretrained exports a CausalLM, not a {kind}: remove the callback")
        model, weights = pl_module.model, None
        if model is not None and is_cut(model):  # all processes gather
            trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
            weights = whole_state(model, lambda name: pl_module.options.lora is None or name in trained)
        root = Path(trainer.log_dir or trainer.default_root_dir)  # the first process tells the others
        if trainer.is_global_zero:
            print(f"exported to {export_pretrained(pl_module, self.dirpath or root / 'export', weights)}")
