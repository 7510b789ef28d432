"""Pools of host memory for weights on SSD: three layouts, against figures of others."""

import pytest
from pools import pool_bytes
from torch import nn

from lightning_cxl.weights.hf import model_on_meta

GIB = 2**30

# MemAscend (arXiv 2505.23254): GiB of the pool of ZeRO-Infinity and of its own, and what is saved, with one block in
# flight; the mean of the savings, 72.71 %, has been quoted from it
FIGURES = {
    "llama-3.1-8b": (8.81, 2.36, 0.7316),
    "qwen2.5-7b": (9.14, 2.46, 0.7303),
    "qwen2.5-14b": (13.05, 3.41, 0.7385),
    "qwen2.5-32b": (13.05, 3.81, 0.7082),
}


@pytest.fixture(scope="module")
def models() -> dict[str, nn.Module]:
    return {name: model_on_meta(name) for name in FIGURES}


@pytest.mark.parametrize("name", FIGURES)
def test_a_published_model_saves_what_memascend_saves(models, name):
    largest, shapes, saving = FIGURES[name]
    found = pool_bytes(models[name])
    assert found.largest / GIB == pytest.approx(largest, abs=0.006)
    assert found.shapes / GIB == pytest.approx(shapes, abs=0.006)
    assert found.saving(found.shapes) == pytest.approx(saving, abs=0.0001)
    # ours has room for norms and biases, too
    assert found.shapes < found.units < 1.001 * found.shapes
    assert found.saving(found.units) == pytest.approx(saving, rel=0.01)
