"""``python -m lightning_cxl export CKPT FOLDER``: a checkpoint as a folder for transformers, or as that of an adapter.

The model is built without memory, for its names and tied weights. Each weight is read from the checkpoint when it is
written, so one weight at a time is in memory; see [Note: Saving straight]. peft computes every merge itself, so the
result has the bits of its ``merge_and_unload``. It gets the base weight of one layer just before that weight is
written, and loses it afterwards.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cxl.commands import parsers
from lightning_cxl.commands.exported_tensors import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    MODEL_FILES,
    TOKENIZER_FILES,
    Checkpoint,
    CheckpointTensor,
    dequantised,
    json_object,
    open_checkpoint,
)
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.text import format_bytes
from lightning_cxl.weights.files import INDEX_FILE, SINGLE_FILE, WeightSource, open_weights, tensors_of
from lightning_cxl.weights.hf import FileNames, build_model, in_peft_model, with_original_names, without_code
from lightning_cxl.weights.load import empty_weights, match_names, model_weights, refuse_mismatch
from lightning_cxl.weights.save import LaterValues, named_tensors, save_tensors

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and checkpoint wrappers put into names."""
_NEED_MASTERS = (torch.float32, torch.float16)
"""They hold more of master weights than bfloat16 weights have."""
_INSIDE = "base_model.model."
"""Between a peft model and the modules of the model in it."""
_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save)\.([^.]+)(?:\.|$)")
_OWN_PARTS = (".base_layer", ".original_module")


class Exported(NamedTuple):
    """What an export has written."""

    folder: Path
    files: list[Path]
    """With weights."""
    num_tensors: int
    num_merged: int = 0
    """Layers into which an adapter was merged."""
    num_dequantised: int = 0
    """Of the tensors, those that were quantised."""
    num_masters: int = 0
    """Of the tensors, those that were written from float32 master weights."""
    left_out: int = 0
    """Tensors of the checkpoint that belong to other modules than the model."""


class _Options(NamedTuple):
    folder: Path
    base: Path | None
    adapter_config: Path | None
    only_adapter: bool
    dtype: torch.dtype | None
    max_shard_bytes: int | str


def main(arguments: Sequence[str]) -> None:
    """Export what the arguments name, and say what was written."""
    args = parsers.export().parse_args(arguments)
    dtype = getattr(torch, args.dtype) if args.dtype else None
    exported = export_checkpoint(
        args.checkpoint,
        args.folder,
        base=args.base,
        adapter_config=args.adapter_config,
        only_adapter=args.only_adapter,
        dtype=dtype,
        max_shard_bytes=args.max_shard_bytes,
    )
    print(_described(exported, dtype))


