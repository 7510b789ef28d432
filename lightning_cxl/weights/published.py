"""Published model architectures by name: the fields of their config that shape weights, to plan without any files."""

import difflib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Published(NamedTuple):
    """One architecture."""

    hub_id: str
    """Of its ``config.json`` on the Hugging Face hub."""
    config: Mapping[str, Any]


def _of(
    hub_id: str,
    model_type: str,
    vocabulary: int,
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    **others: Any,
) -> Published:
    config = {
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1 << 20,  # shapes nothing; longer than any sequence
        "tie_word_embeddings": False,
    }
    return Published(hub_id, {**config, **others})


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
    """Return the names of the shapes that a mistyped name may have meant, the most likely first."""
    return difflib.get_close_matches(name.lower().rpartition("/")[2], SHAPES, n=3, cutoff=0.7)
