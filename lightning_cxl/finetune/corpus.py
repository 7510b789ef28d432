"""Which files are trained on, and their documents or lines as a `datasets.Dataset` cached in a folder of ours."""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from lightning_cxl.cache import private_folder
from lightning_cxl.errors import ConfigError
from lightning_cxl.finetune.conversations import LineError, form_of_file, read_text

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Not part of the library, tests, or tables rather than text."""


def stdlib_files(root: str | Path | None = None) -> list[Path]:
    """Return the readable ``.py`` files of the running interpreter's standard library, sorted.

    Args:
        root: Another folder with the same layout; None is ``sysconfig``'s ``stdlib`` path.

    Raises:
        ConfigError: the folder holds no source file (an interpreter without its sources).
    """
    root = Path(root if root is not None else sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    readable = sorted(path for path in files if _is_text(path))
    if not readable:
        raise ConfigError(
            f"no readable .py file in the standard library at `{root}`: this interpreter comes without sources. "
            "Name your own files with --data.text_files"
        )
    return readable


def user_files(patterns: str | Sequence[str]) -> list[Path]:
    """Return the files that `patterns` (paths or globs, ``**`` allowed) name, sorted, each once.

    Raises:
        ConfigError: a pattern matches no file, or a file is not UTF-8 text.
    """
    files: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = [Path(name) for name in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(name)]
        if not found:
            raise ConfigError(f"text_files: {pattern!r} matches no file (looked from `{os.getcwd()}`)")
        files.update(path.resolve() for path in found)
    if not files:
        raise ConfigError("text_files is empty: name a file, or leave it out to train on the standard library")
    unreadable = [str(path) for path in sorted(files) if not _is_text(path)]
    if unreadable:
        raise ConfigError(f"text_files: not readable as UTF-8 text: {', '.join(unreadable[:5])}. Convert or leave out")
    return sorted(files)


def form_of_files(files: Sequence[Path]) -> str:
    """Return what all `files` hold, as `form_of_file` has it.

    Raises:
        ConfigError: some hold something else than others, or no form is known.
    """
    found = {form_of_file(path): path for path in files}
    if len(found) > 1:
        examples = ", ".join(f"`{path}` ({form.replace('_', ' ')})" for form, path in sorted(found.items()))
        raise ConfigError(f"text_files: files of several kinds cannot be mixed: {examples}. Name those of one kind")
    return next(iter(found))


def load_documents(files: Sequence[Path], *, by_line: bool = False) -> Dataset:
    """Return a memory-mapped dataset with one row ``{"text": ...}`` per file; reads nothing from the network.

    Args:
        files: UTF-8 text.
        by_line: one row per line instead, without its line break.

    Raises:
        ConfigError: a file vanished or changed to something unreadable meanwhile.
    """
    try:
        return load_dataset(
            "text",
            data_files=[str(path) for path in files],
            sample_by="line" if by_line else "document",
            split="train",
            cache_dir=str(private_folder("datasets")),
        )
    except (DatasetGenerationError, FileNotFoundError) as error:
        raise ConfigError(f"cannot read the {len(files)} text files: {error.__cause__ or error}") from error


def documents_of_lines(files: Sequence[Path]) -> Dataset:
    """Return `load_documents` of files with lines ``{"text": "..."}``; empty lines are left out.

    Raises:
        ConfigError: a line is something else.
    """
    try:
        return load_documents(files, by_line=True).map(_read_texts, batched=True, desc="Reading")
    except LineError as error:
        raise error.located(files) from None


def corpus_fingerprint(documents: Dataset) -> str:
    """Return 16 hex digits that depend on the documents' text and order alone, not on paths or dates."""
    digest = hashlib.sha256()
    for batch in documents.iter(batch_size=64):
        for text in batch["text"]:
            encoded = text.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:16]


def _read_texts(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"text": [read_text(line) for line in batch["text"] if line.strip()]}


def _is_text(path: Path) -> bool:
    """Return whether the whole file decodes as UTF-8 (read in pieces)."""
    try:
        with path.open(encoding="utf-8") as file:
            while file.read(1 << 20):
                pass
    except (OSError, UnicodeDecodeError):
        return False
    return True
