"""Config and tokenizer of a model as texts, which a checkpoint carries so that it can be exported by itself."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


def own_files(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, str]:
    """Return the files that transformers writes beside weights, by name; not those that are no text."""
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        texts = {}
        for path in Path(folder).iterdir():
            try:
                texts[path.name] = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, IsADirectoryError):
                continue
        return texts
