"""Checkpoints by their layout: where each front end keeps weights, config, tokenizer and adapter.

| front end | what is there |
|---|---|
| Lightning | a file with ``state_dict`` |
| Lightning, several processes | a folder with ``meta.pt`` and ``.metadata`` |
| Fabric | a file with a state dict, or with one beside other entries |
| Accelerate (`save_state`) | a folder with ``model.safetensors`` or ``pytorch_model.bin``, without config |
| Accelerate, several processes | a folder with a folder ``sharded_model_N`` for each model |
| Hugging Face Trainer, transformers | a folder with ``config.json`` and weights |
| peft, and the Trainer with it | a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` |
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_cxl.commands.export.folder_tensors import masters_of, weights_in
from lightning_cxl.commands.export.masters import masters_in, with_masters
from lightning_cxl.commands.export.stored import StoredTensor
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning
from lightning_cxl.run.checkpoint_file import load_file
from lightning_cxl.run.sharded_checkpoint import is_sharded_checkpoint
from lightning_cxl.run.sharded_reading import ShardedCheckpoint
from lightning_cxl.weights.files import INDEX_FILE, SINGLE_FILE, WeightSource, open_weights, tensors_of

FILES_KEY = "transformers_files"
"""Entry of a Lightning checkpoint of the main job: texts of config and tokenizer by file name."""
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SHARDED = "sharded_model_"
_PICKLES = "pytorch_model*.bin"
_OPTIMIZERS = ("optimizer*.bin", "optimizer.pt")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json"),
)
MODEL_FILES = (CONFIG, "generation_config.json")


class Checkpoint(NamedTuple):
    """What a checkpoint holds for an export. Tensors are on the disk, and can be read while it is open."""

    path: Path
    tensors: list[WeightSource]
    files: Mapping[str, bytes]
    """Config and tokenizer, by file name."""
    adapter: Path | None = None
    """The folder, where it is one of peft."""
    num_masters: int = 0
    """Of the tensors, those that are float32 master weights."""


@contextmanager
def open_checkpoint(path: Path, *, masters: bool = False) -> Iterator[Checkpoint]:
    with _opened(path) as (found, masters_from):
        if not masters:
            yield found
            return
        tensors, count = with_masters(found.tensors, masters_from())
        yield found._replace(tensors=tensors, num_masters=count)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Checkpoint, Callable[[], Mapping[str, WeightSource]]]]:
    """Open a checkpoint; yields it, and what finds its master weights."""
    if not path.exists():
        raise ConfigError(f"there is no checkpoint `{path}`")
    if not path.is_dir():
        loaded = _load(path)
        yield _of_file(path, loaded), lambda: masters_in(loaded)
        return
    if is_sharded_checkpoint(path / f"{_SHARDED}0"):  # older files of one process may lie beside it
        path = _only_model(path)
    if is_sharded_checkpoint(path):
        folder = ShardedCheckpoint(path)
        rest = folder.rest(weights_only=True)
        yield Checkpoint(path, [*weights_in(folder, rest)], _files_in(path, rest)), lambda: masters_of(folder)
        return

    def optimizers() -> Mapping[str, WeightSource]:
        files = [each for pattern in _OPTIMIZERS for each in sorted(path.glob(pattern))]
        return {name: master for each in files for name, master in masters_in(_load(each)).items()}

    files = {name: (path / name).read_bytes() for name in (*MODEL_FILES, *TOKENIZER_FILES) if (path / name).is_file()}
    if (path / ADAPTER_CONFIG).is_file():
        yield Checkpoint(path, [], files, adapter=path), dict
    elif (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        if (path / "model_1.safetensors").is_file() and CONFIG not in files:
            raise CheckpointError(
                f"`{path}` has several models. Put {SINGLE_FILE} (or another one under that name) in a folder of its "
                "own and export that"
            )
        with open_weights(path) as opened:
            yield Checkpoint(path, tensors_of(opened), files), optimizers
    elif pickles := sorted(path.glob(_PICKLES)):
        tensors = [tensor for each in pickles for tensor in _of_tensors(_load(each))]
        yield Checkpoint(path, tensors, files), optimizers
    elif CONFIG in files:  # enough for a base
        yield Checkpoint(path, [], files), dict
    else:
        found = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
        raise CheckpointError(
            f"`{path}` is no checkpoint that is known: it has {found}. Expected a file of Lightning or Fabric, or a "
            f"folder with {SINGLE_FILE}, {INDEX_FILE}, {_PICKLES} or {ADAPTER_CONFIG}"
        )


def _only_model(path: Path) -> Path:
    found = sorted(path.glob(f"{_SHARDED}*"))
    if len(found) > 1:
        raise CheckpointError(f"`{path}` has several models: export one of {', '.join(str(each) for each in found)}")
    return found[0]


def _load(path: Path) -> dict[str, Any]:
    return load_file(path, "cpu", True)


def _of_file(path: Path, loaded: dict[str, Any]) -> Checkpoint:
    return Checkpoint(path, _of_tensors(_state_dict(path, loaded)), _files_in(path, loaded))


def _files_in(path: Path, loaded: Mapping[str, Any]) -> dict[str, bytes]:
    """Return config and tokenizer; other names, such as paths or Python modules, a file may have from anybody."""
    found = loaded.get(FILES_KEY, {})
    if not isinstance(found, Mapping) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise CheckpointError(f"`{path}` is damaged or crafted: its `{FILES_KEY}` are not texts by the names of files")
    left_out = found.keys() - {*MODEL_FILES, *TOKENIZER_FILES, ADAPTER_CONFIG}
    if left_out:
        warnings.warn(
            f"`{path}` has files that are neither config nor tokenizer, and are not written: "
            f"{', '.join(map(repr, sorted(left_out)))}",
            LightningCXLWarning,
            stacklevel=2,
        )
    return {name: text.encode() for name, text in found.items() if name not in left_out}


def _state_dict(path: Path, loaded: dict[str, Any]) -> dict[str, Any]:
    """Return the weights among the entries of a file."""
    if "state_dict" in loaded:
        state: dict[str, Any] = loaded["state_dict"]
        return state
    if _holds_tensors(loaded):
        return loaded
    found = [key for key, value in loaded.items() if isinstance(value, Mapping) and _holds_tensors(value)]
    if "model" in found or len(found) == 1:
        return dict(loaded["model" if "model" in found else found[0]])
    raise CheckpointError(
        f"`{path}` has the entries {', '.join(map(str, loaded))}, and which of them is the model is not clear: "
        "expected `state_dict`, `model`, or a single one with tensors"
    )


def _holds_tensors(values: Mapping[Any, Any]) -> bool:
    return bool(values) and all(isinstance(value, torch.Tensor) for value in values.values())


def _of_tensors(state: Mapping[str, Any]) -> list[WeightSource]:
    return [StoredTensor(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]


def json_object(text: bytes, name: str) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is no JSON object")
    return found
