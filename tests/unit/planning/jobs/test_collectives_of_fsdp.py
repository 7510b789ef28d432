"""The formulas of [Note: Communication volume] against what torch's FSDP2 asks its process group for.

The process group is torch's fake one: it is one rank of many, and moves nothing.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cxl.inventory.tensors import Mesh
from lightning_cxl.planning.job import COLLECTIVES, exchanges, groups_of
from tests.models import TinyTransformer


def model_of_uneven_shards():
    """Return a model whose parameters cannot be cut evenly over four or eight ranks; some are frozen, two are tied."""
    model = TinyTransformer(width=12, tied=True)
    for frozen in (model.unused.weight, model.unused.bias, *(block.out.bias for block in model.blocks)):
        frozen.requires_grad_(False)
    return model


@pytest.fixture
def received(monkeypatch):
    """Bytes that this rank receives, by collective."""
    found = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}

    def watch(function, name, nbytes_of):
        call = getattr(dist, function)

        def watched(*args, **options):
            found[name] += nbytes_of(*args, **options)
            return call(*args, **options)

        monkeypatch.setattr(dist, function, watched)

    def of_ring(tensor, *_, group, **__):
        return 2 * (group.size() - 1) * tensor.nbytes // group.size()

    watch("all_gather_single", "all_gather", lambda output, input, *_, **__: output.nbytes - input.nbytes)
    watch("reduce_scatter_single", "reduce_scatter", lambda output, input, *_, **__: input.nbytes - output.nbytes)
    watch("all_reduce", "all_reduce", of_ring)
    yield found
    dist.destroy_process_group()


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64])
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    "ranks",
    [Mesh(num_devices=2), Mesh(num_devices=2, num_machines=4), Mesh(num_devices=4, num_machines=2, replicates=True)],
    ids=lambda ranks: f"{ranks.num_machines} x {ranks.num_devices}{', replicates' * ranks.replicates}",
)
def test_the_volume_of_a_step_is_what_fsdp_asks_for(ranks, num_micro_batches, no_sync, reduce_dtype, received):
    dist.init_process_group("fake", rank=0, world_size=ranks.num_ranks, store=FakeStore())
    shape = (ranks.num_replicas, ranks.num_shards) if ranks.replicates else (ranks.num_shards,)
    options = {
        "mesh": init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]),
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    }
    model = model_of_uneven_shards()
    units = [(f"blocks.{index}", block) for index, block in enumerate(model.blocks)]
    itemsize = None if reduce_dtype is None else reduce_dtype.itemsize
    groups = groups_of(model, units, ranks, reduce_itemsize=itemsize)
    assert [group.name for group in groups] == [*(name for name, _ in units), ""], "the last one has the rest"
    assert [group.name for group in groups_of(model, [("all", model)], ranks)] == ["all"]
    for _, block in units:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for index in range(num_micro_batches):
        model.set_requires_gradient_sync(not no_sync or index == num_micro_batches - 1)
        model(torch.ones(2, 3, dtype=torch.long)).sum().backward()
    volume = {each.name: each.nbytes for each in exchanges(groups, ranks, num_micro_batches, no_sync=no_sync)}
    forward, backward, scatter, all_reduce = (volume.get(name, 0.0) for name in COLLECTIVES)
    assert forward + backward == received["all_gather"] > 0
    assert scatter == received["reduce_scatter"] > 0
    assert all_reduce == pytest.approx(received["all_reduce"], abs=4 * num_micro_batches)
    assert (all_reduce > 0) == ranks.replicates
