"""Models of transformers: `from_pretrained`, with weights straight on their tier, and `save_pretrained`.

transformers is imported when a model is loaded, not with this package.
"""

import copy
import difflib
import functools
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError, warn
from lightning_cxl.memory.hook import new_weight
from lightning_cxl.memory.host_memory import large_blocks_apart
from lightning_cxl.streaming.quantised import warn_of_wide_experts
from lightning_cxl.weights import models
from lightning_cxl.weights.files import FileTensor, MergedTensor, NamedTensor, Translate, WeightSource, open_weights

_KINDS = ("Params4bit", "Int8Params")


class Quantizer:
    """Replaces layers of a model on the meta device, and gives tensors of files to the weights of these layers.

    `settings` are a ``BitsAndBytesConfig`` or a dictionary of its fields, `saved` is what the config of the files says.
    """

    def __init__(self, settings: Any, saved: Any) -> None:
        from transformers.quantizers.auto import AutoHfQuantizer

        self.is_saved = saved is not None
        for given, verb in ((saved, "are"), (settings, "are to be")):
            if given is not None and _library(given) != "bitsandbytes":
                raise UnsupportedError(
                    f"weights {verb} quantised by {_library(given)}; this version knows bitsandbytes (4 and 8 bit). "
                    "Load with `from_pretrained` of transformers."
                )
        try:
            merged = AutoHfQuantizer.merge_quantization_configs(saved, settings) if self.is_saved else settings
            self._own = AutoHfQuantizer.from_config(merged, pre_quantized=self.is_saved)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"quantization_config: {error}") from error
        config = self._own.quantization_config
        for field, why in (
            ("llm_int8_has_fp16_weight", "keeps the full-precision weights"),
            ("llm_int8_enable_fp32_cpu_offload", "leaves weights for the CPU as they are, which tiers do instead"),
        ):
            if getattr(config, field) and not self.is_saved:
                raise UnsupportedError(f"{field}=True {why}: leave it out")
        if config.quantization_method() is None:
            raise ConfigError(
                f"bnb_4bit_quant_type={config.bnb_4bit_quant_type!r} with load_in_4bit={config.load_in_4bit} and "
                f"load_in_8bit={config.load_in_8bit} quantises nothing: take load_in_8bit=True, or load_in_4bit=True "
                'with "nf4" or "fp4"'
            )
        try:
            self._own.validate_environment(device_map={"": "cpu"}, weights_only=True)
        except (ImportError, RuntimeError) as error:
            raise UnsupportedError(f"weights cannot be quantised here: {error}") from error

    def replace_layers(self, model: Any) -> None:
        """Put layers of bitsandbytes in the place of those that are to be quantised, as transformers chooses them."""
        from transformers.modeling_utils import local_torch_dtype

        with local_torch_dtype(model.dtype):
            self._own.preprocess_model(model=model, dtype=model.dtype, device_map=None)
        for name, _ in _quantised_parameters(model):
            bias = model.get_submodule(name.rpartition(".")[0]).bias
            if bias is not None:
                bias.requires_grad_(True)  # as all that transformers loads and does not quantise
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        weights = dict(_quantised_parameters(model))
        both = next(
            ((name, other) for pair in tied.items() for name, other in (pair, pair[::-1]) if name in weights), None
        )
        if both is not None:
            raise UnsupportedError(
                f"`{both[0]}` is to be quantised, and is tied to `{both[1]}`, which is not. Name its module in "
                "llm_int8_skip_modules, or leave that out: by default tied weights are not quantised."
            )

    def translate(self, model: Any, names: Translate) -> Translate:
        """Return a translation of names that also brings together what belongs to one quantised weight."""
        parameters = dict(_quantised_parameters(model))

        def translated(tensors: Sequence[WeightSource]) -> list[tuple[str, WeightSource]]:
            weights, beside = models.with_beside(tensors) if self.is_saved else (tensors, {})
            found = []
            for name, source in names(weights):
                meta = parameters.get(name)
                if meta is not None and isinstance(source, FileTensor):
                    if self.is_saved:
                        source = models.SavedQuantised(source, beside.get(source.name, {}), meta)
                    elif model.get_submodule(name.rpartition(".")[0]).source_cls is not nn.Linear:
                        # a Conv1D of GPT-2, whose weight has the other orientation
                        source = MergedTensor([source], lambda parts: parts.pop().T)
                found.append((name, source))
            return found

        return translated

    def fill_on_meta(self, model: Any) -> None:
        for name, parameter in list(_quantised_parameters(model)):
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.weight = models.quantised_like(
                parameter, parameter.dtype, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
            )
        model.hf_quantizer = self._own
        self._own.postprocess_model(model)

    def complete(self, model: Any, report: models.LoadReport) -> None:
        missing = [name for name, parameter in _quantised_parameters(model) if parameter.is_meta]
        if missing:
            raise CheckpointError(
                f"{len(missing)} weights that are to be quantised are in no file, such as `{missing[0]}`: complete the "
                f"files, or name what is new in llm_int8_skip_modules. {report.num_tensors} tensors have been loaded."
            )
        model.hf_quantizer = self._own
        self._own.postprocess_model(model)


