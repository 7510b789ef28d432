"""What a checkpoint of any front end holds for an export: weights that are read when they are written, and files.

| front end | what is there |
|---|---|
| Lightning | a file with ``state_dict`` |
| Lightning, several processes | a folder with ``meta.pt`` and ``.metadata`` |
| Fabric | a file with a state dict, or with one beside other entries |
| Accelerate (`save_state`) | a folder with ``model.safetensors`` or ``pytorch_model.bin``, without config |
| Accelerate, several processes | a folder with a folder ``sharded_model_N`` for each model |
| Hugging Face Trainer, transformers | a folder with ``config.json`` and weights |
| peft, and the Trainer with it | a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` |

A run with 16-bit weights keeps float32 master weights: whole, in our entry of a checkpoint, or split, as an int16
remainder in the optimizer's state. Lightning has both in its one file, Fabric in what the user saved of the optimizer,
Accelerate and the Trainer in a file of the optimizer.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning
from lightning_cxl.optim.parameter_state import REMAINDER
from lightning_cxl.optim.saved_state import joined
from lightning_cxl.run.checkpoint import load_file, names_by_key
from lightning_cxl.run.sharded_checkpoint import TIED, is_sharded_checkpoint
from lightning_cxl.run.sharded_reading import ShardedCheckpoint
from lightning_cxl.run.state_on_ssd import KEY, is_reference
from lightning_cxl.weights.files import (
    INDEX_FILE,
    SINGLE_FILE,
    WeightSource,
    open_weights,
    tensors_of,
)

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
_BESIDE_4BIT = re.compile(
    r"(?P<name>.*weight)\.(?P<key>absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)"
)
_BESIDE_8BIT = re.compile(r"(?P<prefix>.*\.)(?P<key>SCB|weight_format)")


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
    """What a checkpoint holds for an export."""

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
        found |= own.get("master_weights") or {}
        all_names = own.get("optimizer_param_names") or [None] * len(states)
        for state, names in zip(states, all_names, strict=True):
            name_of = names_by_key(state, names)
            for key, entry in state["state"].items():
                remainder = entry.get(REMAINDER)
                if is_reference(remainder):
                    raise ConfigError(
                        "the checkpoint refers to master weights on SSD: write a whole one with "
                        "`lightning_cxl.plain_checkpoint` and export that, or leave out --dtype"
                    )
                if isinstance(remainder, Tensor) and remainder.dtype is torch.int16 and key in name_of:
                    found[name_of[key]] = remainder
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
        if found := _BESIDE_4BIT.fullmatch(each.name):
            beside.setdefault(found["name"], {})[found["key"]] = each
        elif found := _BESIDE_8BIT.fullmatch(each.name):
            beside.setdefault(found["prefix"] + "weight", {})[found["key"]] = each
        else:
            plain.append(each)
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