def _described(exported: Exported, dtype: torch.dtype | None) -> str:
    size = format_bytes(sum(path.stat().st_size for path in exported.files))
    count = f"{len(exported.files)} file" + ("s" if len(exported.files) > 1 else "")
    lines = [f"exported {exported.num_tensors} tensors, {size} in {count}, to {exported.folder}"]
    if exported.num_merged:
        lines.append(f"merged an adapter into {exported.num_merged} layers")
    if exported.num_dequantised:
        lines.append(
            f"dequantised {exported.num_dequantised} weights of bitsandbytes: they have the numbers that training "
            "computed with, in plain form"
        )
    if exported.num_masters:
        lines.append(f"{exported.num_masters} weights are the float32 master weights of the optimizer")
    elif dtype is torch.float32:
        lines.append("the checkpoint has no float32 master weights beside its weights")
    if exported.left_out:
        lines.append(f"left out {exported.left_out} tensors of other modules")
    if not (exported.folder / "tokenizer_config.json").is_file():
        lines.append("no tokenizer was found: give a folder that has one with --base, or save one there")
    return "\n".join(lines)


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
    """Write a checkpoint of any front end (see `exported_tensors`) as a folder that transformers and peft load.

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
        found = open_checkpoint(checkpoint, opened, masters=dtype in _NEED_MASTERS)
        config = _adapter_config(found, adapter_config)
        source = base or (None if config is None else _base_of(found, config))
        under = None if source is None else open_checkpoint(source, opened)
        return _export(found, under, config, options)


def _adapter_config(found: Checkpoint, given: Path | None) -> dict[str, Any] | None:
    """Return the config of an adapter: as given, of a folder of peft, or of a file of the main job; else None."""
    path = given or found.adapter
    if path is None:
        text = found.files.get(ADAPTER_CONFIG)
        return None if text is None else json_object(text, f"{ADAPTER_CONFIG} in `{found.path}`")
    path = path / ADAPTER_CONFIG if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"there is no `{path}`: give the {ADAPTER_CONFIG} that peft writes (config.save_pretrained)")
    return json_object(path.read_bytes(), f"`{path}`")


def _base_of(found: Checkpoint, config: Mapping[str, Any]) -> Path:
    name = config.get("base_model_name_or_path")
    if not name or not Path(name).is_dir():
        raise ConfigError(
            f"the adapter in `{found.path}` was trained on {name!r}, which is no folder here: give the folder of "
            "that model with --base"
        )
    return Path(name)


def _export(
    found: Checkpoint, under: Checkpoint | None, adapter_config: dict[str, Any] | None, options: _Options
) -> Exported:
    files = {**(under.files if under is not None else {}), **found.files}
    if CONFIG not in files:
        raise ConfigError(f"`{found.path}` has no {CONFIG}: give the folder of the model that was trained with --base")
    config = json_object(files[CONFIG], CONFIG)
    config.pop("quantization_config", None)
    files.pop(ADAPTER_CONFIG, None)
    state = [replace(tensor, name=_unwrapped(tensor.name)) for tensor in found.tensors]
    adapters = [tensor for tensor in state if _ADAPTER.search(tensor.name)]
    _check_adapter_options(found, bool(adapters), adapter_config, options)
    computes_in = _dtype_of(config)
    if adapters:
        state = [replace(each, name=_plain_name(each.name)) for each in state if not _ADAPTER.search(each.name)]
    weights = _ModelWeights(
        build_empty(config),
        dequantised(state, computes_in),
        dequantised(under.tensors, computes_in) if under is not None else [],
    )
    if adapter_config is not None and (adapters or found.adapter is not None):
        if found.adapter is not None:
            adapted = _put_in_folder(weights.model, found.adapter, adapter_config)
        else:
            adapted = _put_in_state(weights.model, adapters, adapter_config)
        if options.only_adapter:
            return _save_adapter(adapted, files, options)
        weights.merge(adapted)
    return _save_model(weights, config, files, options)._replace(num_masters=found.num_masters)


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _plain_name(name: str) -> str:
    """Return the name that a base weight has in the model without adapters."""
    for part in _OWN_PARTS:
        name = name.replace(f"{part}.", ".")
    return name.replace(_INSIDE, "", 1)


def _dtype_of(config: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def _check_adapter_options(
    found: Checkpoint, has_adapters: bool, config: Mapping[str, Any] | None, options: _Options
) -> None:
    if has_adapters and config is None:
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


# -- the model: which tensor each of its weights is written from -----------------------------------------------------


def build_empty(config: Mapping[str, Any]) -> Any:
    """Return the model of a config, without memory for its weights."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(dict(config)))
        try:
            made = without_code(transformers.AutoConfig.from_pretrained, folder)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"the {CONFIG} names no model that transformers knows: {error}") from error
    kind = next(iter(made.architectures or ()), "")
    model_class = getattr(transformers, kind, transformers.AutoModelForCausalLM)
    with empty_weights():
        return build_model(model_class, made, torch.float32)


