"""What is said about a training that was killed: by a signal, and by the kernel because memory was full."""

import os
import subprocess
import sys
import time

import pytest

from lightning_cxl.machine import recorder

TRAINS = """
import sys, time
from pathlib import Path
from lightning_cxl.machine import recorder
from lightning_cxl.machine.topology import Topology
recorder._folder = lambda: Path(sys.argv[1])
class Memory:
    def stats(self):
        return {"tiers": {"dram": {"used_bytes": 12345 << 20}}}
memory = Memory()
running = recorder.start(Topology.detect(), memory.stats, list)
"""
WAITS = TRAINS + "print('runs', flush=True); time.sleep(60)"


class Memory:
    def stats(self):
        return {"tiers": {}}


memory = Memory()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_folder", lambda: tmp_path)
    return tmp_path


def begin(code, folder, *before):
    return subprocess.Popen([*before, sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE)


def test_a_training_that_was_killed_is_described_by_the_next_one_and_kept(folder):
    with begin(WAITS, folder) as child:
        child.stdout.readline()
        time.sleep(0.5)
        assert recorder.killed() == [], "it goes on"
        child.kill()
    (text,) = recorder.killed()
    assert f"process {child.pid}" in text and "was killed at" in text
    assert "tensors on tiers had 12.1 GiB" in text and "could still be used" in text
    assert recorder.killed() == [], "said once"
    assert recorder.last() == text


@pytest.mark.parametrize(("kills", "available"), [(1, 0), (1, 1 << 40), (0, 0)])
def test_the_next_training_warns_if_the_kernel_killed_the_last_one_for_memory(
    folder, caplog, monkeypatch, kills, available
):
    with begin(WAITS, folder) as child:
        child.stdout.readline()
        time.sleep(0.3)
        child.kill()
    before, read = recorder._oom_kills(), recorder._read
    monkeypatch.setattr(recorder, "_oom_kills", lambda: before + kills)

    def full(path):
        header, samples = read(path)
        return header, [(when, {**found, "available": available}) for when, found in samples]

    monkeypatch.setattr(recorder, "_read", full)
    recorder.start(recorder.Topology.detect(), memory.stats, list).close()
    assert ("killed by the kernel" in caplog.text) is (kills == 1 and available == 0)


@pytest.mark.parametrize("end", ["running.close()", "pass", "raise SystemExit(0)"])
def test_a_training_that_ends_leaves_nothing(folder, end):
    with begin(f"{TRAINS}time.sleep(0.3); {end}", folder) as child:
        assert child.wait() == 0
    assert list(folder.iterdir()) == [] and recorder.killed() == []
    assert recorder.last() == "no training of this user on this machine was killed"


@pytest.mark.parametrize("damage", [b"", b"\0" * 5000, b"{", b'{"pid": 1}'])
def test_files_that_say_nothing_are_passed_over(folder, damage):
    (folder / "run-a").write_bytes(damage)
    assert recorder.killed() == []
    assert list(folder.iterdir()) == []


def test_a_fork_leaves_the_file_to_its_parent(folder):
    running = recorder.Recorder(recorder.Topology.detect(), memory.stats, list)
    pid = os.fork()
    if pid == 0:
        running.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(list(folder.iterdir())) == 1
    running.close()
    assert list(folder.iterdir()) == []
