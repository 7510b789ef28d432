"""Config and tokenizer of a model, and config of its adapter, as texts: so a checkpoint can be exported alone."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


def own_files(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Return the files that transformers, and peft, write beside weights, by name; not those that are no text."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if (adapters := getattr(model, "peft_config", None)) is not None:
            next(iter(adapters.values())).save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        texts = {}
        for path in Path(folder).iterdir():
            try:
                texts[path.name] = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, IsADirectoryError):
                continue
        return texts
