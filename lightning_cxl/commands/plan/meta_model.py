"""`model_on_meta`: a causal language model without weights, from a folder, a hub id, or the name of a published shape.

transformers is imported when a model is built, not with this package.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_cxl.commands.measuring.timing import reason
from lightning_cxl.errors import ConfigError
from lightning_cxl.sequences.chunked_loss import chunked_loss
from lightning_cxl.weights.empty import empty_weights
from lightning_cxl.weights.hf import without_code
from lightning_cxl.weights.hf_quantizer import Quantizer
from lightning_cxl.weights.model_names import is_cached, require_model
from lightning_cxl.weights.published import SHAPES, published
from lightning_cxl.weights.qlora import quantization_fields, with_adapters

PlannedPrecision = Literal["32-true", "bf16-true", "bf16-mixed"]
"""The Trainer's precisions that can be planned."""


def model_on_meta(name: str) -> Any:
    """Return a model of transformers whose parameters and buffers have no memory, in training mode.

    Args:
        name: a folder with a ``config.json``, a shape's name, or a hub id.

    Raises:
        ConfigError: nothing of that name can be had, or its config makes no causal language model.
    """
    from transformers import AutoModelForCausalLM

    config = _config(name)
    try:
        with empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever transformers trips over in a config that has been written by hand
        raise ConfigError(f"{name!r} makes no causal language model: {reason(error)}") from error
    return model.to("meta").train()


def set_precision(model: torch.nn.Module, precision: PlannedPrecision) -> None:
    """Give a model on the meta device the types it has under a precision of the Trainer."""
    model.to(torch.bfloat16 if precision == "bf16-true" else torch.float32)


def with_lora(model: Any, rank: int, quantize: str | None) -> Any:
    """Return the model that trains adapters on all linear layers of its blocks, as the main job makes it.

    Args:
        model: on the meta device, in the types that it trains in. INOUT.
        rank: of the adapters.
        quantize: what the weights below are quantised to: "4bit", "8bit"; None: they stay as they are.

    Raises:
        ConfigError: peft finds no such layers.
        UnsupportedError: peft or bitsandbytes is not installed.
    """
    if quantize is not None:
        fields = quantization_fields(quantize, model.dtype)
        # numbers above the threshold are kept apart; how many there are, nobody knows without values
        quantizer = Quantizer({**fields, "llm_int8_threshold": 0.0}, None)
        quantizer.replace_layers(model)
        quantizer.fill_on_meta(model)
    adapted = with_adapters(model, {"r": rank, "target_modules": "all-linear"})
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # which peft has made float32: the Trainer converts them when it begins
            parameter.data = parameter.data.to(model.dtype)
    return adapted.train()


def loss_on_meta(model: Any, batch: int, sequence: int, *, chunked: bool = False) -> Callable[[], torch.Tensor]:
    """Return a function that computes the model's loss of a batch of token ids without values.

    Args:
        model: of transformers, on the meta device.
        batch: sequences.
        sequence: tokens of each.
        chunked: as under `chunked_loss`.
    """
    # the cache is what these models make in training by default; without it they look for packed sequences in
    # position ids, which have no values here

    def full() -> torch.Tensor:
        ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=True).loss
        return loss

    def in_chunks() -> torch.Tensor:
        with chunked_loss(model):
            return full()

    return in_chunks if chunked else full


def _config(name: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    shape = published(name)
    is_folder = Path(name).is_dir()
    if shape is not None and not is_folder:
        fields = dict(shape.config)
        return CONFIG_MAPPING[fields.pop("model_type")](**fields)
    require_model(name, f", no known shape ({', '.join(SHAPES)})")
    try:
        config = without_code(AutoConfig.from_pretrained, name, local_files_only=is_folder or is_cached(name))
    except Exception as error:  # as above
        where = f"the config.json in {name!r}" if is_folder else f"the config of {name!r}"
        raise ConfigError(f"{where} cannot be used: {reason(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"the weights of {name!r} are quantised, and `plan` quantises itself (--lora R --quantize 4bit): name the "
            "model that they were made from. A run plans itself when it begins, too, and its report shows it"
        )
    return config
