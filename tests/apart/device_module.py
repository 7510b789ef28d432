"""The module ``torch.apart``: what torch, and code that is written for any device, look for in ``torch.cuda``."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_ops = torch.ops.apart
_initialized = True  # torch.utils.checkpoint asks for this name before it saves the state of the generator


class Properties(NamedTuple):
    name: str
    total_memory: int


def _index(device: object = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "apart":
        raise ValueError(f"Expected a device of type apart, but got {device}")
    return current_device() if device.index is None else device.index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return _ops.is_forked()


def device_count() -> int:
    return _ops.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: object) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(contextlib.AbstractContextManager):
    def __init__(self, device: object):
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *exception: object) -> None:
        set_device(self._before)


def get_device_properties(device: object = None) -> Properties:
    index = _index(device)
    return Properties(get_device_name(index), _ops.capacity(index))


def get_device_name(device: object = None) -> str:
    return f"a device apart, number {_index(device)}"


def synchronize(device: object = None) -> None:
    torch.accelerator.synchronize(_index(device))


def current_stream(device: object = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: object = None) -> torch.Stream:
    current = current_stream(device)
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stream is None else stream


def Stream(device: object = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("apart", _index(device)), priority=priority)


def Event(enable_timing: bool = False) -> torch.Event:
    return torch.Event(device="apart", enable_timing=enable_timing)


def manual_seed(seed: int) -> None:
    _ops.manual_seed(current_device(), int(seed) % (1 << 63))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _ops.manual_seed(index, int(seed) % (1 << 63))


def get_rng_state(device: object = "apart") -> torch.Tensor:
    return _ops.get_rng_state(_index(device))


def set_rng_state(state: torch.Tensor, device: object = "apart") -> None:
    _ops.set_rng_state(state, _index(device))


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _of_accelerator(name: str) -> Callable[..., Any]:
    return lambda device=None: getattr(torch.accelerator, name)(_index(device))


memory_stats = _of_accelerator("memory_stats")  # with ``num_alloc_retries`` and ``num_ooms``, as of torch.cuda
memory_allocated = _of_accelerator("memory_allocated")
max_memory_allocated = _of_accelerator("max_memory_allocated")
memory_reserved = _of_accelerator("memory_reserved")
max_memory_reserved = _of_accelerator("max_memory_reserved")
reset_peak_memory_stats = _of_accelerator("reset_peak_memory_stats")
reset_accumulated_memory_stats = _of_accelerator("reset_accumulated_memory_stats")


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def mem_get_info(device: object = None) -> tuple[int, int]:
    """Return free and total bytes; as on CUDA, what the allocator has reserved is not free."""
    total = _ops.capacity(_index(device))
    return total - memory_reserved(device), total
