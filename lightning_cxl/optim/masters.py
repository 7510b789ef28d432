"""Master weights: the parameters that the optimizer really updates, on the host.

[Note: Compute and master weights]
A *compute* parameter is the user's `nn.Parameter`, on the training device and in the training precision. Its *master*
is the parameter an optimizer holds in its param groups. Where the compute parameter is already on the host in float32
(or wider) they are one and the same object and nothing is copied: the user sees ``p.grad`` as always. The same holds
for bfloat16 with *split* master weights (`CPUAdam` only): the compute parameter is the upper half of the master
weights, and the lower half belongs to the optimizer's state. Otherwise the master is a separate parameter on the host,
float32 or, split, a bfloat16 copy. With several devices it is in the very memory of a shard that lies on the host and
says that it is on the device (`sharding/host_shard.py`), where types allow that. Gradients arrive in ``master.grad``
(see `gradients/offload.py`), everything that reads gradients through the optimizer (clipping, the loss scaler,
``on_before_optimizer_step``) finds them there, and every step ends by writing the new values back to the compute
parameter. With ``state_on_device``, masters of weights that stay on the device are there, float32, with gradients and
state; where the weights are float32 they are their own masters.

Changes made in loops over the model count, too: a separate master's compute parameter becomes a `_Front` in its run.
Its ``.grad`` is that of the master, on the host, also where the weights are on a device; what is assigned goes to the
master. Writes through ``.data``, which torch does not count, are noticed because someone has asked for ``.data``: the
next step compares then. Autograd, which reads and writes ``.grad`` past Python, and our own code use `torch_private`.
Shards keep torch's ``.grad`` and ``.data``: DTensors have no subclasses, and FSDP2 sets their ``.grad`` itself.

While a thread updates the master behind the training (`WeightPair.begin_update`), the compute parameter on the device
has old values. It is an `_Updating` then: whatever operator of torch gets it first waits for the update, also where
somebody kept a reference, and the device waits for the copy.
"""

import copy
import functools
import os
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn import Parameter

from lightning_cxl import torch_private
from lightning_cxl.devices import HostEngine, Transfer, TransferEngine, current_stream
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.kernels import MasterForm, is_flat_like
from lightning_cxl.shards import is_sharded, local, settle, sharded_like

AllocateFor = Callable[[Parameter, TensorRole, torch.dtype], torch.Tensor]
"""Returns an uninitialised host tensor like a compute parameter, placed by the policy for that role."""


_CHUNK_ELEMENTS = 2**20  # of which a few copies do not count


