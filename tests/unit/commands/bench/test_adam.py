"""`bench adam` on tiny sizes: its tables, its file, and its refusals."""

import json

import pytest
import torch

from lightning_cxl.commands.bench import adam, contenders, tensors
from lightning_cxl.commands.measuring import timing
from lightning_cxl.errors import ConfigError


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Turns are one run, and torch keeps its threads."""
    monkeypatch.setattr(timing, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(adam, "set_threads", lambda num_threads: None)


def run(tmp_path, *arguments: str) -> dict[str, dict]:
    """Rows by name."""
    target = tmp_path / "rows.json"
    adam.main(["--rounds=2", "--threads=2", f"--json={target}", *arguments])
    written = json.loads(target.read_text())
    assert written["machine"]["threads"] == 2
    return {row["name"]: row for row in written["rows"]}


def test_kernels_are_shown_beside_the_roof_and_torch(tmp_path, capsys):
    rows = run(tmp_path, "--sizes", "4096", "70K")
    groups = {
        "fp32 step, 4.096K": ("roof", "CPUAdam", "torch fused"),
        "fp32 step, 70K": ("roof", "CPUAdam", "torch fused"),
        "state formats, fp32 weights, 70K": ("fp32", "bf16", "8bit"),
        "state formats, split bf16 weights, 70K": ("fp32", "bf16", "8bit"),
        "gradient check, bf16, 70K": ("roof", "plain read", "measure"),
        "gradient check, fp32, 70K": ("roof", "plain read", "measure"),
    }
    timed = {name: row for name, row in rows.items() if row["unit"] == "ns/parameter"}
    assert set(timed) == {f"{title}: {name}" for title, names in groups.items() for name in names}
    assert all(row["value"] > 0 and row["goal"] is None for row in timed.values())
    shown = capsys.readouterr().out
    assert "x roof" in shown and "x fp32" in shown and "threads: 2" in shown


def test_what_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tensors, "host_available_bytes", lambda root: 0)
    assert run(tmp_path, "--sizes", "4096") == {}
    assert capsys.readouterr().out.count("skipped: ") == 5


def test_the_main_size_is_the_largest_up_to_100_million():
    def main_size(*sizes: int) -> int:
        return contenders.Options(1, 1, sizes).main_size

    assert main_size(10**6, 10**8, 3 * 10**8) == 10**8
    assert main_size(4096) == 4096
    assert main_size(3 * 10**8, 4 * 10**8) == 3 * 10**8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--threads", "0"], "must be at least 1"),
        (["--sizes", "many"], "cannot read 'many' as a number of parameters"),
        (["--sizes", "0"], "cannot read '0' as a number of parameters: write 4096, 500K, 20M or 1.5G"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        adam.main(arguments)
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    with pytest.raises(ConfigError, match="its folder does not exist"):
        adam.main(["--json", str(tmp_path / "none" / "rows.json")])


def test_threads_are_set_for_torch(monkeypatch):
    monkeypatch.undo()
    before = torch.get_num_threads()
    try:
        adam.set_threads(3)
        assert torch.get_num_threads() == 3
    finally:
        adam.set_threads(before)
