"""`Precisions`: in which precision masters and moments of each parameter are kept, known before any of them exists."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch.optim import Adam, AdamW, Optimizer

from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.moment import choose_precision, moment_bytes
from lightning_cxl.optim.number_formats import MasterForm, StatePrecision
from lightning_cxl.shards import local

log = logging.getLogger(__name__)


class Precisions:
    """Decides by optimizer and compute parameter.

    Args:
        use_cpu_adam: torch's Adam and AdamW become `CPUAdam`.
        state: how `CPUAdam` keeps momentum and variance.
        master: how it keeps master weights beside 16-bit ones.
        is_sensitive: whether the state of a compute parameter stays float32 when it is 8 bit otherwise.
    """

    def __init__(
        self,
        use_cpu_adam: bool,
        state: StatePrecision,
        master: MasterForm,
        is_sensitive: Callable[[torch.Tensor], bool],
    ) -> None:
        self._use_cpu_adam = use_cpu_adam
        self.state: StatePrecision = state
        """How `CPUAdam` keeps momentum and variance, where its user has not said it."""
        self._master = master
        self._sensitive = is_sensitive
        self._foreign: set[int] = set()  # ids of parameters that not just one CPUAdam updates

    def consider(self, optimizers: Iterable[Optimizer]) -> None:
        """Learn which parameters not just one CPUAdam holds, before any is adopted: those have no split masters."""
        seen: set[int] = set()
        for optimizer in optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._foreign |= own & seen if self.becomes_cpu_adam(optimizer) else own
            seen |= own

    def form_for(self, optimizer: Optimizer, parameter: torch.Tensor) -> MasterForm | None:
        """Return the form of a 16-bit parameter's master; None where not only CPUAdam updates it."""
        is_ours = self.becomes_cpu_adam(optimizer) and id(parameter) not in self._foreign
        return self._master if is_ours else None

    def moment_bytes(self, optimizer: Optimizer, parameter: torch.Tensor) -> int:
        """Return the bytes of each of the two moments of a compute parameter; 0 where CPUAdam does not make them."""
        if not parameter.requires_grad or not self.becomes_cpu_adam(optimizer):
            return 0
        state = optimizer.state_precision if isinstance(optimizer, CPUAdam) else self.state
        sensitive = self.is_sensitive(optimizer, parameter)
        return moment_bytes(local(parameter).numel(), choose_precision(parameter, state, sensitive=sensitive))

    def is_sensitive(self, optimizer: Optimizer, parameter: torch.Tensor) -> bool:
        """Return whether the state of a compute parameter stays float32 when it is 8 bit otherwise."""
        own = isinstance(optimizer, CPUAdam) and parameter in optimizer.fp32_state
        return own or self._sensitive(parameter)

    def becomes_cpu_adam(self, optimizer: Optimizer) -> bool:
        """Return whether `CPUAdam` makes this optimizer's updates."""
        if isinstance(optimizer, CPUAdam):
            return True
        if not (self._use_cpu_adam and _is_plain_adam(optimizer)):
            return False
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        other = dtypes - {torch.float32, torch.bfloat16, torch.float16}
        if other:
            log.info(
                f"{type(optimizer).__name__} stays torch's own: CPUAdam updates float32 and 16-bit weights, and some "
                f"are {', '.join(map(str, other))}"
            )
        return not other


def _is_plain_adam(optimizer: Optimizer) -> bool:
    """Whether this is torch's own Adam or AdamW; a subclass may do anything and is left alone."""
    return type(optimizer) in (Adam, AdamW)
