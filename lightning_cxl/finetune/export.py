"""Weights, configuration and tokenizer as a folder that `transformers` loads."""

from pathlib import Path
from typing import Any

from lightning_cxl.integrations.lightning import Callback, Trainer
from lightning_cxl.run.session import whole_state
from lightning_cxl.sharding.fsdp import is_cut
from lightning_cxl.weights.hf import save_pretrained


class ExportPretrained(Callback):
    """Exports a `CausalLM` when training ends, to `dirpath` or ``export`` in the Trainer's log folder.

    The folder is for `from_pretrained` of ``AutoModelForCausalLM`` and ``AutoTokenizer``. With `lora` it has the
    adapters alone, for that of ``PeftModel``.
    """

    def __init__(self, dirpath: str | None = None) -> None:
        self.dirpath = dirpath

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        model, given, adapters = pl_module.model, {}, pl_module.options.lora is not None
        if is_cut(model):  # all processes gather
            trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
            given["state_dict"] = whole_state(model, lambda name: not adapters or name in trained)
        folder = str(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "export")
        if not trainer.is_global_zero:
            return
        if adapters or given:  # of embeddings, peft would ask the hub
            model.save_pretrained(folder, **({"save_embedding_layers": False} if adapters else {}), **given)
        else:
            save_pretrained(model, folder)
        if pl_module.tokenizer is not None:
            pl_module.tokenizer.save_pretrained(folder)
        print(f"exported to {folder}")
