"""`Quantizer`: transformers' own preparation of a model for weights that bitsandbytes quantises, or has quantised."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_cxl.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_cxl.weights.load import LoadReport
from lightning_cxl.weights.quantise import quantised_on_meta
from lightning_cxl.weights.saved_quantised import SavedQuantised, weight_beside
from lightning_cxl.weights.sources import FileTensor, MergedTensor, Translate, WeightSource

_KINDS = ("Params4bit", "Int8Params")


class Quantizer:
    """Replaces layers of a model on the meta device, and gives tensors of files to the weights of these layers.

    Args:
        settings: a ``BitsAndBytesConfig`` or a dictionary of its fields; None: as the files are.
        saved: what the config of the files says, where they are quantised; None where they are not.

    Raises:
        ConfigError: settings that contradict each other.
        UnsupportedError: another library than bitsandbytes, or settings that keep weights in full precision; or
            bitsandbytes is not installed.
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
        self._refuse_unsupported()
        try:
            self._own.validate_environment(device_map={"": "cpu"}, weights_only=True)
        except (ImportError, RuntimeError) as error:
            raise UnsupportedError(f"weights cannot be quantised here: {error}") from error

    def _refuse_unsupported(self) -> None:
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

    def replace_layers(self, model: Any) -> None:
        """Put layers of bitsandbytes in the place of those that are to be quantised, as transformers chooses them.

        Args:
            model: on the meta device. INOUT.

        Raises:
            UnsupportedError: a layer that is to be quantised has the weight of another module, too.
        """
        with _default_dtype(model.dtype):
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
        """Return a translation of names that also brings together what belongs to one quantised weight.

        Args:
            model: after `replace_layers`.
            names: translates names of plain tensors.
        """
        parameters = dict(_quantised_parameters(model))

        def translated(tensors: Sequence[WeightSource]) -> list[tuple[str, WeightSource]]:
            beside: dict[str, dict[str, WeightSource]] = {}
            plain = []
            in_files = {tensor.name for tensor in tensors}
            for tensor in tensors:
                found = weight_beside(tensor.name) if self.is_saved else None
                if found is not None and found[0] in in_files:
                    beside.setdefault(found[0], {})[found[1]] = tensor
                else:
                    plain.append(tensor)
            return [
                (name, self._source(source, parameters.get(name), beside, model, name)) for name, source in names(plain)
            ]

        return translated

    def _source(
        self,
        source: WeightSource,
        meta: nn.Parameter | None,
        beside: dict[str, dict[str, WeightSource]],
        model: Any,
        name: str,
    ) -> WeightSource:
        """Return what a weight is made from, where it is quantised."""
        if meta is None or not isinstance(source, FileTensor):
            return source
        if self.is_saved:
            return SavedQuantised(source, beside.get(source.name, {}), meta)
        layer = model.get_submodule(name.rpartition(".")[0])
        if layer.source_cls is nn.Linear:
            return source
        return MergedTensor([source], _transposed)  # a Conv1D of GPT-2, whose weight has the other orientation

    def fill_on_meta(self, model: Any) -> None:
        """Give all layers quantised weights without memory, for plans.

        Args:
            model: after `replace_layers`. INOUT.
        """
        for name, parameter in list(_quantised_parameters(model)):
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.weight = quantised_on_meta(parameter)
        model.hf_quantizer = self._own
        self._own.postprocess_model(model)

    def complete(self, model: Any, report: LoadReport) -> None:
        """Check that all layers have got their weights, and note in the model how it is quantised.

        Raises:
            CheckpointError: a weight that is to be quantised is in no file.
        """
        missing = [name for name, parameter in _quantised_parameters(model) if parameter.is_meta]
        if missing:
            raise CheckpointError(
                f"{len(missing)} weights that are to be quantised are in no file, such as `{missing[0]}`: complete the "
                f"files, or name what is new in llm_int8_skip_modules. {report.num_tensors} tensors have been loaded."
            )
        model.hf_quantizer = self._own
        self._own.postprocess_model(model)


def _library(config: Any) -> str:
    """Return the name of the library that a quantisation config, or a dictionary of its fields, is for."""
    fields = config if isinstance(config, dict) else vars(config)
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):
        return "bitsandbytes"  # older configs say no more
    method = fields.get("quant_method")
    return str(getattr(method, "value", method))


def _quantised_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from ((name, each) for name, each in model.named_parameters() if type(each).__name__ in _KINDS)


def _transposed(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts.pop().T


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let torch make new layers in this type, until exit."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