def _library(config: Any) -> str:
    fields = config if isinstance(config, dict) else vars(config)
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return "bitsandbytes"  # older configs say no more
    method = fields.get("quant_method")
    return str(getattr(method, "value", method))


def _quantised_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name, each) for name, each in model.named_parameters() if type(each).__name__ in _KINDS)


# A quantised base and adapters on top, as options name them: peft makes the adapters, bitsandbytes quantises.


def quantization_fields(option: str | Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a ``BitsAndBytesConfig``: "4bit" is NF4 with quantised scales, "8bit" is LLM.int8()."""
    if isinstance(option, Mapping):
        from transformers import BitsAndBytesConfig

        unknown = sorted(option.keys() - BitsAndBytesConfig().to_dict().keys())
        if unknown:
            raise ConfigError(f"quantization: BitsAndBytesConfig has no field {', '.join(unknown)}")
        if not (option.get("load_in_4bit") or option.get("load_in_8bit")):
            raise ConfigError(f"quantization={dict(option)} needs load_in_4bit or load_in_8bit to be true")
        return dict(option)
    if option == "8bit":
        _log_each_once(logging.getLogger("bitsandbytes.autograd._functions"))
        return {"load_in_8bit": True}
    if option != "4bit":
        raise ConfigError(f'quantization must be "4bit", "8bit" or fields of BitsAndBytesConfig, not {option!r}')
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }


@functools.cache
def _log_each_once(logger: logging.Logger) -> None:
    """Let a logger emit each of its messages once: of 8-bit layers, every forward warns of the same cast."""
    logged: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(logged)
        logged.add(record.getMessage())
        return len(logged) > before

    logger.addFilter(is_new)


def with_adapters(model: nn.Module, options: Mapping[str, Any]) -> Any:
    """Return the peft model around a model, which gets adapters, without memory where its first weight has none."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UnsupportedError("adapters need peft: pip install peft") from error
    fields: dict[str, Any] = {"task_type": "CAUSAL_LM", **options}
    try:
        with warnings.catch_warnings():
            if options.keys().isdisjoint({"rank_pattern", "alpha_pattern"}):  # those that peft itself has of experts
                warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern", category=RuntimeWarning)
            return in_peft_model(model, LoraConfig(**fields), low_cpu_mem_usage=next(model.parameters()).is_meta)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft does not take the options lora={dict(options)}: {error}") from error


def in_peft_model(model: nn.Module, config: Any, **options: Any) -> Any:
    """Call `get_peft_model` without what peft 0.21 makes transformers 5 warn of: not for our user to act on."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        deprecated = ".is_gradient_checkpointing. is deprecated"
        warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
        return get_peft_model(model, config, **options)


_INITIALIZED = "_is_hf_initialized"  # how transformers marks what its initialisation must leave alone


def from_pretrained(
    model_class: Any,
    folder: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    strict: bool = True,
    mapped: bool | None = None,
    quantization_config: Any = None,
    **config_overrides: Any,
) -> Any:
    """Build a transformers model without weights and load them, each straight into the memory it will stay in.

    The result equals what ``model_class.from_pretrained(folder)`` returns, bit by bit: in evaluation mode, weights
    tied, generation settings read. See `load_weights` for where weights go and what errors say. Tensors of which
    transformers makes one (experts) take up to twice that weight's memory meanwhile, one weight after the other.

    With a `quantization_config`, weights are quantised while they are read: at no time is there more than what they
    take quantised and a few chunks, see [Note: Quantising while loading]. Files that bitsandbytes has quantised load
    as they are.

    Args:
        model_class: ``AutoModelForCausalLM`` or another class of transformers.
        folder: with ``config.json`` and safetensors files.
        dtype: of the model; None: what the config says, else that of the files.
        strict: refuse when weights are missing, or files hold more than the model has; False: initialise the missing
            (a new head) as transformers does, and warn.
        mapped: weights show the pages of the files, and take no memory until a run moves them; None: where several
            processes have met. See `load_weights`.
        quantization_config: a ``BitsAndBytesConfig`` of transformers, 4 or 8 bit, or a dictionary of its fields; None:
            nothing is quantised that is not so in the files. For files that are, the way they were quantised counts.
        **config_overrides: fields of the config, such as ``attn_implementation="eager"``.

    Raises:
        CheckpointError: files are missing or damaged, or do not fit the model.
        ConfigError: there is no such folder, or it has no config.
        UnsupportedError: files or settings of another quantising library than
            bitsandbytes, or that is not installed.
        TierFullError: the weights do not fit in memory.

    Example::

        model = lightning_cxl.from_pretrained(AutoModelForCausalLM, "folder", torch.bfloat16)
        four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
        model = lightning_cxl.from_pretrained(AutoModelForCausalLM, "folder", quantization_config=four_bit)
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}; give one of torch, such as torch.bfloat16, or None for the config's")
    path = Path(fspath(folder))
    config = _config(model_class, path, config_overrides)
    saved = None  # how the files are quantised, which goes out of the config
    for each in (config, config.get_text_config(decoder=True)):
        if saved is None and getattr(each, "quantization_config", None) is not None:
            saved = each.quantization_config
            del each.quantization_config
    quantizer = None if quantization_config is None and saved is None else Quantizer(quantization_config, saved)
    with large_blocks_apart() if quantizer is not None else nullcontext():  # also while modules are made
        with models.empty_weights():
            model = build_model(model_class, config, dtype or _dtype(config, path))
        if quantizer is not None:
            quantizer.replace_layers(model)
        _keep_wide(model)
        warn_of_wide_experts(model)
        names = FileNames(model)
        translate = names if quantizer is None else quantizer.translate(model, names)
        report = models.load_translated(model, path, translate, strict=strict, mapped=mapped)
        model._weight_conversions = names.used()  # so that it is saved under the names that it came with
        if quantizer is not None:
            quantizer.complete(model, report)
        _complete(model, report)
        model.tie_weights()
    if model.can_generate() and (path / "generation_config.json").is_file():
        model.generation_config = type(model.generation_config).from_pretrained(path)
    return model.eval()


