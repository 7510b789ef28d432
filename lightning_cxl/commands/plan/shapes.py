"""Published model architectures by name: the fields of their config that shape weights, to plan without any files."""

from collections.abc import Mapping
from typing import Any

from lightning_cxl.errors import ConfigError


def _config(
    model_type: str, vocabulary: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **others: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1 << 20,  # shapes nothing; longer than any sequence
        "tie_word_embeddings": False,
        **others,
    }


_TIED: dict[str, Any] = {"tie_word_embeddings": True}

# config.json of the models on the Hugging Face hub: Qwen/Qwen2.5-*, mistralai/Mistral-7B-v0.3,
# mistralai/Mistral-Nemo-Base-2407, meta-llama/Llama-3.*
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _config("qwen2", 151936, 896, 4864, 24, 14, 2, **_TIED),
    "qwen2.5-1.5b": _config("qwen2", 151936, 1536, 8960, 28, 12, 2, **_TIED),
    "qwen2.5-3b": _config("qwen2", 151936, 2048, 11008, 36, 16, 2, **_TIED),
    "qwen2.5-7b": _config("qwen2", 152064, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _config("qwen2", 152064, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _config("qwen2", 152064, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _config("qwen2", 152064, 8192, 29568, 80, 64, 8),
    "mistral-7b": _config("mistral", 32768, 4096, 14336, 32, 32, 8, sliding_window=None),
    "mistral-nemo-12b": _config("mistral", 131072, 5120, 14336, 40, 32, 8, head_dim=128, sliding_window=None),
    "llama-3.2-1b": _config("llama", 128256, 2048, 8192, 16, 32, 8, head_dim=64, **_TIED),
    "llama-3.2-3b": _config("llama", 128256, 3072, 8192, 28, 24, 8, head_dim=128, **_TIED),
    "llama-3.1-8b": _config("llama", 128256, 4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _config("llama", 128256, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _config("llama", 128256, 16384, 53248, 126, 128, 8),
}


def shape_config(name: str) -> dict[str, Any] | None:
    """Return the config of a published shape, as the content of a ``config.json``; None if there is none."""
    found = SHAPES.get(name.lower())
    return None if found is None else dict(found)


def unknown_model(name: str, why: str) -> ConfigError:
    """Return the error for a name that is neither folder nor shape nor reachable."""
    return ConfigError(
        f"there is no model {name!r}: no such folder, no known shape, and the hub cannot be asked ({why}). Give a "
        f"folder with a config.json (weights are not needed), or one of the shapes {', '.join(SHAPES)}"
    )
