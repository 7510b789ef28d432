"""`export_checkpoint`: a checkpoint as a folder for transformers, or as the folder of an adapter.

The model is built without memory, for its names and tied weights. Each weight is read from the checkpoint when it is
written, so one weight at a time is in memory; see [Note: Saving straight].
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_cxl.commands.export.adapters import (
    is_adapters,
    load_adapter_config,
    put_in_folder,
    put_in_state,
    without_adapters,
)
from lightning_cxl.commands.export.layouts import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    MODEL_FILES,
    TOKENIZER_FILES,
    Checkpoint,
    json_object,
    open_checkpoint,
)
from lightning_cxl.commands.export.model_sources import ModelSources, build_empty
from lightning_cxl.commands.export.stored import Renamed, dequantised
from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.weights.files import INDEX_FILE, SINGLE_FILE, WeightSource, open_weights
from lightning_cxl.weights.save import save_tensors

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers put into names."""


_NEED_MASTERS = (torch.float32, torch.float16)
"""They hold more of master weights than bfloat16 weights have."""


class Exported(NamedTuple):
    """What an export has written."""

    folder: Path
    files: list[Path]
    """With weights."""
    num_tensors: int
    num_merged: int
    """Layers into which an adapter was merged."""
    num_dequantised: int
    """Of the tensors, those that were quantised."""
    num_masters: int
    """Of the tensors, those that were written from float32 master weights."""
    left_out: int
    """Tensors of the checkpoint that belong to other modules than the model."""


class _Options(NamedTuple):
    folder: Path
    base: Path | None
    adapter_config: Path | None
    only_adapter: bool
    dtype: torch.dtype | None
    max_shard_bytes: int | str


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    *,
    base: Path | None = None,
    adapter_config: Path | None = None,
    only_adapter: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int | str = "5GiB",
) -> Exported:
    """Write a checkpoint of any front end (see `layouts`) as a folder that transformers and peft load.

    Adapters are merged into the base model. Weights that bitsandbytes has quantised become plain numbers.

    Args:
        base: folder of the model that was fine-tuned: for config and tokenizer, and for weights that the checkpoint
            does not hold. None: what the checkpoint has or names.
        adapter_config: of an adapter in a state dict, which does not say how it is scaled.
        dtype: of floating-point weights; float32 and float16 are made from the master weights of the run, where the
            checkpoint has them. None: the weights that the model computes with, as they are.
    """
    options = _Options(folder, base, adapter_config, only_adapter, dtype, max_shard_bytes)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"`{folder}` is a file: give a folder")
    if folder.resolve() in (checkpoint.resolve(), base and base.resolve()):
        raise ConfigError(f"`{folder}` would be read and written at once: give another folder")
    with ExitStack() as opened:
        found = opened.enter_context(open_checkpoint(checkpoint, masters=dtype in _NEED_MASTERS))
        source = options.base or _base_of(found)
        under = None if source is None else opened.enter_context(open_checkpoint(source))
        return _export(found, under, options)


def _base_of(found: Checkpoint) -> Path | None:
    """Return the folder of the base model that an adapter names, where that is a folder."""
    config = _adapter_config(found, None)
    if config is None:
        return None
    name = config.get("base_model_name_or_path")
    if not name or not Path(name).is_dir():
        raise ConfigError(
            f"the adapter in `{found.path}` was trained on {name!r}, which is no folder here: give the folder of "
            "that model with --base"
        )
    return Path(name)


def _adapter_config(found: Checkpoint, given: Path | None) -> dict[str, Any] | None:
    """Return the config of an adapter: as given, of a folder of peft, or of a file of the main job; else None."""
    if given is not None or found.adapter is not None:
        return load_adapter_config(given or found.adapter)  # type: ignore[arg-type]  # one of them
    text = found.files.get(ADAPTER_CONFIG)
    return None if text is None else json_object(text, f"{ADAPTER_CONFIG} in `{found.path}`")