def save_pretrained(
    model: Any, folder: str | PathLike[str], max_shard_bytes: int | str = "5GiB", dtype: torch.dtype | None = None
) -> list[Path]:
    """Write a transformers model as a folder that `from_pretrained` loads, ours and that of transformers.

    Weights are written as `save_weights` does, under the names that other tools know, then the config and generation
    settings. Tensors that transformers merged when it loaded the model stay merged, with a warning.

    Args:
        model: of transformers, on any device.
        folder: is created; of an earlier save, the same files are replaced.
        max_shard_bytes: above this size the weights become several files and an index.
        dtype: of the weights in the files; None: the one they have.

    Returns:
        The files with weights.

    Raises:
        CheckpointError: the file system refused, or the model has no values yet.
        ConfigError: `max_shard_bytes` is no size, or `folder` a file.
    """
    path = Path(fspath(folder))
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`{path}` is a file: give a folder")
    written = models.save_tensors(with_original_names(model, models.named_tensors(model, dtype)), path, max_shard_bytes)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype or model.dtype
    config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)
    return written


def with_original_names(model: Any, tensors: list[NamedTensor]) -> list[NamedTensor]:
    """Return tensors under the names in the files of other tools, where transformers has others in memory."""
    from transformers.core_model_loading import revert_weight_conversion

    # it works on tensors: with ones that have no memory only names are translated, and one that comes back is renamed
    empty = {item.name: torch.empty_like(item.tensor, device="meta") for item in tensors}
    names = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(empty)).items()}
    merged = [name for name, tensor in empty.items() if id(tensor) not in names]
    if merged:
        warn(
            f"{len(merged)} tensors of {type(model).__name__} are merged from several, such as `{merged[0]}`, and are "
            "saved so: transformers 5 and `lightning_cxl.from_pretrained` load these files, other tools do not.",
            level=3,
        )
    return [item._replace(name=names.get(id(empty[item.name]), item.name)) for item in tensors]


