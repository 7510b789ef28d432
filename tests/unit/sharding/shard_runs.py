"""What a rank does to weights that lie on the host: trains in the simplest way, saves, loads, makes and reads them."""

import io
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from lightning_cxl.devices import DeviceEngine, Transfer
from lightning_cxl.sharding.host_shard import HostShard, host_shards
from tests import apart
from tests.apart import fsdp_runs


def pinned(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def engine() -> DeviceEngine:
    return DeviceEngine(torch.device("apart", torch.accelerator.current_device_index()))


class HostUpdates:
    """Copies gradients to the host when they are ready, and updates shards there with an optimizer of torch."""

    def __init__(self, model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        self.engine = engine()
        self.shards = host_shards(model, pinned, self.engine)
        self.arriving: list[tuple[nn.Parameter, Transfer, torch.Tensor]] = []
        masters = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                masters.append(nn.Parameter(self.shards[name].host))
                parameter.register_post_accumulate_grad_hook(self._hook(masters[-1]))
        self.optimizer = make(masters)

    def _hook(self, master: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def start(parameter: torch.Tensor) -> None:
            gradient = parameter.grad.to_local()
            host = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            self.arriving.append((master, self.engine.d2h(gradient, host), host))
            parameter.grad = None

        return start

    def step(self) -> None:
        for master, transfer, gradient in self.arriving:
            transfer.wait_host()
            master.grad = gradient if master.grad is None else master.grad + gradient
        self.arriving.clear()
        for shard in self.shards.values():
            shard.settle()
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


def on_host(model: nn.Module) -> bool:
    """Whether every local tensor is a shard on the host."""
    return all(isinstance(each.detach().to_local(), HostShard) for each in model.parameters())


def bytes_on_device() -> int:
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


class Trained(NamedTuple):
    """What training with shards on the host gives on a rank."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    bytes_before: int
    """On the device, before the first step."""
    bytes_after: int
    on_host: bool


def train(name: str, delays: dict[str, float]) -> Trained:
    case = fsdp_runs.CASES[name]
    model = fsdp_runs.shard(case, "apart")
    updates = HostUpdates(model, fsdp_runs.adamw)
    apart.set_poison(True)  # not only when it is taken again: nothing on the device reads what has been given back
    apart.set_delay(**delays)
    before = bytes_on_device()
    losses = fsdp_runs.steps(case, model, updates, "apart")
    updates.arriving.clear()
    after = bytes_on_device()
    apart.set_delay()
    return Trained(losses, fsdp_runs.whole(model), before, after, on_host(model))


COMPUTE = 0
"""The stream of forward and backward."""


class Seen(NamedTuple):
    """Of one forward and backward."""

    hidden: dict[str, float]
    """Which part of the time of all copies of a kind the device computed meanwhile."""
    host_share: float
    """Which part of the whole time had passed when the host had asked for everything."""


def one_step(name: str, delays: dict[str, float]) -> Seen:
    """Look at the second step: the first one makes streams and memory."""
    case = fsdp_runs.CASES[name]
    model = fsdp_runs.shard(case, "apart")
    updates = HostUpdates(model, fsdp_runs.adamw)
    fsdp_runs.steps(case, model, updates, "apart", 1)
    data = fsdp_runs.batch(case, 1, "apart")
    apart.set_delay(**delays)
    with apart.timeline() as entries:
        model(**data).loss.backward()
    apart.set_delay()
    updates.step()
    compute = [entry for entry in entries if entry.kind == "kernel" and entry.stream == COMPUTE]
    hidden = {}
    for kind in ("h2d", "d2h"):
        copies = [entry for entry in entries if entry.kind == kind]
        meanwhile = sum(apart.overlap(copy, kernel) for copy in copies for kernel in compute)
        hidden[kind] = meanwhile / sum(copy.end - copy.start for copy in copies)
    begin, end = entries[0].start, max(entry.end for entry in entries)
    return Seen(hidden, (max(entry.queued for entry in entries) - begin) / (end - begin))


# -- without training --------------------------------------------------------------------------------------------------

CASE = fsdp_runs.CASES["uneven"]
Weights = dict[str, torch.Tensor]


class Model:
    """A model with its shards on the host."""

    def __init__(self, *, zeroed: bool = False) -> None:
        self.model = fsdp_runs.shard(CASE, "apart")
        self.shards = host_shards(self.model, pinned, engine())
        self._addresses = [shard.host.data_ptr() for shard in self.shards.values()]
        for shard in self.shards.values() if zeroed else ():
            shard.zero_()

    def whole(self) -> Weights:
        """Return the weights, which must be in the memory that they were in."""
        assert on_host(self.model)
        local = {name: parameter.detach().to_local() for name, parameter in self.model.named_parameters()}
        assert [local[name].host.data_ptr() for name in self.shards] == self._addresses
        return fsdp_runs.whole(self.model)


def weights() -> Weights:
    """Return what every load must give."""
    return fsdp_runs.whole(fsdp_runs.shard(CASE, "apart"))


def checkpoint(folder: str, asynchronous: bool) -> tuple[Weights, int]:
    """Return what is loaded again with DCP, and how many bytes went to the device for it."""
    saved, loaded = Model(), Model(zeroed=True)
    before = apart.counters()["h2d_bytes"]
    state = {"model": saved.model.state_dict()}
    if asynchronous:
        future = dcp.async_save(state, checkpoint_id=folder)
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)
    dcp.load({"model": loaded.model.state_dict()}, checkpoint_id=folder)
    moved = apart.counters()["h2d_bytes"] - before
    return loaded.whole(), moved


def sharded_state() -> Weights:
    loaded = Model(zeroed=True)
    loaded.model.load_state_dict(Model().model.state_dict())
    return loaded.whole()


def whole_state(broadcast: bool) -> Weights:
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(Model().model, options=whole)
    if not broadcast:
        state = weights()
    loaded = Model(zeroed=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(loaded.model, state, options=options)
    return loaded.whole()


def pickled() -> Weights:
    file = io.BytesIO()
    torch.save(Model().model.state_dict(), file)
    file.seek(0)
    return {name: value.full_tensor().cpu() for name, value in torch.load(file, weights_only=False).items()}


def moved_to_its_device() -> Weights:
    moved = Model()
    moved.model.to("apart")
    return moved.whole()


def drawn(on_the_host: bool) -> Weights:
    """Return weights that DTensor has drawn: other ones on every rank."""
    made = Model().model if on_the_host else fsdp_runs.shard(CASE, "apart")
    torch.manual_seed(7)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return fsdp_runs.whole(made)


def from_meta() -> tuple[Weights, list[bool]]:
    """Return weights of a model that was sharded without memory, and whether parameters are the same objects."""
    values = weights()
    with torch.device("meta"):
        model = fsdp_runs.shard(CASE, "apart")
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.mine = True
    shards = host_shards(model, pinned, engine())
    for name, parameter in model.named_parameters():
        part = torch.chunk(values[name], 2)
        rank = torch.distributed.get_rank()
        shards[name].host.copy_(part[rank] if rank < len(part) else values[name][:0])
        parameter.requires_grad_()
    same = [parameter is parameters[name] and parameter.mine for name, parameter in model.named_parameters()]
    return fsdp_runs.whole(model), same
