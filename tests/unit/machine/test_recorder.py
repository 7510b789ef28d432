import os
import signal
import subprocess
import sys
import time

import pytest

from lightning_cxl.machine import recorder
from lightning_cxl.machine.topology import Topology
from tests.processes import ROOT
from tests.unit.memory.host import ends_in_child

ENDS_WITHOUT_CLOSE = """
import sys, time
from pathlib import Path
from tests.unit.machine.test_recorder import recorder, start
recorder._folder = lambda: Path(sys.argv[1])
running = start()
time.sleep(0.3)
assert list(recorder._folder().iterdir())
"""


class Memory:
    def stats(self):
        return {"tiers": {"dram": {"used_bytes": 12345 << 20}}}


memory = Memory()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "_folder", lambda: tmp_path)
    return tmp_path


def start():
    return recorder.start(Topology.detect(), memory.stats, list)


@pytest.fixture
def killed(folder):
    """The number of a process that was killed while it trained."""
    begun, says = os.pipe()
    if (child := os.fork()) == 0:
        running = start()  # noqa: F841
        time.sleep(0.5)
        os.write(says, b"x")
        signal.pause()
    os.read(begun, 1)
    assert recorder.killed() == [], "it goes on"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(begun)
    os.close(says)
    return child


def test_a_training_that_was_killed_is_described_by_the_next_one_and_kept(killed):
    (text,) = recorder.killed()
    assert f"process {killed}" in text and "was killed at" in text
    assert "tensors on tiers had 12.1 GiB" in text and "could still be used" in text
    assert recorder.killed() == [], "said once"
    assert recorder.last() == text


@pytest.mark.usefixtures("killed")
def test_the_next_training_warns_if_the_kernel_killed_the_last_one_for_memory(folder, caplog, monkeypatch):
    (left,) = folder.iterdir()
    contents, before, read = left.read_bytes(), recorder._oom_kills(), recorder._read
    for kills, available in ((1, 0), (1, 1 << 40), (0, 0)):
        left.write_bytes(contents)
        caplog.clear()
        monkeypatch.setattr(recorder, "_oom_kills", lambda kills=kills: before + kills)

        def full(path, available=available):
            header, samples = read(path)
            return header, [(when, {**found, "available": available}) for when, found in samples]

        monkeypatch.setattr(recorder, "_read", full)
        start().close()
        assert ("killed by the kernel" in caplog.text) is (kills == 1 and available == 0)


def test_a_training_that_ends_leaves_nothing(folder):
    start().close()
    assert list(folder.iterdir()) == []
    subprocess.run([sys.executable, "-c", ENDS_WITHOUT_CLOSE, str(folder)], cwd=ROOT, check=True)
    assert list(folder.iterdir()) == [] and recorder.killed() == []
    assert recorder.last() == "no training of this user on this machine was killed"


def test_damaged_files_are_passed_over_and_a_fork_leaves_the_file_to_its_parent(folder):
    for damage in (b"", b"\0" * 5000, b"{", b'{"pid": 1}'):
        (folder / "run-a").write_bytes(damage)
        assert recorder.killed() == []
        assert list(folder.iterdir()) == []
    running = start()
    assert ends_in_child(lambda: running.close() is None) == 0
    assert len(list(folder.iterdir())) == 1
    running.close()
    assert list(folder.iterdir()) == []