def without_code(load: Callable[..., Any], name: str | Path, **options: Any) -> Any:
    """Call a `from_pretrained` of transformers so that it never runs a model's Python code, and never asks to."""
    try:
        return load(name, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ConfigError(
            "the model needs Python code of its own (`auto_map` in its config.json), and such code is never run here "
            "(trust_remote_code=False): it could do with this machine whatever you can. Use a model that transformers "
            "has itself; or read that code, keep it as a module of yours, and give the class in it: "
            "`lightning_cxl.from_pretrained(TheClass, folder)`"
        ) from error


def _config(model_class: Any, path: Path, overrides: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise ConfigError(
            f"`{path}` is not a folder with a config.json. Give the folder of a transformers model; a model of the Hub "
            "must be downloaded first (`hf download NAME --local-dir FOLDER`)."
        )
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    config = without_code(config_class.from_pretrained, path, **overrides)
    unknown = [name for name in overrides if not hasattr(config, name) and name != "attn_implementation"]
    if unknown:
        raise ConfigError(f"{type(config).__name__} has no field {', '.join(map(repr, unknown))}")
    config.name_or_path = str(path)
    return config


def _dtype(config: Any, path: Path) -> torch.dtype:
    named = getattr(config, "dtype", None)
    if named is not None:
        return getattr(torch, named) if isinstance(named, str) else named  # type: ignore[no-any-return]
    with open_weights(path) as files:
        found = (entry.dtype for file in files for entry in file.entries.values() if entry.dtype.is_floating_point)
        return next(found, torch.get_default_dtype())


def build_model(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    # an auto class offers the same under a public name
    make = getattr(model_class, "from_config", None) or getattr(model_class, "_from_config", None)
    if make is None:
        raise ConfigError(f"{model_class!r} is not a model class of transformers, such as AutoModelForCausalLM")
    return make(config, dtype=dtype)


def _keep_wide(model: Any) -> None:
    """Make weights float32 that a model wants to stay so when the rest is 16 bit."""
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if model.dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or ()
    if model.dtype not in (torch.float16, torch.bfloat16) or not patterns:
        return
    wide = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    for name, parameter in model.named_parameters():
        if wide.search(name) and parameter.is_floating_point():
            parameter.data = parameter.data.float()  # on the meta device


class FileNames:
    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self._model = model
        self._all = get_model_conversion_mapping(model)
        self._renamings = [conversion for conversion in self._all if isinstance(conversion, WeightRenaming)]
        self._converters = [conversion for conversion in self._all if isinstance(conversion, WeightConverter)]
        self._own = model.state_dict()

    def __call__(self, tensors: Sequence[WeightSource]) -> list[tuple[str, WeightSource]]:
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        found: list[tuple[str, WeightSource]] = []
        groups: dict[str, list[tuple[WeightSource, str]]] = {}
        for tensor in tensors:
            prefix = self._model.base_model_prefix
            name, pattern = rename_source_key(tensor.name, self._renamings, self._converters, prefix, self._own)
            if tensor.name in self._own and name not in self._own:
                found.append((tensor.name, tensor))
            elif pattern is None:
                found.append((name, tensor))
            else:
                groups.setdefault(name, []).append((tensor, pattern))
        for name, group in groups.items():  # experts in the order of their numbers, whichever file they are in
            found += self._merged(name, sorted(group, key=lambda part: dot_natural_key(part[0].name)))
        return found

    def _merged(self, name: str, group: list[tuple[WeightSource, str]]) -> list[tuple[str, WeightSource]]:
        sources, patterns = [tensor for tensor, _ in group], [pattern for _, pattern in group]
        converter = next(one for one in self._converters if patterns[0] in one.source_patterns)

        def convert(parts: list[torch.Tensor]) -> dict[str, Any]:
            own = copy.deepcopy(converter)
            for source, pattern in zip(sources, patterns, strict=True):
                own.add_tensor(name, source.name, pattern, parts.pop(0))  # the converter frees each as soon as it can
            result: dict[str, Any] = own.convert(name, model=self._model, config=self._model.config)
            return {key: value[0] if isinstance(value, list) else value for key, value in result.items()}

        try:
            targets = list(convert([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in sources]))
            return [(key, MergedTensor(sources, lambda parts, key=key: convert(parts)[key])) for key in targets]  # type: ignore[misc]
        except Exception as error:
            raise CheckpointError(
                f"{len(sources)} tensors of the files, `{sources[0].name}` to `{sources[-1].name}`, do not make up "
                f"`{name}`: {error}. Complete the files."
            ) from error

    def used(self) -> list[Any]:
        return [conversion for conversion in self._all if conversion.was_used()]


def _complete(model: Any, report: models.LoadReport) -> None:
    """Initialise weights that no file holds as transformers does, and say what did not fit."""
    if report.missing_keys or report.unexpected_keys:
        warn(
            f"{type(model).__name__}: newly initialised, because no file holds them: {report.missing_keys or 'none'}. "
            f"In the files but not in the model: {report.unexpected_keys or 'none'}.",
            level=3,
        )
    weights = models.distinct(models.model_weights(model))
    missing = set(report.missing_keys) | {weight.names[0] for weight in weights if weight.tensor.is_meta}
    if not missing:
        return
    for weight in weights:
        meta = weight.tensor
        if meta.is_meta:
            memory = new_weight(meta, meta.dtype, weight.spec)
            weight.put(nn.Parameter(memory, requires_grad=meta.requires_grad) if weight.is_parameter else memory)
        if weight.names[0] not in missing:
            setattr(weight.tensor, _INITIALIZED, True)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        setattr(module, _INITIALIZED, not any(key.startswith(prefix) for key in missing))
    model.initialize_weights()


class Published(NamedTuple):
    hub_id: str  # of its ``config.json`` on the Hugging Face hub
    config: Mapping[str, Any]


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"
)  # fmt: skip


def _of(hub_id: str, model_type: str, *sizes: int, **others: Any) -> Published:
    # positions shape nothing; longer than any sequence
    config = {"model_type": model_type, "max_position_embeddings": 1 << 20, "tie_word_embeddings": False}
    return Published(hub_id, {**config, **dict(zip(_SIZES, sizes, strict=True)), **others})


_TIED: dict[str, Any] = {"tie_word_embeddings": True}
_FULL: dict[str, Any] = {"sliding_window": None}

SHAPES: Mapping[str, Published] = {
    "qwen2.5-0.5b": _of("Qwen/Qwen2.5-0.5B", "qwen2", 151936, 896, 4864, 24, 14, 2, **_TIED),
    "qwen2.5-1.5b": _of("Qwen/Qwen2.5-1.5B", "qwen2", 151936, 1536, 8960, 28, 12, 2, **_TIED),
    "qwen2.5-3b": _of("Qwen/Qwen2.5-3B", "qwen2", 151936, 2048, 11008, 36, 16, 2, **_TIED),
    "qwen2.5-7b": _of("Qwen/Qwen2.5-7B", "qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _of("Qwen/Qwen2.5-14B", "qwen2", 152064, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _of("Qwen/Qwen2.5-32B", "qwen2", 152064, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _of("Qwen/Qwen2.5-72B", "qwen2", 152064, 8192, 29568, 80, 64, 8),
    "mistral-7b": _of("mistralai/Mistral-7B-v0.3", "mistral", 32768, 4096, 14336, 32, 32, 8, **_FULL),
    "mistral-nemo-12b": _of(
        "mistralai/Mistral-Nemo-Base-2407", "mistral", 131072, 5120, 14336, 40, 32, 8, head_dim=128, **_FULL
    ),
    "llama-3.2-1b": _of("meta-llama/Llama-3.2-1B", "llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, **_TIED),
    "llama-3.2-3b": _of("meta-llama/Llama-3.2-3B", "llama", 128256, 3072, 8192, 28, 24, 8, head_dim=128, **_TIED),
    "llama-3.1-8b": _of("meta-llama/Llama-3.1-8B", "llama", 128256, 4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _of("meta-llama/Llama-3.1-70B", "llama", 128256, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _of("meta-llama/Llama-3.1-405B", "llama", 128256, 16384, 53248, 126, 128, 8),
}


def published(name: str) -> Published | None:
    """Return the architecture of a shape's name or of its hub id, None if there is none. Case does not matter."""
    wanted = name.lower()
    return SHAPES.get(wanted) or next((each for each in SHAPES.values() if each.hub_id.lower() == wanted), None)


def nearest(name: str) -> list[str]:
    return difflib.get_close_matches(name.lower().rpartition("/")[2], SHAPES, n=3, cutoff=0.7)


_HUB_SECONDS = 5.0
_CONFIGS = ("config.json", "adapter_config.json")


def require_model(name: str, nor: str = "", *, needs_weights: bool = False) -> None:
    """Check that `name` is a folder with a model's config, or the id of a model that the hub or its cache has.

    A model that is cached is not asked for. Else the hub is asked once, for a few seconds.
    """
    if Path(name).is_dir():
        if not any((Path(name) / config).is_file() for config in _CONFIGS):
            raise ConfigError(f"folder {name!r} has no config.json: save the model's config there")
        return
    if is_cached(name):
        return
    if needs_weights and name.lower() in SHAPES:
        raise ConfigError(f"{name!r} is a shape that `plan` knows, without weights: use {SHAPES[name.lower()].hub_id}")
    problem = _ask_hub(name)
    if problem is not None:
        found = [f"{each} ({SHAPES[each].hub_id})" for each in nearest(name)]
        similar = f": did you mean {' or '.join(found)}?" if found else "."
        raise ConfigError(f"there is no model {name!r}{similar} It is no folder{nor}, and {problem}")


def is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, config), str) for config in _CONFIGS)
    except HFValidationError:
        return False


def _ask_hub(name: str) -> str | None:
    """Return what speaks against a hub id, None where the hub does not deny it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    owner, _, rest = name.partition("/")
    if not rest or "/" in rest or owner in (".", "..", "~", ""):
        return f"no hub id, which names the owner too, such as {SHAPES['qwen2.5-0.5b'].hub_id}"
    why = "HF_HUB_OFFLINE is set"
    if not constants.HF_HUB_OFFLINE:
        try:
            HfApi().model_info(name, timeout=_HUB_SECONDS)
            return None
        except RepositoryNotFoundError:
            return "the hub has no such model (one that is private needs `hf auth login`)"
        except HfHubHTTPError:
            return None  # a mirror without this question: the download says what is wrong
        except Exception as error:  # whatever huggingface_hub's client raises for an address that cannot be reached
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"the hub cannot be asked ({constants.ENDPOINT}: {why}), and {constants.HF_HUB_CACHE} does not have it. "
        "Without network, give a folder with the model, or a cache that has it: `hf download` fills one elsewhere, "
        "HF_HOME names the folder around it. HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror"
    )


def model_on_meta(name: str) -> Any:
    """Return a model of transformers whose parameters and buffers have no memory, in training mode."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    shape, is_folder = published(name), Path(name).is_dir()
    if shape is not None and not is_folder:
        fields = dict(shape.config)
        config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    else:
        require_model(name, f", no known shape ({', '.join(SHAPES)})")
        try:
            config = without_code(AutoConfig.from_pretrained, name, local_files_only=is_folder or is_cached(name))
        except Exception as error:  # as below
            where = f"the config.json in {name!r}" if is_folder else f"the config of {name!r}"
            raise ConfigError(f"{where} cannot be used: {_reason(error)}") from error
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                f"the weights of {name!r} are quantised, and `plan` quantises itself (--lora R --quantize 4bit): name "
                "the model that they were made from. A run plans itself when it begins, too, and its report shows it"
            )
    try:
        with models.empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever transformers trips over in a config that has been written by hand
        raise ConfigError(f"{name!r} makes no causal language model: {_reason(error)}") from error
    return model.to("meta").train()


def with_lora(model: Any, rank: int, quantize: str | None) -> Any:
    """Return the model that trains adapters on all linear layers of its blocks, as the main job makes it."""
    if quantize is not None:
        # numbers above the threshold are kept apart; without values their count is not known
        fields = {**quantization_fields(quantize, model.dtype), "llm_int8_threshold": 0.0}
        quantizer = Quantizer(fields, None)
        quantizer.replace_layers(model)
        quantizer.fill_on_meta(model)
    adapted = with_adapters(model, {"r": rank, "target_modules": "all-linear"})
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # peft has made these float32: the Trainer converts them when it begins
            parameter.data = parameter.data.to(model.dtype)
    return adapted.train()


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
