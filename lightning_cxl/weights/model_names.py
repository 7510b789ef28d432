"""`require_model`: whether a model can be had under a name, said at once and not after the hub was asked many times.

huggingface_hub, a dependency of transformers, is imported when the hub is asked.
"""

import difflib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_cxl.errors import ConfigError

# ----------------------------------------------------------------------------------------------------
# Published model architectures by name: the fields of their config that shape weights, to plan without any files.


class Published(NamedTuple):
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


_HUB_SECONDS = 5.0
_CONFIGS = ("config.json", "adapter_config.json")


def require_model(name: str, nor: str = "", *, weights_for: str = "") -> None:
    """Check that `name` is a folder with a model's config, or the id of a model that the hub or its cache has.

    A model that is cached is not asked for. Else the hub is asked once, for a few seconds.

    Args:
        weights_for: the command that needs the model's weights; empty if none does.
    """
    if Path(name).is_dir():
        if not any((Path(name) / config).is_file() for config in _CONFIGS):
            raise ConfigError(f"folder {name!r} has no config.json: save the model's config there")
        return
    if is_cached(name):
        return
    if weights_for and name.lower() in SHAPES:
        raise ConfigError(
            f"{name!r} is a shape that `plan` knows, without weights, and `{weights_for}` needs weights: use "
            f"{SHAPES[name.lower()].hub_id}"
        )
    if _is_hub_id(name):
        problem = _ask_hub(name)
    else:
        problem = f"no hub id, which names the owner too, such as {SHAPES['qwen2.5-0.5b'].hub_id}"
    if problem is not None:
        raise ConfigError(f"there is no model {name!r}{_similar(name)} It is no folder{nor}, and {problem}")


def is_cached(name: str) -> bool:
    """Return whether the config of a hub id lies in the cache of huggingface_hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, config), str) for config in _CONFIGS)
    except HFValidationError:
        return False


def _is_hub_id(name: str) -> bool:
    owner, slash, rest = name.partition("/")
    return bool(slash and rest) and "/" not in rest and owner not in (".", "..", "~", "")


def _similar(name: str) -> str:
    found = [f"{each} ({SHAPES[each].hub_id})" for each in nearest(name)]
    return f": did you mean {' or '.join(found)}?" if found else "."


def _ask_hub(name: str) -> str | None:
    """Return what speaks against a hub id, None where the hub does not deny it."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    found: list[str | None] = []

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=_HUB_SECONDS)
            found.append(None)
        except RepositoryNotFoundError:
            found.append("the hub has no such model (one that is private needs `hf auth login`)")
        except HfHubHTTPError:
            found.append(None)  # a mirror without this question: the download says what is wrong
        except Exception as error:  # whatever huggingface_hub's client raises for an address that cannot be reached
            lines = str(error).strip().splitlines() or [type(error).__name__]
            found.append(_unreachable(lines[0]))

    if constants.HF_HUB_OFFLINE:
        return _unreachable("HF_HUB_OFFLINE is set")
    # a thread, because looking up an address takes as long as the system's resolver likes
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS + 1)
    return found[0] if found else _unreachable(f"no answer in {_HUB_SECONDS:.0f} s")


def _unreachable(why: str) -> str:
    from huggingface_hub import constants

    return (
        f"the hub cannot be asked ({constants.ENDPOINT}: {why}), and {constants.HF_HUB_CACHE} does not have it. "
        "Without network, give a folder with the model, or a cache that has it: `hf download` fills one elsewhere, "
        "HF_HOME names the folder around it. HTTPS_PROXY names a proxy, HF_ENDPOINT a mirror"
    )
