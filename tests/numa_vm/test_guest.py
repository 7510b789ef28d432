"""What no boot of a guest is needed for: QEMU's arguments, the job's shell text, and the way of a guest's output."""

import os
import subprocess
import threading
import time

import pytest

from tests.numa_vm.guest import relay
from tests.numa_vm.initrd import job_text

MARK = b"<end 0123>"


def relayed(*pieces, pause_s=0.0, wait_s=10.0):
    """Send pieces through a pipe; return what was passed on, piece by piece, and the line after the mark."""
    source, sink = os.pipe()

    def send():
        for piece in pieces:
            os.write(sink, piece)
            time.sleep(pause_s)
        os.close(sink)

    thread = threading.Thread(target=send)
    thread.start()
    passed = []
    try:
        return passed, relay(source, passed.append, MARK, time.monotonic() + wait_s)
    finally:
        thread.join()
        os.close(source)


def test_output_ends_at_the_mark_wherever_it_is_cut():
    whole = b"a <end of a line\n" + MARK + b"exit 3\n"
    for cut in range(1, len(whole)):
        passed, said = relayed(whole[:cut], whole[cut:], pause_s=0.002)
        assert b"".join(passed) == b"a <end of a line\n" and said == "exit 3", cut


def test_output_is_passed_on_as_it_comes_until_a_silent_guest_is_given_up():
    passed, said = relayed(b"one", b"two <en", b"d\n", pause_s=0.05)
    assert passed[:2] == [b"one", b"two "] and b"".join(passed) == b"onetwo <end\n"
    assert said == "", "the guest died"
    with pytest.raises(TimeoutError):
        relayed(b"one", pause_s=0.5, wait_s=0.1)


def test_job_runs_in_its_folder_with_its_environment_only(tmp_path):
    folder = tmp_path / "it's here"
    folder.mkdir()
    text = job_text(["sh", "-c", 'pwd; echo "$A|$HOME"; exit 3'], str(folder), {"A": "b c'd", "PATH": "/usr/bin:/bin"})
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True)
    assert done.stdout == f"{folder}\nb c'd|\n" and done.returncode == 3
