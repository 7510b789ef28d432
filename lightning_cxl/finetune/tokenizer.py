"""The tokenizer: a model's own, or a byte-level BPE trained on the corpus and cached."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_cxl.cache import private_folder
from lightning_cxl.errors import ConfigError
from lightning_cxl.weights.hf import without_code

END_OF_TEXT = "<|endoftext|>"
_RECIPE = "bpe1"  # part of the cache key: change it when train_tokenizer() changes
_SMALLEST_VOCABULARY = 256 + 1  # every byte, and END_OF_TEXT


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE with at most `vocab_size` tokens (fewer when the corpus has fewer pairs to merge).

    Raises:
        ConfigError: `vocab_size` is smaller than the 256 bytes and the end-of-text token need.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        raise ConfigError(f"vocab_size {vocab_size} is too small for a byte-level BPE: at least {_SMALLEST_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def cached_tokenizer(texts: Iterable[str], vocab_size: int, corpus_key: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer trained on `texts`, from the cache when this corpus and size were trained before.

    Args:
        texts: The corpus; only read when the cache has nothing.
        vocab_size: Largest number of tokens.
        corpus_key: What identifies the corpus (`corpus_fingerprint`).
    """
    folder = private_folder("tokenizers") / f"{_RECIPE}-{corpus_key}-{vocab_size}"
    if not folder.is_dir():
        _write_whole(train_tokenizer(texts, vocab_size), folder)
    return load_tokenizer(str(folder))


def load_tokenizer(name_or_path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a hub id or a local folder.

    Raises:
        ConfigError: there is none, or it has no end-of-text token to put between documents.
    """
    try:
        tokenizer = without_code(AutoTokenizer.from_pretrained, name_or_path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot load a tokenizer from {name_or_path!r} (a local folder or a hub id): "
            f"{type(error).__name__}: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {name_or_path!r} has no end-of-text token, which separates documents")
    return tokenizer


def _write_whole(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save so that `folder` appears complete or not at all, also when two processes train at once."""
    unfinished = tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-")
    try:
        tokenizer.save_pretrained(unfinished)
        os.replace(unfinished, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first: same corpus, same tokenizer
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
