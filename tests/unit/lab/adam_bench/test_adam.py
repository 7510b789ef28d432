"""examples/bench/adam.py: contenders agree with each other; every section on tiny sizes, its rows and files."""

import functools
import json
import sys

import adam
import pytest
import timing
import torch
from adam_bench import chains, peers
from adam_bench.contenders import torch_adamw
from adam_bench.memory import extra_bytes
from adam_bench.path import Path
from adam_bench.problems import Layout, Problem
from timing import Contender

LAYOUT = Layout("some", ((40, 50), (7,), (1000,)))


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Turns are one run, nothing is compiled (half a minute), no peer is imported, torch keeps its threads."""
    monkeypatch.setattr(timing, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    for name in ("deepspeed", "bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(adam, "set_threads", lambda num_threads: None)


def values(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().float().flatten() for tensor in tensors])


@pytest.mark.parametrize(
    "make",
    [
        lambda problem: torch_adamw(problem, foreach=True),
        lambda problem: functools.partial(peers.compiled_step(problem, problem.parameters), 1.0),
    ],
)
def test_peers_agree_on_a_float32_step(make):
    before, updated = values(Problem.make(LAYOUT).parameters), []
    for make_one in (lambda problem: torch_adamw(problem, fused=True), make):
        problem = Problem.make(LAYOUT)
        run = make_one(problem)
        run()
        run()
        updated.append([values(tensors) for tensors in (problem.parameters, problem.momentum, problem.variance)])
    assert not torch.equal(updated[0][0], before)
    for mine, theirs in zip(*updated, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-9)


def test_chains_agree_on_new_weights_and_leave_the_gradients():
    masters = []
    for make in (
        lambda path: chains.in_turn(
            chains.torch_prepare(path.problem.gradients, path.max_norm), chains.torch_update(path.masters)
        ),
        lambda path: chains.compiled_chain(path.masters, path.max_norm),
    ):
        path = Path(Problem.make(LAYOUT, torch.bfloat16), 1)
        gradients, weights = values(path.problem.gradients), values(path.problem.parameters)
        run = make(path)
        run()
        assert torch.equal(values(path.problem.gradients), gradients)
        masters.append(values(path.masters.masters))
        assert not torch.equal(masters[-1], weights)
        assert torch.equal(values(path.problem.parameters), masters[-1].bfloat16().float())
    torch.testing.assert_close(*masters, rtol=1e-6, atol=1e-8)


def run(tmp_path, *arguments: str) -> dict[str, dict]:
    """Rows by name."""
    target = tmp_path / "rows.json"
    adam.main(["--rounds=2", "--threads=2", f"--json={target}", *arguments])
    written = json.loads(target.read_text())
    assert written["machine"]["threads"] == 2
    return {row["name"]: row for row in written["rows"]}


def judged(rows: dict[str, dict]) -> set[str]:
    """Return the names of rows with a goal, without sizes."""
    return {name.replace(", 70K", "") for name, row in rows.items() if row["goal"] is not None}


def test_the_step_section(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "step.png"
    rows = run(tmp_path, "--sections", "step", "--sizes", "4096", "70K", "--plot", str(picture))
    assert picture.read_bytes()[1:4] == b"PNG"
    for size in ("4.096K", "70K"):
        for name in ("roof", "CPUAdam", "torch fused", "torch foreach", "torch.compile"):
            assert rows[f"fp32 step, {size}: {name}"]["value"] > 0
            assert rows[f"fp32 step, {size}: {name}"]["unit"] == "ns/parameter"
    assert judged(rows) == {"fp32 step, 4.096K: CPUAdam / torch fused", "fp32 step: CPUAdam / torch fused"}
    shown = capsys.readouterr().out
    assert "DeepSpeed CPUAdam: skipped, ModuleNotFoundError" in shown
    assert "of 2 goals hold" in shown


def test_the_other_sections(tmp_path):
    rows = run(tmp_path, "--sections", "path", "states", "check", "memory", "--sizes", "70K")
    formats, weights = ("fp32", "bf16", "8bit"), ("fp32 weights", "split bf16 weights")
    assert judged(rows) == {
        *(f"full path: {ratio}" for ratio in ("CPUAdam / roof", "torch / CPUAdam")),
        *(f"state formats, {kind}: {ratio}" for kind in weights for ratio in ("8bit / fp32", "fp32 / bf16")),
        *(f"gradient check, {kind}: measure / roof" for kind in ("bf16", "fp32")),
        *(f"extra memory, {what}: CPUAdam" for what in ("fp32 step", "full path")),
        *(f"extra memory, state formats: {kind}" for kind in formats),
        "extra memory, gradient check, bf16: measure",
    }
    for name in ("update of the full path, 70K: CPUAdam / torch.compile", "extra memory, full path, 70K: torch"):
        assert rows[name]["goal"] is None and rows[name]["holds"] is None


@pytest.mark.parametrize("mib", [8, 64])
def test_the_peak_of_a_run_is_what_it_allocates(mib):
    def make():
        return lambda: torch.ones(mib << 18).sum()

    for _ in range(3):
        torch.ones(7 << 20)  # glibc maps the first 28 MiB, and keeps the second in its heap for whoever comes next
    assert mib - 2 << 20 <= extra_bytes(Contender("large", make)) <= mib + 2 << 20
    assert extra_bytes(Contender("none", lambda: lambda: None)) < 1 << 20
