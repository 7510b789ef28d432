"""`save_weights`: a model as safetensors files, written straight from the memory that holds the weights.

[Note: Saving straight]
Every file is written under a temporary name and synced; only when all are complete, they get their names. Until then
what was saved before is as it was. Then the old index (or single file) goes first and the new one comes last, so that a
crash in between leaves a folder that does not load, not one that loads a mixture.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence, Set
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cxl.errors import CheckpointError, ConfigError, warn
from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.storage.drive import sync_folder
from lightning_cxl.text import format_bytes, parse_bytes
from lightning_cxl.weights.files import INDEX_FILE, SINGLE_FILE, NamedTensor, write_tensors
from lightning_cxl.weights.load import distinct, model_weights, weight_beside

_METADATA = {"format": "pt"}  # transformers refuses files without it
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


class LaterValues(NamedTuple):
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def save_weights(
    model: nn.Module, target: str | PathLike[str], max_shard_bytes: int | str = "5GiB", dtype: torch.dtype | None = None
) -> list[Path]:
    """Write a model's parameters and persistent buffers as safetensors, with a few tens of MiB of extra memory.

    Tied weights are written once, under the name that transformers keeps. The files load with `load_weights`, with
    ``safetensors.torch.load_file`` and, beside a config, with ``from_pretrained`` of transformers. Files that a
    folder had from an earlier save are replaced; on an error they stay.

    Args:
        model: on any device.
        target: a folder, or a file whose name ends in ``.safetensors``, which then holds everything.
        max_shard_bytes: a folder gets one file up to this size, else several and an index.
        dtype: of floating-point parameters in the files; None: the one they have.

    Returns:
        The files with weights.

    Raises:
        CheckpointError: the file system refused, or the model has tensors that such files cannot hold.
        ConfigError: `max_shard_bytes` is no size, or `target` neither a folder nor a ``.safetensors`` file.

    Example::

        lightning_cxl.save_weights(model, "folder", max_shard_bytes="2GiB", dtype=torch.bfloat16)
    """
    return save_tensors(named_tensors(model, dtype), Path(fspath(target)), max_shard_bytes)


def named_tensors(
    model: nn.Module, dtype: torch.dtype | None, values: Mapping[str, LaterValues] | None = None
) -> list[NamedTensor]:
    """Return what `save_weights` writes, in the model's order, tied weights once.

    `values` gives values later: of weights on the meta device, by the first name of each.
    """
    by_name = model_weights(model)
    weights = distinct(by_name)
    later = values or {}
    empty = [weight.names[0] for weight in weights if weight.tensor.is_meta and weight.names[0] not in later]
    if empty:
        raise CheckpointError(
            f"{len(empty)} weights of {type(model).__name__} are on the meta device and have no values, such as "
            f"`{empty[0]}`: load them before you save."
        )
    sparse = [
        weight.names[0] for weight in weights if weight.tensor.layout is not torch.strided or weight.tensor.is_quantized
    ]
    if sparse:
        raise CheckpointError(f"safetensors files hold dense tensors; `{sparse[0]}` is sparse or quantized")
    state = model.state_dict()
    beside: dict[str, list[NamedTensor]] = {}  # what state dicts have for each quantised weight
    for name, tensor in state.items():
        owner = weight_beside(name)
        if name not in by_name and owner is not None and owner[0] in by_name:
            beside.setdefault(owner[0], []).append(NamedTensor(name, tensor, tensor.dtype))
    _warn_of_other_state(model, state.keys(), by_name.keys() | {item.name for each in beside.values() for item in each})
    declared = []  # patterns of names that transformers will tie to others when it loads the model
    for path, module in model.named_modules():
        tied: Any = getattr(module, "_tied_weights_keys", None) or ()
        declared += [f"{path}.{pattern}" if path else pattern for pattern in tied]
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    named = []
    for weight in weights:
        parts = beside.get(weight.names[0], [])
        converts = dtype is not None and weight.is_parameter and weight.tensor.is_floating_point() and not parts
        # the first name that is not tied to another one, as transformers does
        names = [name for name in weight.names if name not in ignored]
        names.sort(key=lambda name: any(re.search(pattern, name) for pattern in declared))
        if names:
            own, read = later.get(weight.names[0], (weight.tensor.dtype, None))
            named.append(NamedTensor(names[0], weight.tensor, dtype if converts and dtype else own, read))
            named += parts
    return named


def save_tensors(tensors: Sequence[NamedTensor], path: Path, max_shard_bytes: int | str) -> list[Path]:
    """Write files, and an index where there are several. See [Note: Saving straight]."""
    from huggingface_hub import split_state_dict_into_shards_factory

    try:
        max_bytes = parse_bytes(max_shard_bytes)
    except ValueError as error:
        raise ConfigError(f"max_shard_bytes: {error}") from None
    if max_bytes == 0:
        raise ConfigError("max_shard_bytes must be more than 0")
    is_folder = path.suffix != ".safetensors" or path.is_dir()
    if is_folder and path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file: give a folder, or a file name that ends in .safetensors")
    files, index = {path / SINGLE_FILE if is_folder else path: list(tensors)}, None
    if is_folder and tensors:
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) < len(tensors):
            raise CheckpointError("two tensors of the model would have one name in the files; rename one")
        split = split_state_dict_into_shards_factory(
            by_name,
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_bytes,
        )
        files = {path / file: [by_name[name] for name in own] for file, own in split.filename_to_tensors.items()}
        if split.is_sharded:
            num_parameters = sum(each.tensor.numel() for each in tensors if isinstance(each.tensor, nn.Parameter))
            metadata = {**split.metadata, "total_parameters": num_parameters}
            index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
    try:
        (path if is_folder else path.parent).mkdir(parents=True, exist_ok=True)
        with ordinary_memory():
            for final, own in files.items():
                write_tensors(_partial(final), own, _METADATA)
        _rename(list(files), index, path if is_folder else None)
    except OSError as error:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        raise CheckpointError(
            f"could not save {format_bytes(nbytes)} of weights to `{path}`: {error.strerror or error}. Free space "
            "there or save elsewhere."
        ) from error
    finally:
        for final in files:
            _partial(final).unlink(missing_ok=True)
    return list(files)


def _warn_of_other_state(model: nn.Module, state: Set[str], written: Set[str]) -> None:
    """Warn where modules have a state dict of their own making: only parameters and buffers are saved."""
    other = [
        f"{len(names)} {where}, such as `{min(names)}`"
        for names, where in (
            (state - written, "entries of its state dict are no parameters or buffers and not in the files"),
            (written - state, "tensors have other names in the files than in its state dict"),
        )
        if names
    ]
    if other:
        warn(f"{type(model).__name__}: {'; '.join(other)}.")


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.{os.getpid()}.partial")


def _rename(files: Sequence[Path], index: Mapping[str, Any] | None, folder: Path | None) -> None:
    """Give complete files their names, and remove what they replace in a folder. See [Note: Saving straight]."""
    if folder is None:
        os.replace(_partial(files[0]), files[0])
        sync_folder(files[0].parent)
        return
    index_file = folder / INDEX_FILE
    try:
        if index is not None:
            _partial(index_file).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        for stale in {index_file, folder / SINGLE_FILE}.difference(files):
            stale.unlink(missing_ok=True)
        sync_folder(folder)
        for file in files:
            os.replace(_partial(file), file)
        if index is not None:
            os.replace(_partial(index_file), index_file)
        for old in folder.iterdir():
            if _SHARD.fullmatch(old.name) and old not in files:
                old.unlink()
        sync_folder(folder)
    finally:
        _partial(index_file).unlink(missing_ok=True)
