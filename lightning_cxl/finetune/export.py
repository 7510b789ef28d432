"""Weights, configuration and tokenizer as a folder that `transformers` loads."""

from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.model import CausalLM
from lightning_cxl.integrations.lightning.lightning_api import Callback, LightningModule, Trainer
from lightning_cxl.sharding.fsdp import is_cut
from lightning_cxl.weights.hf import save_pretrained


def export_pretrained(module: CausalLM, folder: str | Path) -> Path:
    """Write `folder` for ``AutoModelForCausalLM.from_pretrained`` (safetensors) and ``AutoTokenizer``.

    Of a module that trains adapters (`lora`) these alone are written, for ``PeftModel.from_pretrained``.

    Raises:
        ConfigError: the module has no model yet.
        CheckpointError: the file system refused.
    """
    if module.model is None:
        raise ConfigError("nothing to export: the module has no model yet (call configure_model, or load a checkpoint)")
    folder = Path(folder)
    if module.lora is None:
        save_pretrained(module.model, folder)
    else:
        module.model.save_pretrained(str(folder), save_embedding_layers=False)  # else it asks the hub about them
    if module.tokenizer is not None:
        module.tokenizer.save_pretrained(folder)
    return folder


class ExportPretrained(Callback):
    """Exports a `CausalLM` when training ends."""

    def __init__(self, dirpath: str | None = None) -> None:
        """Choose the folder.

        Args:
            dirpath: None: ``export`` in the Trainer's log folder.
        """
        self.dirpath = dirpath

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Export; only the first process writes. Of a model that is cut over several, say how to export a checkpoint.

        Raises:
            ConfigError: the module is not a `CausalLM`.
        """
        if not isinstance(pl_module, CausalLM):
            raise ConfigError(
                f"ExportPretrained exports a CausalLM, not a {type(pl_module).__name__}: remove the callback"
            )
        if not trainer.is_global_zero:
            return
        if is_cut(pl_module):
            print(
                f"not exported: each of the {trainer.world_size} processes has a part of the weights. Export a "
                "checkpoint of this run: python -m lightning_cxl export CHECKPOINT FOLDER"
            )
        else:
            root = Path(trainer.log_dir or trainer.default_root_dir)
            folder = export_pretrained(pl_module, self.dirpath or root / "export")
            print(f"exported to {folder}")
