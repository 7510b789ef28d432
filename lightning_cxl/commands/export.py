"""``python -m lightning_cxl export CKPT FOLDER``: a checkpoint as a folder for transformers, or as that of an adapter.

The model is built without memory, for its names and tied weights. Each weight is read from the checkpoint when it is
written, so one weight at a time is in memory; see [Note: Saving straight]. peft computes every merge itself, so the
result has the bits of its ``merge_and_unload``. It gets the base weight of one layer just before that weight is
written, and loses it afterwards.
"""

import json
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cxl.commands import parsers
from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.optim.saved_state import joined
from lightning_cxl.run.checkpoint import load_file, masters_in
from lightning_cxl.run.sharded_checkpoint import TIED, is_sharded_checkpoint
from lightning_cxl.run.sharded_reading import ShardedCheckpoint
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.text import format_bytes
from lightning_cxl.weights.files import INDEX_FILE, SINGLE_FILE, WeightSource, open_weights, tensors_of
from lightning_cxl.weights.hf import FileNames, build_model, in_peft_model, with_original_names, without_code
from lightning_cxl.weights.load import empty_weights, match_names, model_weights, refuse_mismatch, weight_beside
from lightning_cxl.weights.save import LaterValues, named_tensors, save_tensors

# ----------------------------------------------------------------------------------------------------
# Contents of a checkpoint of any front end: weights that are read when they are written, and files.
#
# | front end | what is there |
# |---|---|
# | Lightning | a file with ``state_dict`` |
# | Lightning, several processes | a folder with ``meta.pt`` and ``.metadata`` |
# | Fabric | a file with a state dict, or with one beside other entries |
# | Accelerate (`save_state`) | a folder with ``model.safetensors`` or ``pytorch_model.bin``, without config |
# | Accelerate, several processes | a folder with a folder ``sharded_model_N`` for each model |
# | Hugging Face Trainer, transformers | a folder with ``config.json`` and weights |
# | peft, and the Trainer with it | a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` |
#
# A run with 16-bit weights keeps float32 master weights: whole, in our entry of a checkpoint, or split, as an int16
# remainder in the optimizer's state. Lightning has both in its one file, Fabric in what the user saved of the
# optimizer, Accelerate and the Trainer in a file of the optimizer.

FILES_KEY = "transformers_files"
"""Entry of a Lightning checkpoint of the main job: texts of config and tokenizer by file name."""
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json"),
)
MODEL_FILES = (CONFIG, "generation_config.json")
_SHARDED = "sharded_model_"
_PICKLES = "pytorch_model*.bin"
_OPTIMIZERS = ("optimizer*.bin", "optimizer.pt")


@dataclass(frozen=True)
class CheckpointTensor(WeightSource):
    """A tensor of a checkpoint, which is read whole when it is asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Returns the values, perhaps pages of a file."""
    identity: Any
    """The same of tensors that are tied in the checkpoint."""
    is_dequantised: bool = False

    def values(self, staging: object = None) -> Tensor:
        return self.read()


Masters = Mapping[str, CheckpointTensor]
"""Master weights by the parameter's name: float32, or int16 where it is the remainder."""


class Checkpoint(NamedTuple):
    """The contents of a checkpoint that an export needs."""

    path: Path
    tensors: list[CheckpointTensor]
    files: Mapping[str, bytes]
    """Config and tokenizer, by file name."""
    adapter: Path | None = None
    """The folder, where it is one of peft."""
    num_masters: int = 0
    """Of the tensors, those that are float32 master weights."""


def open_checkpoint(path: Path, opened: ExitStack, *, masters: bool = False) -> Checkpoint:
    """Return what a checkpoint holds; tensors can be read until `opened` is closed.

    Args:
        masters: whether master weights take the place of 16-bit weights.
    """
    found, find_masters = _open(path, opened)
    return _with_masters(found, find_masters()) if masters else found


