"""Options and hyper-parameters: what CPUAdam accepts, and the numbers of one step made from them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lightning_cxl.errors import ConfigError, UnsupportedError


class AdamScalars(NamedTuple):
    """What one update needs besides the tensors; the row of numbers the kernel takes, in this order."""

    decay: float
    """Factor of the weight before the update: 1 - lr * weight_decay when decoupled, else 1."""
    l2: float
    """Weight decay added to the gradient when not decoupled, else 0."""
    lerp_weight: float
    """1 - beta1."""
    beta2: float
    square_weight: float
    """1 - beta2."""
    bias2_sqrt: float
    """sqrt(1 - beta2 ** step)."""
    eps: float
    neg_step_size: float
    """-lr / (1 - beta1 ** step)."""
    grad_scale: float
    """Factor of the gradient, before anything else: unscaling and clipping in one."""


def scalars_of(group: Mapping[str, Any], step: float, grad_scale: float) -> AdamScalars:
    """Return the scalars of a group at the 1-based `step`, in double precision as torch computes them.

    A tensor `lr` or `betas` is used as it is, so that its own precision decides, as in torch.
    """
    lr, weight_decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    decoupled = group["decoupled_weight_decay"]
    return AdamScalars(
        decay=float(1 - lr * weight_decay) if decoupled and weight_decay != 0 else 1.0,
        l2=0.0 if decoupled else float(weight_decay),
        lerp_weight=float(1 - beta1),
        beta2=float(beta2),
        square_weight=float(1 - beta2),
        bias2_sqrt=float((1 - beta2**step) ** 0.5),
        eps=float(group["eps"]),
        neg_step_size=float(-(lr / (1 - beta1**step))),
        grad_scale=float(grad_scale),
    )


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse torch's options that the kernel does not have."""
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        if group.get(option):
            raise UnsupportedError(
                f"CPUAdam has no `{option}`: set `{option}=False`, or `cpu_adam=False` to run torch's optimizer itself"
            )


def check_ranges(group: Mapping[str, Any]) -> None:
    """Refuse hyper-parameters that torch refuses too. Cheap enough for every step: anyone may write into a group."""
    for name in ("lr", "eps", "weight_decay"):
        if not as_number(group[name]) >= 0.0:
            raise ConfigError(f"`{name}` must be one number, at least 0, got {group[name]!r}")
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2 or not all(0.0 <= as_number(beta) < 1.0 for beta in betas):
        raise ConfigError(f"`betas` must be two numbers in [0, 1), got {betas!r}")


def as_number(value: object) -> float:
    """Return a number or one-element tensor as float; NaN, which is in no range, for anything else."""
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value)  # type: ignore[arg-type]  # what cannot be converted says so
    except (TypeError, ValueError, RuntimeError):
        return math.nan


# ----------------------------------------------------------------------------------------------------
# `AwaitedParams`: the list of a group's parameters, which waits for what runs behind before it is read.
#
# A loop over ``optimizer.param_groups`` gets at weights past the modules, which wait too
# ([Note: Awaited parameters]). Learning-rate schedulers read the other entries of a group only, and what belongs to
# the step itself uses `plain`.


class AwaitedParams(list[torch.Tensor]):
    def __init__(
        self, parameters: Iterable[torch.Tensor], wait: Callable[[], None], complete: Callable[[], None]
    ) -> None:
        super().__init__(parameters)
        self._wait = wait
        self.complete = complete

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._wait()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._wait()
        return super().__getitem__(index)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as a plain list, after waiting."""
        return list, (list(self),)


def plain(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(list.__iter__(parameters)) if isinstance(parameters, AwaitedParams) else list(parameters)


def drop_gradients(parameters: Sequence[torch.Tensor]) -> None:
    """Drop the gradients of a group. An update that runs is not waited for: it has its own references to them."""
    if isinstance(parameters, AwaitedParams):
        parameters.complete()
    for parameter in plain(parameters):
        parameter.grad = None
