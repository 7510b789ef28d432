"""Footprints and traffic against published figures and the package's own limits."""

import pytest
from footprint import PUBLISHED, shape_named, zero_offload

from lightning_cxl.memory.placement import TensorRole

R = TensorRole
GIB = 2**30

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
