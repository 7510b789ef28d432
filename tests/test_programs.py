"""Programs that take long, which only `make test-all` runs: examples, benchmarks, the site, and tests of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import EXAMPLES, ROOT, _elsewhere, code_blocks  # noqa: F401

pytestmark = [pytest.mark.full, pytest.mark.slow]


@pytest.mark.parametrize(("name", "processes"), [("one", 1), ("several", 2)])
def test_a_file_for_accelerate_starts_the_loop_of_the_guide(name, processes, tmp_path):
    loop = code_blocks(EXAMPLES / "guides" / "accelerate.md", "python")[0]
    script = tmp_path / "script.py"
    script.write_text(
        f"{loop.replace('CXLAccelerator(offload', 'CXLAccelerator(cpu=True, offload')}\n"
        "line = f'here {accelerator.num_processes} {accelerator.mixed_precision}\\n'\n"
        "print(line, end='')  # in one piece: two processes write to one pipe"
    )
    files = ["--config_file", EXAMPLES / "configs" / f"accelerate_{name}.yaml", script]
    command = [sys.executable, "-m", "accelerate.commands.launch", *files]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=200)
    assert done.stdout.count(f"here {processes} bf16") == processes
    assert (tmp_path / "checkpoint" / "sharded_model_0").is_dir() == (processes == 2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's own advice
def test_the_notebook_runs_and_says_what_its_text_says(capsys):
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "notebook", "exec"), names)
    assert names["resumed_model"].losses[0] < names["model"].losses[-1] < names["model"].losses[0] / 1.5
    shown = capsys.readouterr().out
    assert "steps 32 -> 48" in shown and "(decorator on class PlacedBlock)" in shown


def run_benchmark(name, *options, succeeds=True):
    command = [sys.executable, EXAMPLES / "bench" / f"{name}.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, check=succeeds, capture_output=True, timeout=400)


BENCHMARKS = [  # what each must measure, and rows that have a limit
    ("step --steps=3 --size=tiny --only lightning cxl_offload", ["lightning: peak", "cxl_offload: step"], {}),
    (
        "several_ranks --size=tiny --ranks 2 --rounds=2 --steps=1 --only fsdp2 ours",
        ["2 ranks, fsdp2: step", "2 ranks, ours: grown"],
        {"2 ranks, fsdp2: loss off": 0.01, "2 ranks, ours: loss off": 0.01},
    ),
    (
        "gpu --shape=tiny --seq=64 --device=cpu --steps=3 --only cxl_offload",
        ["cxl_offload: host peak", "cxl_offload: profiled: host step"],
        {"cxl_offload: profiled: compute": 1e-9},
    ),
]


@pytest.mark.parametrize(("command", "positive", "limits"), BENCHMARKS, ids=[each[0] for each in BENCHMARKS])
def test_a_benchmark_writes_rows(command, positive, limits):
    """Most compare losses themselves."""
    run_benchmark(*command.split(), "--json", "rows.json")
    written = json.loads(Path("rows.json").read_text())
    values = {row["name"]: row["value"] for row in written["rows"]}
    assert written["machine"]
    assert [name for name in positive if not values[name] > 0] == []
    assert [name for name, limit in limits.items() if not values[name] < limit] == []


def test_the_benchmark_of_a_large_model_trains_it_from_its_files(tmp_path):
    size = ["--folder", tmp_path, "--size=tiny"]
    done = run_benchmark("ssd_largest", *size, "--layers=6", "--steps=5", "--everything")
    moved = json.loads(done.stdout.splitlines()[-1])["ssd"]
    assert 0 < moved["written_bytes_per_step"] < moved["read_bytes_per_step"]
    refused = run_benchmark("ssd_largest", *size, "--layers=2", "--steps=2", succeeds=False)
    assert refused.returncode == 1 and b"memory is enough for this model" in refused.stderr


def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("furo", reason="needs the extra `docs`")
    (command,) = re.findall(r"\$\(BIN\)/python -m (sphinx .*) build/site", (ROOT / "Makefile").read_text())
    subprocess.run([sys.executable, "-m", *command.split(), tmp_path], cwd=ROOT, check=True, timeout=280)
    assert (tmp_path / "index.html").is_file() and (tmp_path / "README.html").is_file()


def test_programs_of_users_have_the_same_bits_with_this_package(tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, EXAMPLES / "conformance", "--contenders", "lightning_cxl", "--json", rows]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    verdicts = {row["program"]: row["verdict"] for row in json.loads(rows.read_text())["rows"]}
    assert len(verdicts) == 25 and set(verdicts.values()) == {"bits"}, verdicts


def test_what_is_damaged_is_answered_in_words():
    command = [sys.executable, ROOT / "tests" / "fuzz.py", "--cases", "2000", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, timeout=900, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 findings") == 8


def test_a_training_that_meets_a_fault_is_resumed(tmp_path):
    rows = tmp_path / "rows.json"
    command = [sys.executable, "-m", "tests.fault_matrix", "--only", "newest", "--json", rows]
    subprocess.run(command, cwd=ROOT, check=True, timeout=900, stdout=subprocess.DEVNULL)
    said = [row["resumed from"] for row in json.loads(rows.read_text())]
    assert len(said) == 2
    assert all("step=2.ckpt, after `step=4.ckpt`: lightning_cxl.errors.CheckpointError" in each for each in said)
