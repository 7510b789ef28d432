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
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_cxl.commands import parsers
from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError, warn
from lightning_cxl.optim.parameter_state import joined
from lightning_cxl.run.checkpoint import TIED, is_sharded_checkpoint, load_file, masters_in
from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.text import format_bytes
from lightning_cxl.weights import models
from lightning_cxl.weights.files import INDEX_FILE, SINGLE_FILE, WeightSource, open_weights, tensors_of
from lightning_cxl.weights.hf import FileNames, build_model, in_peft_model, with_original_names, without_code

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
    read: Callable[[], Tensor]  # returns the values, perhaps pages of a file
    identity: Any  # the same of tensors that are tied in the checkpoint
    is_dequantised: bool = False

    def values(self, staging: object = None) -> Tensor:
        return self.read()


@dataclass
class Checkpoint:
    path: Path
    tensors: list[CheckpointTensor]
    files: Mapping[str, bytes]  # config and tokenizer, by file name
    masters: Callable[[], Mapping[str, CheckpointTensor]] = dict
    """Finds master weights by the parameter's name: float32, or int16 where it is the remainder."""
    is_adapter: bool = False  # whether it is a folder of peft


def open_checkpoint(path: Path, opened: ExitStack) -> Checkpoint:
    """Return what a checkpoint holds; tensors can be read until `opened` is closed."""
    if not path.exists():
        raise ConfigError(f"there is no checkpoint `{path}`")
    if not path.is_dir():
        loaded = _load(path)
        return Checkpoint(path, _stored(_state_dict(path, loaded)), _files_in(path, loaded), lambda: _masters([loaded]))
    if is_sharded_checkpoint(path / f"{_SHARDED}0"):  # older files of one process may lie beside it
        path, *others = sorted(path.glob(f"{_SHARDED}*"))
        if others:
            names = ", ".join(map(str, [path, *others]))
            raise CheckpointError(f"`{path.parent}` has several models: export one of {names}")
    if is_sharded_checkpoint(path):
        sharded = ShardedCheckpoint(path)
        rest = sharded.rest(weights_only=True)
        own = rest.get(KEY)
        tied = {name: names[0] for names in (own.get(TIED, []) if isinstance(own, dict) else []) for name in names}

        def tensor(name: str, full_name: str) -> CheckpointTensor:
            like, read = sharded.empty(full_name), partial(sharded.tensor, full_name)  # puts the shards together
            return CheckpointTensor(name, tuple(like.shape), like.dtype, read, tied.get(name, name))

        names_in = {name: f"state_dict.{name}" for name in sharded.names("state_dict")}
        tensors = [tensor(name, full) for name, full in names_in.items() if sharded.is_tensor(full)]
        masters = sharded.master_names()
        return Checkpoint(
            path, tensors, _files_in(path, rest), lambda: {name: tensor(name, full) for name, full in masters.items()}
        )
    files = {name: (path / name).read_bytes() for name in (*MODEL_FILES, *TOKENIZER_FILES) if (path / name).is_file()}
    if (path / ADAPTER_CONFIG).is_file():
        return Checkpoint(path, [], files, is_adapter=True)
    if (path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file():
        if (path / "model_1.safetensors").is_file() and CONFIG not in files:
            raise CheckpointError(
                f"`{path}` has several models. Put the {SINGLE_FILE} to export in a folder of its own"
            )
        tensors = [
            CheckpointTensor(each.name, each.shape, each.dtype, partial(_pages_or_values, each), each.name)
            for each in tensors_of(opened.enter_context(open_weights(path)))
        ]
    else:
        pickles = sorted(path.glob(_PICKLES))
        tensors = [each for file in pickles for each in _stored(_load(file))]
        if not pickles and CONFIG not in files:  # a config is enough for a base
            names = ", ".join(sorted(each.name for each in path.iterdir())[:8]) or "nothing"
            raise CheckpointError(
                f"`{path}` is no checkpoint that is known: it has {names}. Expected a file of Lightning or Fabric, or "
                f"a folder with {SINGLE_FILE}, {INDEX_FILE}, {_PICKLES} or {ADAPTER_CONFIG}"
            )
    optimizers = [each for pattern in _OPTIMIZERS for each in sorted(path.glob(pattern))]
    return Checkpoint(path, tensors, files, lambda: _masters(map(_load, optimizers)))


_load = partial(load_file, map_location="cpu", weights_only=True)


def _stored(state: Mapping[str, Any]) -> list[CheckpointTensor]:
    found = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            memory = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
            found.append(CheckpointTensor(name, tuple(value.shape), value.dtype, value.detach, memory))
    return found


def _pages_or_values(weight: WeightSource) -> Tensor:
    pages = weight.mapped()
    return weight.values() if pages is None else pages


def _files_in(path: Path, loaded: Mapping[str, Any]) -> dict[str, bytes]:
    """Return config and tokenizer; other names, such as paths or Python modules, a file may have from anybody."""
    found = loaded.get(FILES_KEY, {})
    if not isinstance(found, Mapping) or not all(isinstance(each, str) for pair in found.items() for each in pair):
        raise CheckpointError(f"`{path}` is damaged or crafted: its `{FILES_KEY}` are not texts by the names of files")
    left_out = found.keys() - {*MODEL_FILES, *TOKENIZER_FILES, ADAPTER_CONFIG}
    if left_out:
        warn(
            f"`{path}` has files that are neither config nor tokenizer, and are not written: "
            f"{', '.join(map(repr, sorted(left_out)))}"
        )
    return {name: text.encode() for name, text in found.items() if name not in left_out}


def _state_dict(path: Path, loaded: dict[str, Any]) -> dict[str, Any]:
    if "state_dict" in loaded:
        return loaded["state_dict"]
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
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{name} is no JSON object")
    return found


def _masters(files: Iterable[Mapping[str, Any]]) -> dict[str, CheckpointTensor]:
    found: dict[str, Tensor] = {}
    for loaded in files:
        if KEY in loaded:
            states = loaded.get("optimizer_states", [loaded] if "state" in loaded else [])
            found |= masters_in(loaded[KEY], states)
        for value in loaded.values():
            if isinstance(value, Mapping) and KEY in value:
                found |= masters_in(value[KEY], [value])
    return {each.name: each for each in _stored(found)}


def _with_masters(
    weights: Sequence[CheckpointTensor], masters: Mapping[str, CheckpointTensor]
) -> tuple[list[CheckpointTensor], int]:
    """Return weights with masters in their place, and how many; of tied ones the master has one name."""
    names_of: dict[Any, list[str]] = {}
    for weight in weights:
        names_of.setdefault(weight.identity, []).append(weight.name)
    tensors, count = [], 0
    for weight in weights:
        master = next((masters[name] for name in names_of[weight.identity] if name in masters), None)
        if master is None:
            tensors.append(weight)
        elif master.dtype is torch.int16:
            tensors.append(replace(weight, dtype=torch.float32, read=partial(_joined, weight, master)))
        else:
            tensors.append(replace(master, name=weight.name))
        count += master is not None
    if masters and not count:
        raise CheckpointError(
            f"the checkpoint has {len(masters)} float32 master weights such as `{min(masters)}`, and none has the name "
            "of a weight: leave out --dtype to export the weights that the model computes with"
        )
    return tensors, count


def _joined(weight: CheckpointTensor, remainder: CheckpointTensor) -> Tensor:
    return joined(weight.read(), remainder.read())


def dequantised(tensors: Sequence[CheckpointTensor], dtype: torch.dtype) -> list[CheckpointTensor]:
    """Return tensors with each quantised weight and what is beside it as one, in the place of the weight."""
    weights, beside = models.with_beside(tensors)
    return [_dequantised(each, beside.get(each.name, {}), dtype) for each in weights]


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


_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")  # of torch.compile and of checkpointing
_INSIDE = "base_model.model."  # between a peft model and the modules of the model in it
_ADAPTER = re.compile(r"\.(?:lora_\w+|modules_to_save)\.([^.]+)(?:\.|$)")
_OWN_PARTS = (".base_layer", ".original_module")


class Exported(NamedTuple):
    folder: Path
    files: list[Path]  # with weights
    num_tensors: int
    notes: list[str]  # on adapters, quantised weights and master weights, and on what was left out


def main(arguments: Sequence[str]) -> None:
    args = vars(parsers.export().parse_args(arguments))
    dtype = getattr(torch, args["dtype"]) if args["dtype"] else None
    exported = export_checkpoint(**{**args, "dtype": dtype})
    size = format_bytes(sum(path.stat().st_size for path in exported.files))
    count = f"{len(exported.files)} file" + ("s" if len(exported.files) > 1 else "")
    print(
        f"exported {exported.num_tensors} tensors, {size} in {count}, to {exported.folder}", *exported.notes, sep="\n"
    )


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
    """Write a checkpoint of any front end as a folder that transformers and peft load; see `parsers.export`."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"`{folder}` is a file: give a folder")
    if folder.resolve() in (checkpoint.resolve(), base and base.resolve()):
        raise ConfigError(f"`{folder}` would be read and written at once: give another folder")
    with ExitStack() as opened:
        found, num_masters = open_checkpoint(checkpoint, opened), 0
        if dtype in (torch.float32, torch.float16):  # they hold more of master weights than bfloat16 weights have
            found.tensors, num_masters = _with_masters(found.tensors, found.masters())
        lora = _adapter_config(found, adapter_config)
        source = base
        if source is None and lora is not None:
            name = lora.get("base_model_name_or_path")
            if not name or not Path(name).is_dir():
                raise ConfigError(
                    f"the adapter in `{found.path}` was trained on {name!r}, which is no folder: give it with --base"
                )
            source = Path(name)
        under = Checkpoint(found.path, [], {}) if source is None else open_checkpoint(source, opened)
        files = {**under.files, **found.files}
        if CONFIG not in files:
            raise ConfigError(f"`{found.path}` has no {CONFIG}: give the folder of the trained model, with --base")
        config = json_object(files[CONFIG], CONFIG)
        config.pop("quantization_config", None)
        files.pop(ADAPTER_CONFIG, None)
        state = [replace(tensor, name=_WRAPPERS.sub("", tensor.name)) for tensor in found.tensors]
        adapters = [tensor for tensor in state if _ADAPTER.search(tensor.name)]
        if adapters and lora is None:
            raise ConfigError(
                f"`{found.path}` has adapters, and does not say how they are scaled: give their {ADAPTER_CONFIG} with "
                "--adapter-config (peft: model.peft_config['default'].save_pretrained(FOLDER))"
            )
        if not adapters and adapter_config is not None:
            raise ConfigError(f"`{found.path}` needs no --adapter-config: it has no adapters in its state dict")
        if only_adapter and not adapters:
            raise ConfigError(f"`{found.path}` has no adapter, or is an adapter's folder: leave out --only-adapter")
        if only_adapter and dtype is not None:
            raise ConfigError("an adapter alone keeps its dtype: leave out --dtype or --only-adapter")
        if adapters:
            state = [replace(each, name=_plain_name(each.name)) for each in state if not _ADAPTER.search(each.name)]
        computes_in = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), None)
        computes_in = computes_in if isinstance(computes_in, torch.dtype) else torch.float32
        model = build_empty(config)
        own, num_others = _of_model(dequantised(state, computes_in), models.model_weights(model))
        weights = _Weights(model, own, dequantised(under.tensors, computes_in))
        if lora is not None and (adapters or found.is_adapter):
            adapted = _with_adapter(model, found, adapters, lora)
            if only_adapter:
                return _save_adapter(adapted, files, folder, base)
            weights.merge(adapted)
        _refuse_mixture(folder, (ADAPTER_CONFIG, ADAPTER_WEIGHTS), "an adapter")
        tensors = weights.tensors
        if dtype is not None:
            tensors = [each._replace(dtype=dtype) if each.dtype.is_floating_point else each for each in tensors]
        written = models.save_tensors(tensors, folder, max_shard_bytes)
        name = str(next((each.dtype for each in tensors if each.dtype.is_floating_point), torch.float32))
        keys = {"dtype", *({"torch_dtype"} & config.keys())}  # older tools read the second
        config |= {"architectures": [type(model).__name__], **dict.fromkeys(keys, name.removeprefix("torch."))}
        _write(folder, {**files, CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()})
    notes = weights.notes()
    if num_masters:
        notes.append(f"{num_masters} weights are the float32 master weights of the optimizer")
    elif dtype is torch.float32:
        notes.append("the checkpoint has no float32 master weights beside its weights")
    if num_others:
        notes.append(f"left out {num_others} tensors of other modules")
    return Exported(folder, written, len(tensors), [*notes, *_note_of_tokenizer(folder)])


def _adapter_config(found: Checkpoint, given: Path | None) -> dict[str, Any] | None:
    """Return the config of an adapter: as given, of a folder of peft, or of a file of the main job; else None."""
    path = given or (found.path if found.is_adapter else None)
    if path is None:
        text = found.files.get(ADAPTER_CONFIG)
        return None if text is None else json_object(text, f"{ADAPTER_CONFIG} in `{found.path}`")
    path = path / ADAPTER_CONFIG if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"there is no `{path}`: give the {ADAPTER_CONFIG} that peft writes (config.save_pretrained)")
    return json_object(path.read_bytes(), f"`{path}`")


def _plain_name(name: str) -> str:
    """Return the name that a base weight has in the model without adapters."""
    for part in _OWN_PARTS:
        name = name.replace(f"{part}.", ".")
    return name.replace(_INSIDE, "", 1)


def _note_of_tokenizer(folder: Path) -> list[str]:
    found = (folder / "tokenizer_config.json").is_file()
    return [] if found else ["no tokenizer was found: give a folder that has one with --base, or save one there"]


def build_empty(config: Mapping[str, Any]) -> Any:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(dict(config)))
        try:
            made = without_code(transformers.AutoConfig.from_pretrained, folder)
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"the {CONFIG} names no model that transformers knows: {error}") from error
    kind = next(iter(made.architectures or ()), "")
    model_class = getattr(transformers, kind, transformers.AutoModelForCausalLM)
    with models.empty_weights():
        return build_model(model_class, made, torch.float32)


class _Weights:
    """Weights of a model and where their values are: in the checkpoint (`own`), else in the base model (`below`)."""

    def __init__(self, model: Any, own: Sequence[CheckpointTensor], below: Sequence[CheckpointTensor]) -> None:
        weights, names = models.model_weights(model), FileNames(model)
        found = dict(names(own))
        given = {id(weights[name]) for name in found if name in weights}
        found |= {name: tensor for name, tensor in names(below) if name in weights and id(weights[name]) not in given}
        if conversions := names.used():
            model._weight_conversions = conversions  # written under the names in the files
        matches = models.match_names(model, list(found.items()), completes=False)
        models.refuse_mismatch(matches, model)
        self._sources: dict[str, WeightSource] = {}
        for read in matches.reads:
            first = self._sources.setdefault(read.weight.names[0], read.source)
            if first is not read.source and not read.source.holds(first.values()):
                raise CheckpointError(
                    f"`{first.name}` and `{read.source.name}` are tied in the model and differ in the checkpoint. "
                    "Give a config that does not tie them (tie_word_embeddings: false)"
                )
        self._names = {name: weight.names for name, weight in weights.items()}
        self._merged: dict[str, Callable[[], Tensor]] = {}
        later = {
            name: models.LaterValues(source.dtype, partial(self._value, name)) for name, source in self._sources.items()
        }
        self.tensors = with_original_names(model, models.named_tensors(model, None, later))

    def _base_value(self, name: str) -> Tensor:
        return self._sources[self._names[name][0]].values()

    def _value(self, name: str) -> Tensor:
        return self._merged[name]() if name in self._merged else self._base_value(name)

    def notes(self) -> list[str]:
        layers = {name.rpartition(".")[0] for name in self._merged}
        plain = sum(isinstance(each, CheckpointTensor) and each.is_dequantised for each in self._sources.values())
        found = [f"merged an adapter into {len(layers)} layers"] if layers else []
        if plain:
            found.append(f"dequantised {plain} weights of bitsandbytes: they have the numbers of the training")
        return found

    def merge(self, adapted: Any) -> None:
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
                    f"`{name}` is trained through {type(module).__name__}, which is not merged: use --only-adapter"
                )
            elif isinstance(module, BaseTunerLayer):
                keys = [key for key, _ in module.get_base_layer().named_parameters(recurse=False)]
                self._merged |= {f"{name}.{key}": partial(self._merge_layer, module, name, key) for key in keys}
        tied = next((name for name in self._merged if len(self._names[name]) > 1), None)
        if tied is not None:
            raise UnsupportedError(
                f"the adapter changes `{tied}`, which the model ties to another weight "
                f"({', '.join(self._names[tied])}): merged, they would differ. Use --only-adapter"
            )

    @torch.no_grad()
    def _merge_layer(self, layer: Any, name: str, key: str) -> Tensor:
        base = layer.get_base_layer()
        before = dict(base._parameters)
        try:
            for each in [each for each, parameter in before.items() if parameter is not None]:
                own = self._base_value(f"{name}.{each}").clone()  # `merge` writes into it
                base._parameters[each] = nn.Parameter(own, requires_grad=False)
            layer.merge()
            return base._parameters[key].data
        finally:
            base._parameters.update(before)
            layer.merged_adapters.clear()


def _of_model(tensors: Sequence[CheckpointTensor], known: Mapping[str, Any]) -> tuple[list[CheckpointTensor], int]:
    """Return the tensors of the model under its own names, and how many belong to other modules."""
    prefixes: Counter[str] = Counter()  # of a module that holds the model as an attribute
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


def _with_adapter(model: Any, found: Checkpoint, tensors: Sequence[CheckpointTensor], config: Mapping[str, Any]) -> Any:
    """Return the peft model around a model, with the adapter of a folder of peft, or of tensors of a state dict."""
    from peft import PeftConfig, get_peft_model_state_dict

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, ADAPTER_CONFIG).write_text(json.dumps(dict(config)))
        made = PeftConfig.from_pretrained(folder)
    model.name_or_path = made.base_model_name_or_path or ""  # else peft renames it to a folder that is gone
    names_in_file = {match[1] for tensor in tensors if (match := _ADAPTER.search(tensor.name))}
    name, *others = sorted(names_in_file) or ["default"]
    if others:
        raise UnsupportedError(f"the checkpoint has several adapters ({name}, {', '.join(others)}): export needs one")
    if "/" in name or "\\" in name:  # peft makes a folder of this name
        raise CheckpointError(f"the checkpoint is damaged or crafted: its adapter has the name {name!r}, a path")
    try:
        adapted = in_peft_model(model, made, adapter_name=name, low_cpu_mem_usage=True)
    except ValueError as error:
        raise CheckpointError(f"the adapter's config does not fit the model: {error}") from error
    own = adapted.state_dict()
    if found.is_adapter:
        path = found.path / ADAPTER_WEIGHTS
        if not path.is_file():
            raise CheckpointError(f"`{found.path}` has no {ADAPTER_WEIGHTS}: save the adapter as safetensors")
        with open_weights(path) as (file,):
            given = {tensor.name: tensor.values() for tensor in tensors_of([file])}
        # as peft does when it loads: 16-bit adapters compute in float32
        given = {name: value.float() if ".lora_" in name else value for name, value in given.items()}
        name_of = {id(tensor): name for name, tensor in own.items()}
        saved = get_peft_model_state_dict(adapted, state_dict=own, save_embedding_layers=False)
        names = {name: name_of[id(tensor)] for name, tensor in saved.items()}
    else:
        given = {_INSIDE + tensor.name.rpartition(_INSIDE)[2]: tensor.values() for tensor in tensors}
        names = {name: name for name in own if _ADAPTER.search(name)}
    if given.keys() != names.keys():
        more, less = sorted(given.keys() - names.keys()), sorted(names.keys() - given.keys())
        raise CheckpointError(
            f"the adapter has {len(more)} tensors that its config does not make, and lacks {len(less)} "
            f"(such as `{(more + less)[0]}`): give the {ADAPTER_CONFIG} that it was trained with"
        )
    try:  # not with peft, which would move the values to the base weights: the meta device
        adapted.load_state_dict({names[name]: value for name, value in given.items()}, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the adapter does not fit its {ADAPTER_CONFIG}: {error}") from error
    return adapted


def _save_adapter(adapted: Any, files: dict[str, bytes], folder: Path, base: Path | None) -> Exported:
    _refuse_mixture(folder, (CONFIG, SINGLE_FILE, INDEX_FILE), "a model")
    if base is not None:
        adapted.active_peft_config.base_model_name_or_path = str(base)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)  # else it asks the hub about them
    _write(folder, {name: text for name, text in files.items() if name not in MODEL_FILES})
    path = folder / ADAPTER_WEIGHTS
    with open_weights(path) as (file,):
        return Exported(folder, [path], len(tensors_of([file])), _note_of_tokenizer(folder))


def _refuse_mixture(folder: Path, names: Iterable[str], what: str) -> None:
    """Refuse a folder in which tools would find an adapter and another model, and put the one on the other."""
    found = next((name for name in names if (folder / name).exists()), None)
    if found is not None:
        raise ConfigError(f"`{folder}` has `{found}` of {what}, and would be read as both: give another folder")


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