def _export(found: Checkpoint, under: Checkpoint | None, options: _Options) -> Exported:
    files = {**(under.files if under is not None else {}), **found.files}
    if CONFIG not in files:
        raise ConfigError(f"`{found.path}` has no {CONFIG}: give the folder of the model that was trained with --base")
    config = json_object(files[CONFIG], CONFIG)
    config.pop("quantization_config", None)
    files.pop(ADAPTER_CONFIG, None)
    state: list[WeightSource] = [Renamed(_unwrapped(tensor.name), tensor) for tensor in found.tensors]
    adapters = [tensor for tensor in state if is_adapters(tensor.name)]
    _check_adapter_options(found, bool(adapters), options)
    computes_in = _dtype_of(config)
    weights = ModelSources(
        build_empty(config),
        dequantised(without_adapters(state) if adapters else state, computes_in),
        dequantised(under.tensors, computes_in) if under is not None else [],
    )
    if found.adapter is not None:
        weights.merge(put_in_folder(weights.model, found.adapter))
    elif adapters:
        adapter_config = _adapter_config(found, options.adapter_config)
        assert adapter_config is not None  # checked above
        adapted = put_in_state(weights.model, adapters, adapter_config)
        if options.only_adapter:
            return _save_adapter(adapted, files, options)
        weights.merge(adapted)
    return _save_model(weights, config, files, options)._replace(num_masters=found.num_masters)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _dtype_of(config: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _check_adapter_options(found: Checkpoint, has_adapters: bool, options: _Options) -> None:
    if has_adapters and _adapter_config(found, options.adapter_config) is None:
        raise ConfigError(
            f"`{found.path}` has adapters, and does not say how they are scaled: give the {ADAPTER_CONFIG} that they "
            "were trained with, with --adapter-config (peft: model.peft_config['default'].save_pretrained(FOLDER))"
        )
    if not has_adapters and options.adapter_config is not None:
        raise ConfigError(f"`{found.path}` needs no --adapter-config: it has no adapters in its state dict")
    if options.only_adapter and found.adapter is not None:
        raise ConfigError(f"`{found.path}` is a folder of an adapter already: copy it, or leave out --only-adapter")
    if options.only_adapter and not has_adapters:
        raise ConfigError(f"`{found.path}` has no adapter: leave out --only-adapter")
    if options.only_adapter and options.dtype is not None:
        raise ConfigError("an adapter alone keeps its dtype: leave out --dtype or --only-adapter")


def _refuse_mixture(folder: Path, names: Iterable[str], what: str) -> None:
    """Refuse a folder in which tools would find an adapter and another model, and put the one on the other."""
    found = next((name for name in names if (folder / name).exists()), None)
    if found is not None:
        raise ConfigError(
            f"`{folder}` has `{found}` of {what}, and would be read as both: give another folder, or empty this one"
        )


def _save_model(weights: ModelSources, config: dict[str, Any], files: dict[str, bytes], options: _Options) -> Exported:
    _refuse_mixture(options.folder, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), "an adapter")
    tensors = weights.tensors(options.dtype)
    written = save_tensors(tensors, options.folder, options.max_shard_bytes)
    dtype = next((each.dtype for each in tensors if each.dtype.is_floating_point), torch.float32)
    named = str(dtype).removeprefix("torch.")
    keys = {"dtype", *({"torch_dtype"} & config.keys())}  # older tools read the second
    config |= {"architectures": [type(weights.model).__name__], **dict.fromkeys(keys, named)}
    _write(options.folder, {**files, CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()})
    return Exported(
        options.folder, written, len(tensors), weights.num_merged, weights.num_dequantised, 0, weights.left_out
    )


def _save_adapter(adapted: Any, files: dict[str, bytes], options: _Options) -> Exported:
    _refuse_mixture(options.folder, (CONFIG, SINGLE_FILE, INDEX_FILE), "a model")
    if options.base is not None:
        adapted.active_peft_config.base_model_name_or_path = str(options.base)
    adapted.save_pretrained(str(options.folder), save_embedding_layers=False)  # else it asks the hub about them
    _write(options.folder, {name: text for name, text in files.items() if name not in MODEL_FILES})
    path = options.folder / ADAPTER_WEIGHTS
    with open_weights(path) as (file,):
        return Exported(options.folder, [path], len(file.entries), 0, 0, 0, 0)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write config and tokenizer, and take away files of another tokenizer, which would be read with this one's."""
    others = set(TOKENIZER_FILES) - files.keys() if set(TOKENIZER_FILES) & files.keys() else set()
    try:
        for name in others:
            (folder / name).unlink(missing_ok=True)
        for name, text in files.items():
            (folder / name).unlink(missing_ok=True)  # what it links to, if it is a link, stays
            with open(folder / name, "xb") as file:
                file.write(text)
    except OSError as error:
        raise CheckpointError(f"could not write to `{folder}`: {error.strerror or error}. Free space there") from error
