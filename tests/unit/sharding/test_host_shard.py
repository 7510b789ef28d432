import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from lightning_cxl.sharding.host_shard import HostShard
from tests import apart
from tests.distributed.ranks import ranks_apart
from tests.distributed.training import Job, Training, cut_model, loss_of, make_model, mesh_of, whole

UNEVEN = Job(sizes={"vocab_size": 63, "intermediate_size": 47})


@pytest.fixture(scope="module")
def ranks():
    if why := apart.why_unavailable():
        pytest.skip(why)
    with ranks_apart(2) as started:
        yield started


def made():
    """Return a model of which one parameter has no rows on rank 1."""
    model = make_model(UNEVEN)
    model.scale = nn.Parameter(torch.full((1,), 1.5))
    return model


def wholes(model):
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


class Cut:
    def __init__(self, *, zeroed=False):
        self.model = made()
        self.session = cut_model(self.model)
        self._addresses = [shard.host.data_ptr() for shard in self.shards()]
        for shard in self.shards() if zeroed else ():
            shard.zero_()

    def shards(self):
        shards = [parameter.detach().to_local() for parameter in self.model.parameters()]
        assert all(isinstance(shard, HostShard) for shard in shards)
        return shards

    def whole(self):
        """Return the weights, which must be in the memory that they were in, and end its session."""
        assert [shard.host.data_ptr() for shard in self.shards()] == self._addresses
        self.session.close()
        return wholes(self.model)


def checkpoint(folder, asynchronous):
    """Return what is loaded again with DCP, and how many bytes went to the device for it."""
    saved, loaded = Cut(), Cut(zeroed=True)
    before = apart.counters()["h2d_bytes"]
    state = {"model": saved.model.state_dict()}
    if asynchronous:
        dcp.async_save(state, checkpoint_id=folder).result()
    else:
        dcp.save(state, checkpoint_id=folder)
    dcp.load({"model": loaded.model.state_dict()}, checkpoint_id=folder)
    moved = apart.counters()["h2d_bytes"] - before
    saved.session.close()
    return loaded.whole(), moved


def sharded_state():
    saved, loaded = Cut(), Cut(zeroed=True)
    loaded.model.load_state_dict(saved.model.state_dict())
    saved.session.close()
    return loaded.whole()


def whole_state(broadcast):
    saved, loaded = Cut(), Cut(zeroed=True)
    state = wholes(saved.model)
    if broadcast:
        state = get_model_state_dict(saved.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(loaded.model, state, options=options)
    saved.session.close()
    return loaded.whole()


def pickled():
    saved, file = Cut(), io.BytesIO()
    torch.save(saved.model.state_dict(), file)
    file.seek(0)
    saved.session.close()
    loaded = torch.load(file, weights_only=False).items()
    return {name: whole(value) for name, value in loaded if name != "lm_head.weight"}


def moved_to_its_device():
    moved = Cut()
    moved.model.to("apart")
    return moved.whole()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_dcp_need_no_device(ranks, tmp_path, asynchronous):
    for found, moved in ranks.run(checkpoint, str(tmp_path), asynchronous):
        check(found)
        assert moved == 0


def check(found):
    expected = dict(made().named_parameters())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("run", "options"),
    [(sharded_state, ()), (whole_state, (False,)), (whole_state, (True,)), (pickled, ()), (moved_to_its_device, ())],
)
def test_state_comes_and_goes_as_with_any_tensor(ranks, run, options):
    for found in ranks.run(run, *options):
        check(found)


def drawn():
    """Return weights that DTensor draws, other ones on every rank: of shards on the host, and on the device."""
    ours, model = Cut(), made().to("apart")
    for block in model.model.layers:
        fully_shard(block, mesh=mesh_of(UNEVEN, 2))
    fully_shard(model, mesh=mesh_of(UNEVEN, 2))
    for each in ours.model, model:
        torch.manual_seed(7)
        for parameter in each.parameters():
            nn.init.normal_(parameter)
    return ours.whole(), wholes(model)


def test_weights_are_drawn_as_on_the_device(ranks):
    for ours, expected in ranks.run(drawn):
        assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in expected)


def one_step():
    """Return which parts of the time of copies of a kind the device computed, and how early the host was done."""
    with Training(Job(sizes={"num_hidden_layers": 4})) as ours:
        ours.steps(0, 1)  # makes streams and memory
        tokens = ours.first()
        apart.set_delay(kernel=2e-3, h2d=4e-3, d2h=4e-3)
        with apart.timeline() as entries, ours.loop.backward():
            loss_of(ours.model, tokens).backward()
        apart.set_delay()
    compute = [entry for entry in entries if entry.kind == "kernel" and entry.stream == 0]
    hidden = {}
    for kind in ("h2d", "d2h"):
        copies = [entry for entry in entries if entry.kind == kind]
        meanwhile = sum(apart.overlap(copy, kernel) for copy in copies for kernel in compute)
        hidden[kind] = meanwhile / sum(copy.end - copy.start for copy in copies)
    begin, end = entries[0].start, max(entry.end for entry in entries)
    return hidden, (max(entry.queued for entry in entries) - begin) / (end - begin)


def test_the_device_computes_while_shards_come_and_gradients_go(ranks):
    for hidden, host_share in ranks.run(one_step):
        assert hidden["h2d"] > 0.5  # of all but the first unit's
        assert hidden["d2h"] > 0.2  # of all but the last units': the root has the embedding
        assert host_share < 0.7  # it has not waited for the device