class _ModelWeights:
    """Weights of a model and where their values are.

    Args:
        tensors: of the checkpoint: of the model, which may be a part of what was trained.
        below: of the base model, for weights that are not in `tensors`.
    """

    def __init__(self, model: Any, tensors: Sequence[CheckpointTensor], below: Sequence[CheckpointTensor]) -> None:
        self.model = model
        weights = model_weights(model)
        own, self.left_out = _of_model(tensors, weights.keys())
        names = FileNames(model)
        found = dict(names(own))
        given = {id(weights[name]) for name in found if name in weights}
        found |= {name: tensor for name, tensor in names(below) if name in weights and id(weights[name]) not in given}
        if conversions := names.used():
            model._weight_conversions = conversions  # written under the names in the files
        matches = match_names(model, [], lambda _: list(found.items()), completes=False)
        refuse_mismatch(matches, model)
        self._sources: dict[str, WeightSource] = {}
        for read in matches.reads:
            first = self._sources.setdefault(read.weight.names[0], read.source)
            if first is not read.source and not read.source.holds(first.values()):
                raise CheckpointError(
                    f"`{first.name}` and `{read.source.name}` are tied in the model and differ in the checkpoint. "
                    "Give a config that does not tie them (tie_word_embeddings: false)"
                )
        self._first = {name: weight.names[0] for name, weight in weights.items()}
        self._tied = {name: weight.names for name, weight in weights.items() if len(weight.names) > 1}
        later = {name: LaterValues(source.dtype, partial(self._value, name)) for name, source in self._sources.items()}
        self.tensors = with_original_names(model, named_tensors(model, None, later))
        self._merged: dict[str, Callable[[], Tensor]] = {}

    @property
    def num_merged(self) -> int:
        return len({name.rpartition(".")[0] for name in self._merged})

    @property
    def num_dequantised(self) -> int:
        return sum(isinstance(each, CheckpointTensor) and each.is_dequantised for each in self._sources.values())

    def _base_value(self, name: str) -> Tensor:
        return self._sources[self._first[name]].values()

    def _value(self, name: str) -> Tensor:
        merged = self._merged.get(name)
        return self._base_value(name) if merged is None else merged()

    def merge(self, adapted: Any) -> None:
        """Let an adapter of peft change weights when they are written."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        if not hasattr(adapted.base_model, "merge_and_unload"):
            raise UnsupportedError(
                f"{type(adapted.active_peft_config).__name__} changes no weights, so nothing can be merged: export the "
                "adapter alone (--only-adapter)"
            )
        inside: set[int] = set()
        for path, module in adapted.named_modules():
            name = _plain_name(f"{path}.").rstrip(".")
            if id(module) in inside:
                continue
            if isinstance(module, ModulesToSaveWrapper):
                inside.update(map(id, module.modules()))
                saved = module.modules_to_save[module.active_adapters[0]]
                self._merged |= {f"{name}.{key}": value.detach for key, value in saved.named_parameters()}
            elif isinstance(module, AuxiliaryTrainingWrapper):
                raise UnsupportedError(
                    f"`{name}` is trained through {type(module).__name__}, which export does not merge: export the "
                    "adapter alone (--only-adapter)"
                )
            elif isinstance(module, BaseTunerLayer):
                keys = [key for key, _ in module.get_base_layer().named_parameters(recurse=False)]
                self._merged |= {f"{name}.{key}": partial(self._merge_layer, module, name, key) for key in keys}
        both = next((name for name in self._merged if name in self._tied), None)
        if both is not None:
            raise UnsupportedError(
                f"the adapter changes `{both}`, which the model ties to another weight "
                f"({', '.join(self._tied[both])}): merged, they would differ. Export the adapter alone (--only-adapter)"
            )

    def _merge_layer(self, layer: Any, name: str, key: str) -> Tensor:
        base = layer.get_base_layer()
        before = dict(base._parameters)
        try:
            with torch.no_grad():
                for each, parameter in before.items():
                    if parameter is not None:
                        own = self._base_value(f"{name}.{each}").clone()  # `merge` writes into it
                        base._parameters[each] = nn.Parameter(own, requires_grad=False)
                layer.merge()
            merged: Tensor = base._parameters[key].data
            return merged
        finally:
            base._parameters.update(before)
            layer.merged_adapters.clear()


def _of_model(tensors: Sequence[CheckpointTensor], names: Any) -> tuple[list[CheckpointTensor], int]:
    """Return the tensors of the model under its own names, and how many belong to other modules.

    A module that was trained may hold the model as an attribute, so that its names have a prefix.
    """
    known = set(names)
    prefixes: Counter[str] = Counter()
    for tensor in tensors:
        parts = tensor.name.split(".")
        for start in range(len(parts)):
            if ".".join(parts[start:]) in known:
                prefixes[".".join([*parts[:start], ""]) if start else ""] += 1
    if not prefixes:
        return list(tensors), 0
    most = prefixes.most_common(2)
    if len(most) == 2 and most[0][1] == most[1][1]:
        raise CheckpointError(
            f"the checkpoint has the model's weights twice, under `{most[0][0]}` and under `{most[1][0]}`: export a "
            "checkpoint, or save a state dict, with one of them"
        )
    prefix = most[0][0]
    own = [replace(tensor, name=tensor.name[len(prefix) :]) for tensor in tensors if tensor.name.startswith(prefix)]
    return own, len(tensors) - len(own)


# -- adapters of peft on a model without memory ------------------------------------------------------------------------


def _put_in_folder(model: nn.Module, folder: Path, config: Mapping[str, Any]) -> Any:
    """Put the adapter of a peft folder into a model; returns the peft model around it."""
    from peft import get_peft_model_state_dict

    path = folder / ADAPTER_WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"`{folder}` has no {ADAPTER_WEIGHTS}: save the adapter as safetensors")
    adapted = _with_empty_adapter(model, config, "default")
    own = adapted.state_dict()
    saved = get_peft_model_state_dict(adapted, state_dict=own, save_embedding_layers=False)
    name_of = {id(tensor): name for name, tensor in own.items()}
    with open_weights(path) as (file,):
        found = {tensor.name: tensor.values() for tensor in tensors_of([file])}
    _refuse_others(found.keys(), saved.keys())
    # as peft does when it loads: 16-bit adapters compute in float32
    wide = {name: value.float() if ".lora_" in name else value for name, value in found.items()}
    return _filled(adapted, {name_of[id(saved[name])]: value for name, value in wide.items()})


def _put_in_state(model: nn.Module, tensors: Sequence[CheckpointTensor], config: Mapping[str, Any]) -> Any:
    """Put an adapter of a state dict into a model, as `_put_in_folder` does."""
    names = {found[1] for tensor in tensors if (found := _ADAPTER.search(tensor.name))}
    if len(names) > 1:
        raise UnsupportedError(f"the checkpoint has several adapters ({', '.join(sorted(names))}): export needs one")
    (adapter,) = names
    if "/" in adapter or "\\" in adapter:  # peft makes a folder of this name
        raise CheckpointError(f"the checkpoint is damaged or crafted: its adapter has the name {adapter!r}, a path")
    adapted = _with_empty_adapter(model, config, adapter)
    given = {_INSIDE + tensor.name.rpartition(_INSIDE)[2]: tensor for tensor in tensors}
    _refuse_others(given.keys(), {name for name in adapted.state_dict() if _ADAPTER.search(name)})
    return _filled(adapted, {name: tensor.values() for name, tensor in given.items()})


def _with_empty_adapter(model: Any, config: Mapping[str, Any], adapter: str) -> Any:
    from peft import PeftConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ADAPTER_CONFIG).write_text(json.dumps(dict(config)))
        made = PeftConfig.from_pretrained(folder)
    model.name_or_path = made.base_model_name_or_path or ""  # else peft renames it to a folder that is gone
    try:
        return in_peft_model(model, made, adapter_name=adapter, low_cpu_mem_usage=True)
    except ValueError as error:
        raise CheckpointError(f"the adapter's config does not fit the model: {error}") from error


def _refuse_others(given: AbstractSet[str], own: AbstractSet[str]) -> None:
    if given != own:
        raise CheckpointError(
            f"the adapter has {_some(given - own)} that its config does not make, and lacks {_some(own - given)}: give "
            f"the {ADAPTER_CONFIG} that it was trained with"
        )


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return f"{len(listed)} tensors" + (f" such as `{listed[0]}`" if listed else "")


def _filled(adapted: Any, values: Mapping[str, Tensor]) -> Any:
    """Put the adapter's values in; not with peft, which would move them to the base weights: the meta device."""
    try:
        adapted.load_state_dict(values, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the adapter does not fit its {ADAPTER_CONFIG}: {error}") from error
    return adapted


# -- files -------------------------------------------------------------------------------------------------------------


def _save_model(weights: _ModelWeights, config: dict[str, Any], files: dict[str, bytes], options: _Options) -> Exported:
    _refuse_mixture(options.folder, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), "an adapter")
    tensors = weights.tensors
    if options.dtype is not None:
        tensors = [each._replace(dtype=options.dtype) if each.dtype.is_floating_point else each for each in tensors]
    written = save_tensors(tensors, options.folder, options.max_shard_bytes)
    dtype = next((each.dtype for each in tensors if each.dtype.is_floating_point), torch.float32)
    keys = {"dtype", *({"torch_dtype"} & config.keys())}  # older tools read the second
    config |= {"architectures": [type(weights.model).__name__]}
    config |= dict.fromkeys(keys, str(dtype).removeprefix("torch."))
    _write(options.folder, {**files, CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()})
    return Exported(
        options.folder,
        written,
        len(tensors),
        num_merged=weights.num_merged,
        num_dequantised=weights.num_dequantised,
        left_out=weights.left_out,
    )


def _save_adapter(adapted: Any, files: dict[str, bytes], options: _Options) -> Exported:
    _refuse_mixture(options.folder, (CONFIG, SINGLE_FILE, INDEX_FILE), "a model")
    if options.base is not None:
        adapted.active_peft_config.base_model_name_or_path = str(options.base)
    adapted.save_pretrained(str(options.folder), save_embedding_layers=False)  # else it asks the hub about them
    _write(options.folder, {name: text for name, text in files.items() if name not in MODEL_FILES})
    path = options.folder / ADAPTER_WEIGHTS
    with open_weights(path) as (file,):
        return Exported(options.folder, [path], len(tensors_of([file])))


def _refuse_mixture(folder: Path, names: Iterable[str], what: str) -> None:
    """Refuse a folder in which tools would find an adapter and another model, and put the one on the other."""
    found = next((name for name in names if (folder / name).exists()), None)
    if found is not None:
        raise ConfigError(
            f"`{folder}` has `{found}` of {what}, and would be read as both: give another folder, or empty this one"
        )


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
