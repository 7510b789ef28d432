"""Master weights: the parameters that the optimizer really updates, on the host.

[Note: Compute and master weights]
A *compute* parameter is the user's `nn.Parameter`, on the training device and in the training precision. Its *master*
is the parameter an optimizer holds in its param groups. Where the compute parameter is already on the host in float32
(or wider) they are one and the same object and nothing is copied: the user sees ``p.grad`` as always. Otherwise the
master is a separate float32 parameter on the host: gradients arrive in ``master.grad`` (see `grads.py`), everything
that reads gradients through the optimizer (clipping, the loss scaler, ``on_before_optimizer_step``) finds them there,
``compute.grad`` is None after backward, and every step ends by writing the new values back to the compute parameter.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn import Parameter

from lightning_cxl.tiers.placement import TensorRole

AllocateFor = Callable[[Parameter, TensorRole, torch.dtype], torch.Tensor]
"""Returns an uninitialised host tensor like a compute parameter, placed by the policy for that role."""


class HostParameter:
    """One trainable parameter as the host sees it."""

    __slots__ = ("compute", "grad_address", "master", "name", "version")

    def __init__(self, name: str, compute: Parameter, master: Parameter) -> None:
        self.name = name
        self.compute = compute
        self.master = master
        self.version = compute._version  # of the compute weights when they last agreed with the master
        self.grad_address = 0  # of the last gradient memory given out: tells our own from a new gradient

    @property
    def is_shared(self) -> bool:
        """Whether compute and master are the same object."""
        return self.compute is self.master


class MasterWeights:
    """Finds or makes the master of every parameter that an optimizer owns.

    Args:
        names: name of every parameter of the model, keyed by the parameter's `id`.
        allocate: gives host memory for a role.
    """

    def __init__(self, names: dict[int, str], allocate: AllocateFor) -> None:
        self._names = names
        self._allocate = allocate
        self._by_id: dict[int, HostParameter] = {}  # id of the compute and of the master parameter
        self.kernel_weights: dict[Parameter, torch.Tensor] = {}
        """Compute weights on the host that a kernel may write itself (bfloat16), by master."""

    def __iter__(self) -> Iterator[HostParameter]:
        """Every adopted parameter once, in order of adoption."""
        return iter({id(host): host for host in self._by_id.values()}.values())

    def find(self, parameter: torch.Tensor) -> HostParameter | None:
        """Return the record of a compute or master parameter, or None when no optimizer owns it."""
        return self._by_id.get(id(parameter))

    def adopt(self, parameter: Parameter) -> HostParameter:
        """Return the record of `parameter`, making its master if it needs one of its own."""
        host = self._by_id.get(id(parameter))
        if host is None:
            name = self._names.get(id(parameter)) or f"unnamed.{len(self._by_id)}"  # not registered in the model
            host = HostParameter(name, parameter, self._make_master(parameter))
            self._by_id[id(parameter)] = self._by_id[id(host.master)] = host
            if not host.is_shared and parameter.device.type == "cpu" and parameter.dtype == torch.bfloat16:
                self.kernel_weights[host.master] = parameter.detach()
        return host

    def _make_master(self, compute: Parameter) -> Parameter:
        if not needs_master(compute):
            return compute
        data = self._allocate(compute, TensorRole.MASTER_WEIGHTS, master_dtype(compute))
        data.copy_(compute.detach())
        # trainable even where the compute parameter is frozen: it may be unfrozen later, and until then has no gradient
        return Parameter(data)

    @torch.no_grad()
    def absorb_changes(self) -> None:
        """Carry over what others wrote into compute weights since the last step: a loaded checkpoint, weight clipping.

        Elements that still equal the rounded master keep the master's precision. Writes through ``.data`` leave no
        trace in torch's version counter and are not seen.
        """
        for host in self:
            if host.is_shared or host.version == host.compute._version:
                continue
            compute = host.compute.detach().to(host.master.device)
            changed = host.master.to(compute.dtype) != compute
            host.master.copy_(torch.where(changed, compute.to(host.master.dtype), host.master))
            host.version = host.compute._version

    @torch.no_grad()
    def write_back(self, masters: Iterable[torch.Tensor], *, kernel_wrote: bool = False) -> None:
        """Copy master weights into the compute weights they belong to, rounding to nearest.

        Args:
            masters: parameters of an optimizer that were just updated.
            kernel_wrote: a kernel has written `kernel_weights` already.
        """
        for master in masters:
            host = self.find(master)
            if host is None or host.is_shared:
                continue
            if not (kernel_wrote and host.master in self.kernel_weights):
                host.compute.copy_(host.master)
            host.version = host.compute._version

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the model's name of an adopted parameter, a made-up one where it is not registered in the model."""
        host = self.find(parameter)
        assert host is not None, "only adopted parameters are asked for"
        return host.name

    def named_masters(self) -> dict[str, torch.Tensor]:
        """Return the masters that are not compute weights themselves, by parameter name: a checkpoint needs them."""
        return {host.name: host.master.detach() for host in self if not host.is_shared}


def master_dtype(compute: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's master: float32 for 16-bit floating point, else its own."""
    return torch.float32 if compute.dtype in (torch.bfloat16, torch.float16) else compute.dtype


def needs_master(compute: torch.Tensor) -> bool:
    """Whether the optimizer must work on a copy: the weights are off the host or in 16-bit floating point."""
    return compute.device.type != "cpu" or compute.dtype in (torch.bfloat16, torch.float16)
