"""Shards as torch cuts them, and parameters whose state stays float32 in 8 bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Mesh, Workload
from tests.models import TinyTransformer

SHAPES = st.lists(st.integers(1, 40), max_size=3).map(lambda shape: torch.empty(shape, device="meta"))
MESHES = st.builds(Mesh, num_devices=st.integers(1, 9), num_machines=st.integers(1, 5), replicates=st.booleans())


@given(SHAPES.filter(lambda parameter: parameter.ndim > 0), MESHES)
def test_a_shard_is_the_longest_of_torch_s_chunks(parameter, mesh):
    assert mesh.shard_numel(parameter) == torch.chunk(parameter, mesh.num_shards)[0].numel()


def test_a_machine_has_its_ranks_shards():
    even, odd = torch.empty(8, 4, device="meta"), torch.empty(3, device="meta")
    shards = Mesh(num_devices=2, num_machines=2)
    assert shards.machine_bytes(128, [even]) == 64
    assert shards.machine_bytes(12, [odd]) == 8  # two ranks of one padded number of four bytes
    assert shards.machine_bytes(140, [even, odd]) == 72
    assert Mesh(num_devices=2, num_machines=2, replicates=True).machine_bytes(128, [even]) == 128
    assert Mesh(num_devices=4).machine_bytes(12, [odd]) == 16
    assert Mesh().machine_bytes(77, [even]) == 77
    assert shards.machine_bytes(5, []) == 5


@pytest.mark.parametrize(
    ("count", "frozen", "streamed"),
    [
        (0, (), "012345"), (1, (), "12345"), (2, (), "1245"), (3, (), "135"), (1, (1, 2, 3), "02345"),
        (4, (1, 2, 3), "45"), (6, (), ""), (9, (5,), ""),
    ],
)  # fmt: skip
def test_units_stay_on_the_device_spread_evenly_and_frozen_ones_first(count, frozen, streamed):
    model = TinyTransformer(depth=6)
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    plan = list_tensors(model, None, OffloadConfig(units_on_device=count), Workload(batch=1, sequence=8))
    assert "".join(unit.name[-1] for unit in plan.streamed) == streamed
    assert plan.overlap == "forward"
