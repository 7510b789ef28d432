"""`empty_weights`: modules are built with parameters that have a shape but no memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.hook import ordinary_memory


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules in this thread with parameters on the ``meta`` device, which take no memory, until exit.

    Buffers are real: they are computed as always, also those that no file holds (rotary frequencies, masks).
    Parameters that are tied stay tied. At no time is there more than one parameter in memory, and no page of it where
    the module makes it with ``torch.empty``, as torch's own do. `load_weights` gives the parameters their memory.

    Example::

        with lightning_cxl.empty_weights():
            model = MyModel()
        lightning_cxl.load_weights(model, "folder")
    """
    hook = register_module_parameter_registration_hook(_ToMeta())  # type: ignore[arg-type]  # its annotation is wrong
    try:
        with ordinary_memory():
            yield
    finally:
        hook.remove()


class _ToMeta:
    """Puts a twin on the meta device in the place of each parameter that this thread registers; the same for the same.

    torch's hook is global, so that another thread which builds a model gets here, too.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._twins = WeakTensorKeyDictionary()

    def __call__(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        plain = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.layout is torch.strided
        if not plain or parameter is None or threading.get_ident() != self._thread:
            return None
        if parameter not in self._twins:
            twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            twin.__dict__.update(parameter.__dict__)
            self._twins[parameter] = twin
        result: nn.Parameter = self._twins[parameter]
        return result


def refuse_unready(model: nn.Module) -> None:
    """Raise where parameters or buffers of a model have no memory: there is nothing to compute with.

    Raises:
        ConfigError: it says what is missing.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, tensor in named if tensor.is_meta]
    if names:
        shown = ", ".join(f"`{name}`" for name in names[:5])
        raise ConfigError(
            f"{len(names)} of {len(named)} tensors of {type(model).__name__} are on the meta device and have no "
            f"values: {shown}{', ...' if len(names) > 5 else ''}. Load them before training with "
            "`lightning_cxl.load_weights(model, folder)` (under Lightning in `configure_model`; its result names what "
            "the files lack), or build the model without `empty_weights` or `torch.device('meta')` to train it from "
            "scratch."
        )