def _open(path: Path, opened: ExitStack) -> tuple[Checkpoint, Callable[[], Masters]]:
    if not path.exists():
        raise ConfigError(f"there is no checkpoint `{path}`")
    if not path.is_dir():
        loaded = _load(path)
        return Checkpoint(path, _stored(_state_dict(path, loaded)), _files_in(path, loaded)), lambda: _masters_in(
            loaded
        )
    if is_sharded_checkpoint(path / f"{_SHARDED}0"):  # older files of one process may lie beside it
        path = _only_model(path)
    if is_sharded_checkpoint(path):
        return _of_processes(path)

    def masters_of_optimizers() -> Masters:
        files = [each for pattern in _OPTIMIZERS for each in sorted(path.glob(pattern))]
        return {name: master for each in files for name, master in _masters_in(_load(each)).items()}

    files = {name: (path / name).read_bytes() for name in (*MODEL_FILES, *TOKENIZER_FILES) if (path / name).is_file()}
    if (path / ADAPTER_CONFIG).is_file():
        return Checkpoint(path, [], files, adapter=path), dict
    if (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        if (path / "model_1.safetensors").is_file() and CONFIG not in files:
            raise CheckpointError(
                f"`{path}` has several models. Put {SINGLE_FILE} (or another one under that name) in a folder of its "
                "own and export that"
            )
        weights = tensors_of(opened.enter_context(open_weights(path)))
        return Checkpoint(path, list(map(_of_safetensors, weights)), files), masters_of_optimizers
    if pickles := sorted(path.glob(_PICKLES)):
        return Checkpoint(
            path, [each for file in pickles for each in _stored(_load(file))], files
        ), masters_of_optimizers
    if CONFIG in files:  # enough for a base
        return Checkpoint(path, [], files), dict
    names = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"`{path}` is no checkpoint that is known: it has {names}. Expected a file of Lightning or Fabric, or a "
        f"folder with {SINGLE_FILE}, {INDEX_FILE}, {_PICKLES} or {ADAPTER_CONFIG}"
    )


def _only_model(path: Path) -> Path:
    found = sorted(path.glob(f"{_SHARDED}*"))
    if len(found) > 1:
        raise CheckpointError(f"`{path}` has several models: export one of {', '.join(str(each) for each in found)}")
    return found[0]


def _of_processes(path: Path) -> tuple[Checkpoint, Callable[[], Masters]]:
    folder = ShardedCheckpoint(path)
    rest = folder.rest(weights_only=True)
    own = rest.get(KEY)
    tied = {name: names[0] for names in (own.get(TIED, []) if isinstance(own, dict) else []) for name in names}

    def tensor(name: str, full_name: str) -> CheckpointTensor:
        like = folder.empty(full_name)
        read = partial(folder.tensor, full_name)  # puts the shards together
        return CheckpointTensor(name, tuple(like.shape), like.dtype, read, tied.get(name, name))

    weights = [(name, f"state_dict.{name}") for name in folder.names("state_dict")]
    tensors = [tensor(name, full) for name, full in weights if folder.is_tensor(full)]
    masters = folder.master_names()
    return Checkpoint(path, tensors, _files_in(path, rest)), lambda: {n: tensor(n, full) for n, full in masters.items()}


def _load(path: Path) -> dict[str, Any]:
    return load_file(path, "cpu", True)


def _stored(state: Mapping[str, Any]) -> list[CheckpointTensor]:
    """Return the tensors of a file that torch has mapped."""
    return [_of_tensor(name, value.detach()) for name, value in state.items() if isinstance(value, Tensor)]


def _of_tensor(name: str, value: Tensor) -> CheckpointTensor:
    memory = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
    return CheckpointTensor(name, tuple(value.shape), value.dtype, lambda: value, memory)


def _of_safetensors(weight: WeightSource) -> CheckpointTensor:
    def read() -> Tensor:
        pages = weight.mapped()
        return weight.values() if pages is None else pages

    return CheckpointTensor(weight.name, weight.shape, weight.dtype, read, weight.name)


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
    return bool(values) and all(isinstance(value, Tensor) for value in values.values())


def json_object(text: bytes, name: str) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is no JSON object")
    return found


# -- float32 master weights --------------------------------------------------------------------------------------------


