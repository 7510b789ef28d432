"""What a rank does to weights that lie on the host without training: it saves, loads, makes and reads them."""

import io

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from lightning_cxl.sharding.host_shard import host_shards
from tests import apart
from tests.apart import fsdp_runs
from tests.unit.sharding.host_updates import engine, on_host, pinned

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
