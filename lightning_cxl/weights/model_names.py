"""`require_model`: whether a model can be had under a name, said at once and not after the hub was asked many times.

huggingface_hub, a dependency of transformers, is imported when the hub is asked.
"""

import threading
from pathlib import Path

from lightning_cxl.errors import ConfigError
from lightning_cxl.weights.published import SHAPES, nearest

_HUB_SECONDS = 5.0
_CONFIGS = ("config.json", "adapter_config.json")


def require_model(name: str, nor: str = "", *, weights_for: str = "") -> None:
    """Check that `name` is a folder with a model's config, or the id of a model that the hub or its cache has.

    A model that is cached is not asked for. Else the hub is asked once, for a few seconds.

    Args:
        name: of the model.
        nor: what else it is not, for the message.
        weights_for: the command that needs the model's weights; empty if none does.

    Raises:
        ConfigError: no such model, or the hub cannot be asked. The message names similar models.
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