class WeightPair:
    """The compute and the master weights of one trained parameter, and in which precision its gradient is kept."""

    __slots__ = (
        *("__weakref__", "_aliases", "_engine", "_front", "_pid", "_plain_type", "_stream", "_update", "_written"),
        *("compute", "grad_dtype", "is_on_device", "master", "name", "on_access", "version"),
    )

    def __init__(
        self, name: str, compute: Parameter, master: Parameter, grad_dtype: torch.dtype, *, is_on_device: bool = False
    ) -> None:
        self.name = name
        self.is_on_device = is_on_device
        """The master is on the device, where gradients and state stay as well, and which updates it."""
        self.compute = compute
        self.master = master
        self.grad_dtype = grad_dtype
        self.version = compute._version  # of the compute weights when they last agreed with the master
        self._aliases: list[weakref.ref[torch.Tensor]] = []  # what ``compute.data`` has given out
        self._plain_type: type[Parameter] | None = None  # of the compute parameter, while it is a `_Front`
        self.on_access: Callable[[], None] = _nothing  # completes gradients that are on their way, where possible
        self._update: Future[None] | None = None  # of the master and of what the device has, behind the training
        self._written: Transfer | None = None  # to the device, in that update
        self._front: type[Parameter] | None = None  # of the compute parameter, before that update
        self._stream: object = None  # that the step ran on
        self._engine: TransferEngine | None = None
        self._pid = 0

    @property
    def is_shared(self) -> bool:
        """Whether compute and master are the same object."""
        return self.compute is self.master

    @property
    def is_same_memory(self) -> bool:
        """Whether the master's memory is that of the compute weights, also where these say that they are elsewhere."""
        return self.is_shared or (local(self.compute).is_cpu and self.master.dtype is self.compute.dtype)

    @property
    def may_be_written(self) -> bool:
        """Whether others may have written to the compute weights since they agreed with the master."""
        return self.version != self.compute._version

    def agree(self) -> None:
        """Note that compute weights and master agree now, and that whoever has a ``.data`` may write to it again."""
        self.version = -1 if any(alias() is not None for alias in self._aliases) else self.compute._version

    def gives_out(self, data: torch.Tensor) -> torch.Tensor:
        """Return the memory of the compute weights, to which others may write as long as it lives."""
        self.version = -1
        self._aliases = [*(alias for alias in self._aliases if alias() is not None), weakref.ref(data)]
        return data

    @property
    def is_updating(self) -> bool:
        return self._update is not None

    @property
    def may_be_late(self) -> bool:
        """Whether all that reaches the compute weights, which have a front, goes by the parameter itself."""
        self.compute.untyped_storage()  # the first access, which counts from then on
        return not self.may_be_written and torch_private.is_only_holder(self.compute)

    def begin_update(self, update: "Future[None]", engine: TransferEngine) -> None:
        """Let whoever uses the compute weights wait for an update, and raise its error."""
        self.settle()
        self._engine = engine
        torch.autograd.graph.increment_version([self.compute])  # graphs from before the step have old weights
        self.agree()
        self._update, self._front, self._pid = update, type(self.compute), os.getpid()
        self._stream = current_stream(self.compute.device)
        self.compute.__class__ = _updating_of(self._front)

    def note_copy(self, transfer: Transfer) -> None:
        """Note the copy to the device of the update that runs."""
        self._written = transfer
        self.agree()

    def settle(self) -> None:
        """Return when the compute weights are new for what this thread's stream computes from now on."""
        update = self._update
        if update is None:
            return
        try:
            if os.getpid() != self._pid:
                return  # forked: the thread is the parent's, and so is the device, as torch says
            assert self._engine is not None
            with self._engine.stall("stall_update_s", "wait for an update"):
                update.result()
            if (written := self._written) is not None:
                written.wait()
                if current_stream(self.compute.device) != self._stream:
                    written.wait_host()  # nobody waits any more in the stream that the next forward runs on
        finally:  # not earlier: until then nobody may take the weights for new
            if self._update is update:  # else another thread has waited, and the next one has begun
                self._update = self._written = None
                self.compute.__class__ = self._front or type(self.compute)

    def put_front(self, on_access: Callable[[], None]) -> None:
        """Let the compute parameter show the master's gradient, and notice ``.data``, until `remove_front`."""
        if self.is_shared or is_sharded(self.compute):
            return
        self._plain_type, grad = type(self.compute), torch_private.plain_grad(self.compute)
        torch_private.set_plain_grad(self.compute, None)
        _in_front[id(self.compute)] = self
        self.compute.__class__ = _front_of(self._plain_type)
        if grad is not None:  # from before the run
            self.compute.grad = grad
        self.on_access = on_access

    def remove_front(self) -> None:
        if self._plain_type is not None:
            self.compute.__class__, self._plain_type, self.on_access = self._plain_type, None, _nothing
            _in_front.pop(id(self.compute), None)


def _nothing() -> None:
    """No gradients are on their way."""


_in_front: weakref.WeakValueDictionary[int, WeightPair] = weakref.WeakValueDictionary()  # by id of the `_Front`


@functools.cache  # compilers compile once more for each class
def _front_of(own: type[Parameter]) -> type[Parameter]:
    return type(own.__name__, (_Front, own), {})


class _Front:
    """A compute parameter whose master is separate."""

    __slots__ = ()

    def _pair(self: Any) -> WeightPair | None:
        pair = _in_front.get(id(self))
        return pair if pair is not None and pair.compute is self else None  # else a new object of this class

    @property
    def grad(self: Any) -> torch.Tensor | None:
        """The gradient of the master; autograd's own while it is being delivered."""
        own, pair = torch_private.plain_grad(self), self._pair()
        if own is not None or pair is None or torch.compiler.is_compiling():
            return own  # a compiler would fail where it is not beside its weight
        pair.on_access()
        grad: torch.Tensor | None = pair.master.grad
        if grad is not None:
            pair.settle()  # an update may be reading it
        return grad

    @grad.setter
    def grad(self: Any, value: torch.Tensor | None) -> None:
        pair = self._pair()
        if pair is None or torch_private.plain_grad(self) is not None:
            torch_private.set_plain_grad(self, value)
            return
        pair.on_access()  # what is on its way is of the gradient that is replaced
        if value is not None and value.dtype is not torch.float32:
            value = value.to(pair.master.device, pair.grad_dtype)
        pair.master.grad = None if value is None else value.to(pair.master.device)

    @grad.deleter
    def grad(self: Any) -> None:
        self.grad = None

    @property
    def data(self: Any) -> torch.Tensor:
        """The weights, to which someone may write."""
        if torch.compiler.is_dynamo_compiling():
            return self.detach()  # type: ignore[no-any-return]  # writes to which torch counts
        if (pair := self._pair()) is not None:
            pair.settle()
        data = torch_private.plain_data(self)
        return data if pair is None else pair.gives_out(data)

    @data.setter
    def data(self: Any, value: torch.Tensor) -> None:
        if (pair := self._pair()) is not None:
            pair.settle()
        torch_private.set_plain_data(self, value)
        if pair is not None:
            pair.gives_out(value)

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        # a plain parameter: the copy belongs to no run
        copied = super().__deepcopy__(memo)  # type: ignore[misc]
        copied.__class__ = type(self).__mro__[2]
        return copied


