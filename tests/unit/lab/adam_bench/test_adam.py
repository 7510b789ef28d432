"""examples/bench/adam.py: contenders agree with each other; every section on tiny sizes, its rows and files."""

import json
import sys

import adam
import pytest
import timing
from adam_bench import peers


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Turns are one run, nothing is compiled (half a minute), no peer is imported, torch keeps its threads."""
    monkeypatch.setattr(timing, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(peers, "_compiled", lambda function: function)
    for name in ("deepspeed", "bitsandbytes", "torchao"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(adam, "set_threads", lambda num_threads: None)


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
