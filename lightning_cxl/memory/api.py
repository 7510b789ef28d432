"""What users call: `host_allocation`, `empty` and `residency`, on the host memory in use (see `scope`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch

from lightning_cxl.errors import ConfigError
from lightning_cxl.memory import hook as scope
from lightning_cxl.memory import host_memory as kernel
from lightning_cxl.memory.hook import HostAllocationMode
from lightning_cxl.placement.decorators import constructing_spec
from lightning_cxl.placement.placement import TensorRole


@contextmanager
def host_allocation(tier: str | None = None, role: TensorRole | str | None = None) -> Iterator[None]:
    """Make torch's own host-tensor creation obey the placement policy in this thread, until exit.

    ``torch.empty``, ``zeros``, ``randn``, ``tensor``, ``clone``, ``.to("cpu")``, ``pin_memory`` and the like then
    return ordinary tensors whose bytes lie where `tier` or the decorated module under construction says, of these two
    the innermost; else where the policy puts `role`. Not affected: views, ``out=``, ``torch.from_numpy``,
    ``torch.load``, ``deepcopy`` of tensors that are no parameters, other threads, and results of arithmetic outside of
    a decorated module's constructor. Such a tensor cannot be resized in place to more elements.

    Args:
        tier: name of a tier, e.g. ``"cxl"``.
        role: what the tensors are for, e.g. ``"activations"``. Weights when None.

    Raises:
        TierNotFoundError: no such tier; the message names those that exist.
        ConfigError: no such role.
        TierFullError: inside, when a tensor fits nowhere.

    Example::

        with lightning_cxl.host_allocation(tier="cxl"):
            cache = torch.zeros(1024, 1024)
    """
    used = scope.current()
    with HostAllocationMode(used.memory, used.placer, role=None if role is None else _role(role), tier=tier):
        yield


def empty(
    shape: int | Sequence[int],
    dtype: torch.dtype | None = None,
    tier: str | None = None,
    pinned: bool = False,
    role: TensorRole | str | None = None,
) -> torch.Tensor:
    """Return an uninitialised contiguous host tensor on a tier.

    Args:
        shape: its shape.
        dtype: torch's default dtype when None.
        tier: name of a tier; None leaves it to the decorated module under construction, else to the policy.
        pinned: page-lock it for the device; without a device it stays pageable.
        role: what it is for, see `TensorRole`; weights when None.

    Raises:
        TierNotFoundError: no such tier; the message names those that exist.
        ConfigError: no such role.
        ValueError: a negative size.
        TierFullError: it fits nowhere.
    """
    used = scope.current()
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    dtype = dtype or torch.get_default_dtype()
    wanted = TensorRole.COMPUTE_WEIGHTS if role is None else _role(role)
    nbytes = max(0, prod(shape)) * dtype.itemsize
    placement = used.placer.place(wanted, nbytes, tier=tier, spec=constructing_spec())
    return used.memory.tensor(shape, dtype, replace(placement, pinned=True) if pinned else placement, wanted)


def residency(tensor: torch.Tensor) -> dict[str, int]:
    """Return how many bytes of a tensor each tier holds now, asked from the kernel.

    Bytes that no page backs yet have the key ``"unbacked"``, those on a device its name. Bytes of an emulated tier
    carry that tier's name as long as the memory they came from is in use, else that of the real tier.

    Raises:
        PlacementError: the kernel refuses to say.
    """
    used = scope.holding(tensor.data_ptr()) if tensor.layout is torch.strided and tensor.is_cpu else scope.current()
    return kernel.residency(tensor, used.placer.topology, used.memory)


def _role(role: TensorRole | str) -> TensorRole:
    try:
        return TensorRole(role)
    except ValueError:
        known = ", ".join(repr(known.value) for known in TensorRole)
        raise ConfigError(f"there is no tensor role {role!r}; choose one of: {known}") from None
