import threading
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lightning_cxl.devices import HostEngine
from lightning_cxl.errors import TierFullError
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.sharding.fsdp import place_shards, without_reducing
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import local
from tests.cases import every_value
from tests.distributed import training
from tests.distributed.training import Job, assert_same_weights, cut_model, error_of


def after_a_bad_element(optimizer, clip):
    """Return weights before and after a step in which one element of one shard, on rank 1 alone, is not finite.

    And what this step has warned of.
    """
    with training.Training(Job(optimizer=optimizer)) as ours:
        ours.steps(0, 1)
        before = ours.whole()
        with ours.loop.backward():
            training.loss_of(ours.model, ours.first()).backward()
        holders = ours.optimizer.param_groups[0]["params"]
        if ours.rank == 1:
            holders[0].grad.to_local()[0, 0] = torch.inf
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(holders, clip)
            ours.optimizer.step()
        return before, ours.whole(), [str(each.message) for each in caught]


@pytest.mark.parametrize(("optimizer", "clip"), every_value(["AdamW", "SGD"], [None, 0.5]))
def test_a_bad_element_of_one_shard_lets_all_leave_the_step_out(ranks, optimizer, clip):
    for before, after, texts in ranks.of(2).run(after_a_bad_element, optimizer, clip):
        assert_same_weights(after, before)
        assert any("this step is left out" in text and "model.embed_tokens.weight" in text for text in texts), texts


def copies(job):
    """Return whether all ranks with the same shard or scalar have the same values, right after the model was cut."""
    model = training.make_model(job)
    cut_model(model, job)
    group, equal = training.mesh_of(job, dist.get_world_size()).get_group("replicate"), []
    for parameter in model.parameters():
        own = local(parameter.detach())
        other = own.clone()
        dist.broadcast(other, dist.get_global_rank(group, 0), group)
        equal.append(torch.equal(own, other))
    return all(equal)


def test_copies_of_a_shard_begin_equal_whatever_the_seeds(ranks):
    job = Job(model="transformer", scalars=True, replicas=2, seeds=True)
    assert ranks.of(4).run(copies, job) == [True] * 4


def error_of_a_graph(job):
    """Return the error of a backward whose gradients are to be differentiated."""
    model = training.make_model(job)
    cut_model(model, units=False)
    (tokens,) = next(training.batches(job, *training.place()))
    return error_of(lambda: training.loss_of(model, tokens).backward(create_graph=True))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_mean_over_processes_is_not_part_of_a_graph(ranks):
    for error in ranks.of(2).run(error_of_a_graph, Job(model="transformer", scalars=True)):
        assert "parameter without dimensions" in error and "create_graph=True" in error


def gradients_of_scalars(job, asks):
    """Return gradients after two micro-batches, of which one is reduced; in between, somebody may ask for one's own."""
    model = training.make_model(job)
    cut_model(model, units=False)
    scalars = [parameter for parameter in model.parameters() if parameter.dim() == 0]
    (first,), (second,) = list(training.batches(job, *training.place()))[:2]
    with without_reducing(model):
        training.loss_of(model, first).backward()
    own = torch.autograd.grad(training.loss_of(model, first), scalars, allow_unused=True) if asks else ()
    training.loss_of(model, second).backward()
    return [parameter.grad.item() for parameter in scalars], [grad.item() for grad in own]


def test_gradients_that_are_asked_for_are_of_one_process_and_change_no_mean(ranks):
    job = Job(model="transformer", scalars=True)
    found = ranks.of(2).run(gradients_of_scalars, job, True)
    assert [means for means, _ in found] == [means for means, _ in ranks.of(2).run(gradients_of_scalars, job, False)]
    assert found[0][1] != found[1][1] and found[0][0] == found[1][0]


def by_cpu_adam_alone(clip):
    """Train FSDP2's parameters with `CPUAdam`, without a run; return norms, whole weights and the types of state."""
    job = Job(model="transformer", tied=False)
    model, (rank, world) = training.make_model(job), training.place()
    fully_shard(model, mesh=training.mesh_of(job, world))
    optimizer = CPUAdam(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-5)
    norms = []
    for (tokens,) in training.batches(job, rank, world):
        training.loss_of(model, tokens).backward()
        if clip is not None:
            norms.append(optimizer.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad()
    state = {type(value).__name__ for entry in optimizer.state.values() for value in entry.values()}
    return norms, training.whole_weights(model), state


@pytest.mark.parametrize("clip", [0.1, None])
def test_cpu_adam_alone_updates_parameters_of_fsdp(ranks, clip):
    expected = ranks.of(2).run(training.by_fsdp, Job(model="transformer", tied=False, clip=clip))
    for (norms, weights, state), wanted in zip(ranks.of(2).run(by_cpu_adam_alone, clip), expected, strict=True):
        assert norms == pytest.approx(wanted.norms, rel=1e-6)
        assert state == {"Tensor", "DTensor"}  # the count of steps; momentum and variance, cut as the parameters
        for name, each in weights.items():
            assert (each - wanted.weights[name]).abs().max() <= 1e-6, name


class Unsendable(Exception):
    """Cannot be pickled as it is."""

    def __init__(self):
        super().__init__("number 7")
        self.lock = threading.Lock()


def failing(error):
    """Do a step that fails on rank 1 alone; return type and text of what is raised, and what a later step gives."""
    rank, _ = training.place()

    def step():
        if rank == 1 and error is not None:
            raise error()
        return "fine" if rank == 0 else threading.Lock()

    try:
        on_all_ranks(step)
    except BaseException as error:
        return type(error).__name__, str(error), on_all_ranks(lambda: rank)
    return None


def without_room_in_the_backward():
    """Return the error of a loop that closes what it has opened, where gradients find no room."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000, "num_hidden_layers": 4}
    options = {"tiers": {"dram": "36MiB"}, "on_tier_full": "error"}
    return error_of(lambda: training.by_us(Job(steps=1, sizes=sizes, options=options)))


@pytest.mark.parametrize("device", ["cpu", "apart"])
def test_what_closes_a_loop_shows_the_first_error(ranks, device):
    for error in ranks.of(2, device).run(without_room_in_the_backward):
        assert error.startswith("TierFullError: cannot place compute_grads")


def placed(with_room):
    """Return the error of placing shards where one rank has no room."""
    model = training.make_model(Job())
    cut_model(model)

    def place(_parameter, shard, numel):
        if training.place()[0] == 1 and not with_room:
            raise TierFullError("no room")
        return shard.new_empty(numel)

    return error_of(lambda: place_shards(model, place, HostEngine()))


def test_shards_that_find_no_room_on_one_rank_are_an_error_of_all(ranks):
    assert ranks.of(2).run(placed, True) == ["", ""]
    assert ranks.of(2).run(placed, False) == ["TierFullError: rank 1 of the group: no room"] * 2


def test_whatever_one_rank_raises_is_known_to_all(ranks):
    ours = ("TierFullError", "rank 1 of the group: no room", [0, 1])
    assert ranks.of(2).run(failing, partial(TierFullError, "no room")) == [ours, ours]
    for error, own in (
        (Unsendable, ("Unsendable", "number 7")),
        (partial(KeyError, "x"), ("KeyError", "'x'")),
        (partial(SystemExit, 3), ("SystemExit", "3")),
        (None, ("TypeError", "cannot pickle '_thread.lock' object")),  # of its result
    ):
        there, here = ranks.of(2).run(failing, error)
        assert here == (*own, [0, 1])
        assert there == ("LightningCXLError", f"rank 1 of the group: {own[0]}: {own[1]}", [0, 1])
