"""A quantised base and adapters on top, as options name them: peft makes the adapters, bitsandbytes quantises."""

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_cxl.errors import ConfigError, UnsupportedError


def quantization_fields(option: str | Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a ``BitsAndBytesConfig``.

    Args:
        option: "4bit" is NF4 with quantised scales; "8bit" is LLM.int8(); a mapping has the fields themselves.
        dtype: that "4bit" computes in.

    Raises:
        ConfigError: another word, or fields that are none or quantise nothing.
    """
    if isinstance(option, Mapping):
        from transformers import BitsAndBytesConfig

        unknown = sorted(option.keys() - BitsAndBytesConfig().to_dict().keys())
        if unknown:
            raise ConfigError(f"quantization: BitsAndBytesConfig has no field {', '.join(unknown)}")
        if not (option.get("load_in_4bit") or option.get("load_in_8bit")):
            raise ConfigError(f"quantization={dict(option)} needs load_in_4bit or load_in_8bit to be true")
        return dict(option)
    if option == "8bit":
        _say_each_once(logging.getLogger("bitsandbytes.autograd._functions"))
        return {"load_in_8bit": True}
    if option != "4bit":
        raise ConfigError(f'quantization must be "4bit", "8bit" or fields of BitsAndBytesConfig, not {option!r}')
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": dtype,
    }


def _say_each_once(logger: logging.Logger) -> None:
    """Let a logger say each of its messages once: of 8-bit layers, every forward warns of the same cast."""
    if not any(isinstance(each, _Once) for each in logger.filters):
        logger.addFilter(_Once())


class _Once(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self._said
        self._said.add(message)
        return is_new


def with_adapters(model: nn.Module, options: Mapping[str, Any]) -> Any:
    """Return the peft model around a model, which trains adapters alone.

    Args:
        model: of transformers; its adapters have no memory where its first weight has none. INOUT: peft puts them in.
        options: fields of ``peft.LoraConfig``.

    Raises:
        ConfigError: peft does not take the options.
        UnsupportedError: it is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UnsupportedError("adapters need peft: pip install peft") from error
    fields: dict[str, Any] = {"task_type": "CAUSAL_LM", **options}
    is_empty = next(model.parameters()).is_meta
    try:
        with warnings.catch_warnings():
            # what peft 0.21 makes transformers 5 warn of: not for our user to act on
            deprecated = ".is_gradient_checkpointing. is deprecated"
            warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
            if options.keys().isdisjoint({"rank_pattern", "alpha_pattern"}):  # those that peft itself has of experts
                warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern", category=RuntimeWarning)
            return get_peft_model(model, LoraConfig(**fields), low_cpu_mem_usage=is_empty)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"peft does not take the options lora={dict(options)}: {error}") from error