@functools.cache
def _updating_of(front: type[Parameter]) -> type[Parameter]:
    return type(front.__name__, (_Updating, front), {})


_NOT_WRITTEN = frozenset(("_version", "grad", "grad_fn", "is_contiguous", "is_cpu", "is_leaf", "is_sparse", "nbytes"))
_NOT_WRITTEN |= {"register_hook", "requires_grad_", "storage_offset", "stride"}
"""Of a parameter, besides its metadata: an update does not touch it."""


class _Updating:
    """A compute parameter on a device whose update runs behind."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.asks_metadata(func, _NOT_WRITTEN):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
        updating = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, _Updating)]
        for leaf in updating:
            _in_front[id(leaf)].settle()  # which makes it an ordinary one
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        _in_front[id(self)].settle()
        return copy.deepcopy(self, memo)


class MasterWeights:
    """Finds or makes the master of every parameter that an optimizer owns."""

    def __init__(
        self,
        names: dict[int, str],
        allocate: AllocateFor,
        engine: TransferEngine | None = None,
        on_device: Container[str] = (),  # names of parameters whose masters are on the device
    ) -> None:
        self._names = names
        self._allocate = allocate
        self._on_device = on_device
        self._engine = HostEngine() if engine is None else engine
        self._written: list[Transfer] = []  # not known to be done
        self._by_id: dict[int, WeightPair] = {}  # id of the compute and of the master parameter
        self.kernel_weights: dict[Parameter, torch.Tensor] = {}
        """16-bit compute weights on the host that a kernel may write itself, by float32 master."""

    def __iter__(self) -> Iterator[WeightPair]:
        """Every adopted parameter once, in order of adoption."""
        return iter({id(pair): pair for pair in self._by_id.values()}.values())

    @property
    def has_separate(self) -> bool:
        """Whether gradients live on masters, not on the model."""
        return any(not pair.is_shared for pair in self)

    def find(self, parameter: torch.Tensor) -> WeightPair | None:
        """Return the record of a compute or master parameter, or None when no optimizer owns it."""
        return self._by_id.get(id(parameter))

    def adopt(self, parameter: Parameter, form: MasterForm | None) -> WeightPair:
        """Return the record of `parameter`, making its master if it needs one of its own."""
        pair = self._by_id.get(id(parameter))
        if pair is None:
            name = self._names.get(id(parameter)) or f"unnamed.{len(self._by_id)}"  # not registered in the model
            stays = form is not None and name in self._on_device and not is_on_host(parameter)
            form = "fp32" if stays else form
            dtype, shard, master = master_dtype(parameter, form), local(parameter), parameter
            if stays and parameter.dtype is not dtype:
                master = Parameter(parameter.detach().to(dtype))
            elif not stays and needs_master(parameter, dtype, on_host=is_on_host(parameter)):
                data = shard.detach()
                if needs_master(shard, dtype, on_host=is_on_host(shard)):
                    data = self._allocate(parameter, TensorRole.MASTER_WEIGHTS, dtype).copy_(data)
                # else: compute weights on the host say that they are on the device. Trainable even where the compute
                # parameter is frozen: it may be unfrozen later, and until then has no gradient
                master = Parameter(sharded_like(data, parameter))
            grad_dtype = dtype if form is None else parameter.dtype
            pair = WeightPair(name, parameter, master, grad_dtype, is_on_device=stays)
            self._by_id[id(parameter)] = self._by_id[id(pair.master)] = pair
            flat = not pair.is_shared and is_flat_like(local(parameter.detach()), local(pair.master))
            if flat and parameter.dtype != dtype:
                self.kernel_weights[pair.master] = parameter
        return pair

    @torch.no_grad()
    def absorb_changes(self) -> None:
        """Carry over what others wrote into compute weights since the last step: a loaded checkpoint, weight clipping.

        Elements that still equal the rounded master keep the master's precision.
        """
        for pair in self:
            if pair.is_shared or not pair.may_be_written:
                continue
            whole = local(pair.master), local(pair.compute.detach())
            is_flat = all(tensor.is_contiguous() for tensor in whole)
            parts = [torch.split(tensor.view(-1), _CHUNK_ELEMENTS) if is_flat else (tensor,) for tensor in whole]
            for master, written in zip(*parts, strict=True):
                compute = written.to(master.device)
                if not torch.equal(master.to(compute.dtype), compute):
                    master.copy_(torch.where(_agree(master, compute), master, compute.to(master.dtype)))
            pair.agree()

    @torch.no_grad()
    def write_back(self, masters: Iterable[torch.Tensor], *, kernel_wrote: bool = False) -> None:
        """Copy master weights into the compute weights they belong to, rounding to nearest.

        What the device computes from here on sees the new weights. The host goes on: `wait` before a master changes.
        """
        for master in masters:
            pair = self.find(master)
            if pair is None or pair.is_shared:
                continue
            if not (kernel_wrote and pair.master in self.kernel_weights):
                self._write(pair)
            pair.agree()

    @torch.no_grad()
    def write_back_changes(self, versions: Mapping[torch.Tensor, int]) -> None:
        """Copy masters that others wrote since they had these versions; changed compute weights are absorbed later."""
        for master, version in versions.items():
            pair = self.find(master)
            if pair is None or pair.is_shared or (pair.may_be_written and master._version == version):
                continue
            if not _agree(local(master), local(pair.compute.detach()).to(master.device)).all():
                self._write(pair)
                pair.agree()

    def _write(self, pair: WeightPair) -> None:
        if pair.is_same_memory:
            return
        if is_on_host(target := local(pair.compute.detach())) or pair.is_on_device:
            target.copy_(local(pair.master.detach()))
            return
        self._copy(pair, target, self._staging(pair)).wait()

    def _staging(self, pair: WeightPair) -> torch.Tensor | None:
        """Return pinned memory in which a master is rounded for the device, where torch would take pageable memory."""
        dtype = pair.compute.dtype
        return None if pair.master.dtype is dtype else self._allocate(pair.compute, TensorRole.STAGING, dtype)

    def _copy(
        self, pair: WeightPair, target: torch.Tensor, staging: torch.Tensor | None, after: list[Transfer] | None = None
    ) -> Transfer:
        source = local(pair.master.detach())
        transfer = self._engine.h2d(source if staging is None else staging.copy_(source), target, after=after)
        self._written.append(transfer)
        return transfer

    def writing_back(self, pairs: Sequence[WeightPair], update: "Future[None]") -> Callable[[], None]:
        """Begin an update; return what copies masters to the device, in any thread, behind all that it is asked now."""
        copies = [(pair, local(pair.compute.detach()), self._staging(pair)) for pair in pairs]
        mark = self._engine.mark()
        for pair in pairs:
            pair.begin_update(update, self._engine)

        @torch.no_grad()
        def write() -> None:
            while copies:  # staging memory goes back when its copy is done
                pair, target, staging = copies.pop()
                pair.note_copy(self._copy(pair, target, staging, [mark]))

        return write

    def wait(self) -> None:
        written, self._written = self._written, []
        for transfer in written:
            transfer.wait_host()
        for pair in self:
            settle(pair.compute)

    def bring_to_host(self) -> None:
        """Bring masters that are on the device to the host, when the run is over, as the model comes there."""
        for pair in self:
            if pair.is_on_device and not pair.is_shared:
                pair.master.data = pair.master.data.cpu()

    def compute_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the compute parameter of a master, and anything else as it is."""
        pair = self.find(parameter)
        return parameter if pair is None else pair.compute

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the model's name of a parameter, a made-up one where it is not registered in the model."""
        pair = self.find(parameter)
        return self._names.get(id(parameter), "unnamed") if pair is None else pair.name

    def named_masters(self) -> dict[str, torch.Tensor]:
        """Return the masters that are more than compute weights or copies of them, by name: a checkpoint needs them."""
        return {
            pair.name: pair.master.detach()
            for pair in self
            if not pair.is_shared and pair.master.dtype is not torch.bfloat16
        }


def master_dtype(compute: torch.Tensor, form: MasterForm | None) -> torch.dtype:
    """Return the dtype of a parameter's master: float32 for 16-bit floating point that is not split, else its own."""
    if compute.dtype == torch.float16 or (compute.dtype == torch.bfloat16 and form != "split"):
        return torch.float32
    return compute.dtype


def is_on_host(parameter: torch.Tensor) -> bool:
    return parameter.device.type == "cpu"


def needs_master(compute: torch.Tensor, dtype: torch.dtype, *, on_host: bool) -> bool:
    return not on_host or compute.dtype != dtype


def _agree(master: torch.Tensor, compute: torch.Tensor) -> torch.Tensor:
    """Return where `compute` is the master, rounded to nearest; the two ways to round a tie both count."""
    agree = master.to(compute.dtype) == compute
    if compute.dtype == torch.bfloat16 and master.dtype == torch.float32:
        away = (master.view(torch.int32) + 0x8000 >> 16).to(torch.int16)
        agree |= away == compute.view(torch.int16)
    return agree
