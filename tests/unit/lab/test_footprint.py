"""Footprints and traffic against published figures and the package's own limits."""

import pytest
from footprint import PUBLISHED, ModelShape, shape_named, split_masters, zero_offload

from lightning_cxl.memory.placement import TensorRole

R = TensorRole
GIB = 2**30
TINY = ModelShape(name="tiny", num_parameters=1000, num_layers=8, hidden=16)

# GiB of the classes that arXiv 2507.03305's authors place (CXL-Aware-LLM-Finetuning, numa_allocation_patch.py)
STATIC = {
    "qwen2.5-7b": (28.37, 28.37, 28.37, 28.37, 14.19, 14.19, 141.9),
    "mistral-nemo-12b": (45.63, 45.63, 45.63, 45.63, 22.81, 22.81, 228.1),
}
ROLES = (R.MOMENTUM, R.VARIANCE, R.MASTER_GRADS, R.MASTER_WEIGHTS, R.COMPUTE_WEIGHTS, R.COMPUTE_GRADS)


@pytest.mark.parametrize("name", STATIC)
def test_the_classes_of_the_paper_are_as_large_as_published(name):
    *classes, total = STATIC[name]
    sizes = zero_offload(shape_named(name), 1, 32768).bytes_of()
    for role, gib in zip(ROLES, classes, strict=True):
        assert sizes[role] / GIB == pytest.approx(gib, abs=0.006), role
    assert sum(sizes[role] for role in ROLES) == 20 * PUBLISHED[name].num_parameters
    assert sum(sizes[role] for role in ROLES) / GIB == pytest.approx(total, abs=0.06)


def moved(job):
    total = {}
    for each in job.classes:
        for phase, kind, nbytes in each.moves:
            total[phase, kind] = total.get((phase, kind), 0) + nbytes
    return total


@pytest.mark.parametrize(
    ("make", "updated"),
    [(zero_offload, 6 + 28 + 2), (split_masters, 14 + 12)],  # conversion, Adam, bfloat16 weights; read and written
)
def test_a_step_moves_weights_twice_gradients_once_and_activations_both_ways(make, updated):
    job = make(TINY, 3, 5)
    activations = 2 * 3 * 5 * 16 * 8
    assert moved(job) == {
        ("forward", "h2d"): 2000,
        ("forward", "d2h"): activations,
        ("backward", "h2d"): 2000 + activations,
        ("backward", "d2h"): 2000,
        ("update", "cpu"): updated * 1000,
    }
    assert (job.num_tokens, job.num_units, job.num_parameters) == (15, 8, 1000)
