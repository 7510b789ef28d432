"""Footprints and traffic against published figures and the package's own limits."""

import footprint
import pytest
from footprint import PUBLISHED, ModelShape, shape_named, split_masters, zero_offload

from lightning_cxl.gradients import step as updates
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.optim.kernels import BLOCK_SIZE

R = TensorRole
GIB = 2**30
QWEN, NEMO = PUBLISHED["qwen2.5-7b"], PUBLISHED["mistral-nemo-12b"]
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


@pytest.mark.parametrize(
    ("shape", "batch", "gib"),
    [(QWEN, 1, 6.12), (QWEN, 3, 18.4), (NEMO, 1, 12.5), (NEMO, 3, 37.5)],
)
def test_activations_are_as_large_as_published(shape, batch, gib):
    for job in (zero_offload(shape, batch, 32768), split_masters(shape, batch, 32768)):
        assert job.bytes_of()[R.ACTIVATIONS] / GIB == pytest.approx(gib, abs=0.03)


def test_the_parameter_counts_follow_from_the_published_configurations():
    def llama(vocab, hidden, mlp, layers, key_values=1024):
        layer = 2 * hidden * hidden + 2 * hidden * key_values + 3 * hidden * mlp + 2 * hidden
        return 2 * vocab * hidden + layers * layer + hidden

    assert PUBLISHED["llama-3.1-8b"].num_parameters == llama(128256, 4096, 14336, 32)
    assert PUBLISHED["llama-3.1-70b"].num_parameters == llama(128256, 8192, 28672, 80)


@pytest.mark.parametrize(
    ("state", "overlap", "stored"),
    [
        ("fp32", "none", 14), ("fp32", "forward", 14), ("fp32", "backward", 13),
        ("bf16", "none", 10), ("8bit", "none", 6 + 2 + 2 * 4 / BLOCK_SIZE),
    ],
)  # fmt: skip
def test_split_masters_take_so_many_bytes_per_parameter(state, overlap, stored):
    sizes = split_masters(TINY, 1, 1, state=state, overlap=overlap).bytes_of()
    assert (sum(sizes.values()) - sizes[R.ACTIVATIONS]) / 1000 == pytest.approx(stored, abs=0.002)


def test_gradients_of_as_many_units_exist_as_the_runtime_lets_wait():
    assert updates.MAX_UNITS_IN_FLIGHT + 1 == footprint._UNITS_OF_GRADIENTS
    few = ModelShape(name="few", num_parameters=1000, num_layers=2, hidden=16)
    assert split_masters(few, 1, 1, overlap="backward").bytes_of()[R.COMPUTE_GRADS] == 2000
    assert split_masters(TINY, 1, 1, overlap="backward").bytes_of()[R.COMPUTE_GRADS] == 1000


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


def test_flops_by_hand():
    job = zero_offload(TINY, 3, 5)
    assert job.forward_flops == 3 * (2 * 1000 * 5 + 2 * 5 * 5 * 16 * 8)
    assert job.backward_flops == 3 * job.forward_flops
