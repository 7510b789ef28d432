"""`examples/bench/ssd.py` on a few MiB: what moves, what is printed and judged, refusals; fio is a script of ours."""

import json
import os
import sys

import pytest
from ssd_bench import contenders, disk_area, turns
from ssd_bench.contenders import ALONE, LOOP, OURS, DiskContender, Job

MIB = 1 << 20

# Writes what it was asked to do; io_uring is slower than libaio, and the most blocks in flight are fastest
FIO = f"""#!{sys.executable}
import json, os, sys
options = dict(each[2:].split("=", 1) for each in sys.argv[1:])
with open(os.environ["FIO_LOG"], "a") as log:
    print(json.dumps(options), file=log)
if options["ioengine"] in os.environ.get("FIO_FAILS", "").split():
    print("fio: engine not loadable", file=sys.stderr)
    sys.exit(1)
nbytes = os.stat(options["filename"]).st_size
assert nbytes >= int(options["size"]), (nbytes, options)
milliseconds = (2000 if options["ioengine"] == "io_uring" else 1000) // int(options["iodepth"])
moved = dict(runtime=milliseconds, io_bytes=int(options["size"]))
job = {{options["rw"]: moved, "usr_cpu": 10.0, "sys_cpu": 30.0, "job_runtime": 500}}
print(json.dumps(dict(jobs=[job])))
"""


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A folder with our `fio` is first in the path; returns what it was asked to do."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "fio").write_text(FIO)
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FIO_LOG", str(tmp_path / "log"))
    return lambda: [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]


@pytest.fixture
def area(tmp_path):
    with disk_area.disk_area(tmp_path, 4 * MIB) as area:
        yield area


def contender(name, job, engine, writes) -> DiskContender:
    found = [*contenders.our_contenders(job, engine, writes=writes), contenders.plain_loop(job, writes=writes)]
    return next(each for each in found if each.name == name)


@pytest.mark.parametrize("name", [OURS, ALONE, LOOP])
@pytest.mark.parametrize("tensor_bytes", [4096, MIB, 3 * MIB])
def test_each_contender_moves_all_tensors_and_no_other_byte(area, name, tensor_bytes):
    assert area.path.read_bytes() == bytes(area.memory) and len(set(area.memory[:4096])) > 200  # random
    job = Job(area, tensor_bytes)
    with contenders.our_engine(area) as engine:
        before, used = area.path.read_bytes(), job.nbytes
        assert used == area.nbytes // tensor_bytes * tensor_bytes
        area.memory[:] = bytes(area.nbytes)
        took = contender(name, job, engine, writes=False).go()
        assert area.memory[:used] == before[:used]
        assert not any(area.memory[used:])
        assert took.seconds > 0 and took.cpu_seconds > 0
        new = os.urandom(area.nbytes)
        area.memory[:] = new
        contender(name, job, engine, writes=True).go()
        assert area.path.read_bytes() == new[:used] + before[used:]


def measured(tmp_path, *arguments: str, peers=None) -> dict[str, dict]:
    """Rows by name."""
    target, folder = tmp_path / "rows.json", tmp_path / "disk"
    folder.mkdir(exist_ok=True)
    parser = turns.make_parser(None)
    options = [f"--folder={folder}", "--bytes=2MiB", "--rounds=2", f"--json={target}", *arguments]
    turns.run(parser, parser.parse_args(options), peers)
    assert list(folder.iterdir()) == []
    return {row["name"]: row for row in json.loads(target.read_text())["rows"]}


def test_all_contenders_are_shown_and_ours_is_judged_against_the_fastest_other(tmp_path, log, capsys):
    rows = measured(tmp_path, "--sizes", "64KiB", "1MiB")
    speeds = [name for name, row in rows.items() if row["unit"] == "GB/s"]
    for title in ("32 tensors of 64.0 KiB", "2 tensors of 1.0 MiB"):
        for direction in ("read", "write"):
            names = {name.split(": ")[1] for name in speeds if name.startswith(f"{direction}, {title}")}
            own = {OURS, ALONE, LOOP}
            assert own < names
            assert sorted(name.split(",")[0] for name in names - own) == ["fio io_uring", "fio libaio"]
    judged = [row for row in rows.values() if row["goal"] is not None]
    assert len(judged) == 4 and all(row["goal"] == turns.GOAL for row in judged)
    shown = capsys.readouterr().out
    assert "of 4 goals hold" in shown and "CPU s/GiB" in shown
