"""Says which options change nothing for the optimizers of a run."""

import warnings
from collections.abc import Iterable, Iterator

import torch
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights


def warn_of_idle_options(optimizers: Iterable[Optimizer], masters: MasterWeights, config: OffloadConfig) -> None:
    """Warn of options that were asked for and that adopted optimizers have no use for."""
    for optimizer in optimizers:
        for reason in _idle(optimizer, masters, config):
            warnings.warn(reason, LightningCXLWarning, stacklevel=2)


def _idle(optimizer: Optimizer, masters: MasterWeights, config: OffloadConfig) -> Iterator[str]:
    name = type(optimizer).__name__
    kept = optimizer.state_precision if isinstance(optimizer, CPUAdam) else None
    if config.state != "fp32" and kept is None:
        yield (
            f'state="{config.state}" changes nothing for {name}, which keeps its state as it likes: it is an option of '
            "`CPUAdam`, which replaces torch's own Adam and AdamW with `cpu_adam=True`."
        )
    elif config.state not in ("fp32", kept):
        yield (
            f'state="{config.state}" changes nothing for the CPUAdam that `configure_optimizers` returned with '
            f'state="{kept}": say it there.'
        )
    if config.accumulate == "fp32":
        return
    hosts = [masters.find(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    dtypes = {host.grad_dtype for host in hosts if host is not None}
    if dtypes and torch.bfloat16 not in dtypes:
        yield (
            f'accumulate="{config.accumulate}" changes nothing for {name}, whose gradients are kept in '
            f"{' and '.join(sorted(str(dtype) for dtype in dtypes))}: it is for bfloat16 gradients of `CPUAdam`, as "
            'with `precision="bf16-true"`.'
        )
