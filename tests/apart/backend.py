"""Makes the device known to torch."""

import atexit
import contextlib
import functools

import torch

from tests.apart import build, device_module


@functools.cache
def load() -> None:
    """Build the device if need be, and register it: then there is ``torch.device("apart")`` in this process, for good.

    Raises:
        RuntimeError: it cannot be built here; `why_unavailable` tells beforehand.
        BuildError: the compiler refuses the sources.
    """
    if why := build.why_unavailable():
        raise RuntimeError(why)
    torch.ops.load_library(build.library())
    torch.utils.rename_privateuse1_backend("apart")
    torch._register_device_module("apart", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.ops.apart.init()
    atexit.register(_finish)


def _finish() -> None:
    """Let all streams end their work before the interpreter goes; nobody is there to hear of errors."""
    if torch.ops.apart.is_forked():
        return
    for index in range(device_module.device_count()):
        with contextlib.suppress(Exception):
            torch.accelerator.synchronize(index)