def _masters_in(loaded: Mapping[str, Any]) -> Masters:
    found: dict[str, Tensor] = {}
    for own, states in _entries(loaded):
        found |= masters_in(own, states)
    return {each.name: each for each in _stored(found)}


def _entries(loaded: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]:
    """Yield our entries in a file, each with the state dicts of its optimizers."""
    if KEY in loaded:
        yield loaded[KEY], loaded.get("optimizer_states", [loaded] if "state" in loaded else [])
    for value in loaded.values():
        if isinstance(value, Mapping) and KEY in value:
            yield value[KEY], [value]


def _with_masters(found: Checkpoint, masters: Masters) -> Checkpoint:
    """Put master weights in the place of weights; of tied ones the master has one name."""
    names_of: dict[Any, list[str]] = {}
    for tensor in found.tensors:
        names_of.setdefault(tensor.identity, []).append(tensor.name)
    tensors, count = [], 0
    for tensor in found.tensors:
        name = next((name for name in names_of[tensor.identity] if name in masters), None)
        tensors.append(tensor if name is None else _master(tensor, masters[name]))
        count += name is not None
    if masters and not count:
        raise CheckpointError(
            f"the checkpoint has {len(masters)} float32 master weights such as `{min(masters)}`, and none has the name "
            "of a weight: leave out --dtype to export the weights that the model computes with"
        )
    return found._replace(tensors=tensors, num_masters=count)


def _master(weight: CheckpointTensor, master: CheckpointTensor) -> CheckpointTensor:
    if master.dtype is not torch.int16:
        return replace(master, name=weight.name)
    return replace(weight, dtype=torch.float32, read=lambda: joined(weight.read(), master.read()))


# -- weights that bitsandbytes has quantised, as the numbers that it computes with -------------------------------------


def dequantised(tensors: Sequence[CheckpointTensor], dtype: torch.dtype) -> list[CheckpointTensor]:
    """Return tensors with each quantised weight and what is beside it as one, in the place of the weight."""
    beside: dict[str, dict[str, CheckpointTensor]] = {}
    plain = []
    for each in tensors:
        found = weight_beside(each.name)
        if found is None:
            plain.append(each)
        else:
            beside.setdefault(found[0], {})[found[1]] = each
    return [_dequantised(each, beside.get(each.name, {}), dtype) for each in plain]


def _dequantised(
    weight: CheckpointTensor, beside: Mapping[str, CheckpointTensor], dtype: torch.dtype
) -> CheckpointTensor:
    is_quantised = weight.dtype in (torch.uint8, torch.int8)
    if is_quantised and not {"absmax", "SCB"} & beside.keys():
        raise CheckpointError(
            f"`{weight.name}` is {weight.dtype}, and no scales of bitsandbytes are beside it: it cannot be "
            "dequantised. Export from the files in full precision (--base)"
        )
    if not beside:
        return weight
    from bitsandbytes import functional

    def state() -> Any:
        parts = {key: each.values() for key, each in beside.items()}
        return functional.QuantState.from_dict(parts, device=torch.device("cpu"))

    def numbers() -> Tensor:
        if "SCB" in beside:
            found: Tensor = functional.int8_vectorwise_dequant(weight.values(), beside["SCB"].values())
        else:
            found = functional.dequantize_4bit(weight.values(), state())
        return found.to(dtype)

    shape = weight.shape if "SCB" in beside else tuple(state().shape)
    return replace(weight, shape=shape, dtype=dtype, read=numbers, is_dequantised=True)


_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names from torch.compile and checkpoint wrappers."""
_NEED_MASTERS = (torch.float32, torch.float16)
"""They hold more of master weights than bfloat16 weights have."""
_INSIDE = "base_model.model."
"""Between a peft model and the modules of the model in it."""
_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save)\.([^.]+)(?:\.|$)")
_OWN_PARTS = (".base_layer", ".original_module")


class Exported(NamedTuple):
    """The result of an export."""

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
    """Write a checkpoint of any front end as a folder that transformers and peft load.

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
