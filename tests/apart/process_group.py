"""Collectives between processes that each have a device apart, as NCCL does them for GPUs; gloo does the work.

[Note: Collectives of the device apart]
* Every group has a stream of its own. A collective starts there after what the caller's current stream has queued,
  and collectives of a group run one after the other, in the order in which the host asked for them. So two streams that
  wait for different collectives cannot exchange their messages.
* The host does not wait: a collective is a kernel of that stream, and the timeline shows it by its name. It computes
  with gloo on the bytes of the device, so its results are those of the CPU and gloo, bit for bit.
* `Work.wait` makes the current stream wait, and not the host. Until then the work holds the tensors.
* Tensors of the host go to gloo at once, through a group of their own: what the host asks for and what streams do would
  otherwise take each other's messages.
* A barrier is for hosts: it waits for all work of the device first.
"""

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

BACKEND = "apart_gloo"
"""For ``init_process_group``, once `register` has been called."""

_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
_FROM_TO = (
    "all_gather_single", "all_gather_single_coalesced", "allgather", "gather", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "scatter",
)  # fmt: skip

_library = torch.library.Library("apart_collectives", "DEF")
_calls: dict[int, Callable[[list, list], object]] = {}
"""What operators that have been queued are to do: they cannot carry Python objects."""
_numbers = itertools.count()

Tensors = Sequence["torch.Tensor | Tensors"] | torch.Tensor


def _do_now(written: list[torch.Tensor], read: list[torch.Tensor], call: int) -> None:
    _calls.pop(call)(written, read)


for _name in (*_IN_PLACE, *_FROM_TO):
    _library.define(f"{_name}(Tensor(a!)[] written, Tensor[] read, int call) -> ()")
    _library.impl(_name, _do_now, "CPU")  # the device runs it on a stream: [Note: Running ahead] in csrc/operators
    _library.impl(_name, lambda written, read, call: None, "Meta")


class ApartWork(dist._Work):
    """A collective that was queued; see [Note: Collectives of the device apart]."""

    def __init__(self, event: torch.Event, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._event, self._tensors, self._device = event, tensors, tensors[0].device

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        torch.accelerator.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._event.query()


class ApartProcessGroup(dist.ProcessGroup):
    """Takes tensors of the device and of the host."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._of_host = _gloo(dist.PrefixStore("host", store), rank, size, timeout)
        self._of_device = _gloo(dist.PrefixStore("device", store), rank, size, timeout)
        self._rank, self._size = rank, size
        self._stream: torch.Stream | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("apart"), torch.device("cpu")]

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name

    def barrier(self, opts: object = None) -> dist.Work:
        if self._stream is not None:
            torch.accelerator.synchronize(self._stream.device_index)
        return self._of_host.barrier()

    def _start(self, name: str, written: Tensors, read: Tensors, *options: object) -> dist.Work:
        tensors = [*_flat(written), *_flat(read)]
        if all(tensor.is_cpu for tensor in tensors):
            arguments = (written,) if read == () else (written, read)
            return getattr(self._of_host, name)(*arguments, *options)
        device = tensors[0].device
        if self._stream is None:
            self._stream = torch.Stream(device=device)

        def collective(written_here: list[torch.Tensor], read_here: list[torch.Tensor]) -> None:
            arguments = [_like(written, iter(written_here))]
            if read != ():
                arguments.append(_like(read, iter(read_here)))
            getattr(self._of_device, name)(*arguments, *options).wait()

        call = next(_numbers)
        _calls[call] = collective
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with torch.no_grad(), torch.apart.stream(self._stream):
            getattr(torch.ops.apart_collectives, name)(list(_flat(written)), list(_flat(read)), call)
        return ApartWork(self._stream.record_event(), tensors)


def _collective(name: str) -> Callable[..., dist.Work]:
    if name in _IN_PLACE:
        return lambda self, tensors, *options: self._start(name, tensors, (), *options)
    return lambda self, outputs, inputs, *options: self._start(name, outputs, inputs, *options)


for _name in (*_IN_PLACE, *_FROM_TO):
    setattr(ApartProcessGroup, _name, _collective(_name))


def register() -> None:
    """Make `BACKEND` known to torch; the device must be loaded."""
    dist.Backend.register_backend(BACKEND, ApartProcessGroup, devices=["cpu", "apart"])


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def _flat(tensors: Tensors):
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from _flat(each)


def _like(tensors: Tensors, flat) -> Tensors:
    return next(flat) if isinstance(tensors, torch.Tensor) else [_like(each, flat) for each in tensors]
