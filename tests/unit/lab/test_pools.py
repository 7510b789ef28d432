"""Pools of host memory for weights on SSD: three layouts, against figures of others and against hand-made models."""

import json

import pools
import pytest
from pools import pool_bytes
from torch import nn

from lightning_cxl.weights.hf import model_on_meta
from tests.models import TinyTransformer

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


def test_the_command_prints_and_writes_a_row_for_each_model(monkeypatch, tmp_path, capsys):
    models = {name: TinyTransformer(depth=depth, tied=name == "tied") for name, depth in (("one", 2), ("tied", 3))}
    monkeypatch.setattr(pools, "model_on_meta", models.get)
    target = tmp_path / "rows.json"
    pools.main(["--models", "one", "tied", "--in-flight=2", f"--json={target}"])
    rows = {row["name"]: row["value"] for row in json.loads(target.read_text())["rows"]}
    one, tied = (pool_bytes(model, in_flight=2) for model in models.values())
    assert rows["one: largest"] == one.largest / GIB
    assert rows["tied: units"] == tied.units / GIB
    mean = (one.saving(one.units) + tied.saving(tied.units)) / 2
    assert rows["mean saving of units"] == pytest.approx(mean)
    shown = capsys.readouterr().out
    assert f"{mean:.2%}" in shown and "2 of the units in flight" in shown
