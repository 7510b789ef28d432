"""The way of a guest's output to this process, and which file systems a guest is shown."""

import os
import threading
import time
from pathlib import Path

import pytest

from tests.numa_vm.guest import mount_points, relay

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


def test_output_is_passed_on_as_it_comes():
    passed, said = relayed(b"one", b"two <en", b"d\n", pause_s=0.05)
    assert passed[:2] == [b"one", b"two "] and b"".join(passed) == b"onetwo <end\n"
    assert said == "", "the guest died"


def test_a_silent_guest_is_given_up():
    with pytest.raises(TimeoutError):
        relayed(b"one", pause_s=0.5, wait_s=0.1)


def test_file_systems_that_hold_the_paths_are_found():
    table = "\n".join(
        f"{number} 1 0:{number} / {point} rw,relatime - ext4 /dev/x rw"
        for number, point in enumerate(["/", "/home", "/home/me/my\\040disk", "/proc"])
    )
    paths = [Path("/home/me/my disk/repo"), Path("/usr/bin"), Path("/home/me/.venv")]
    assert mount_points(paths, table) == ["/", "/home", "/home/me/my disk"]
    assert mount_points([Path("/usr")], table) == ["/"]
    assert mount_points([Path("/")])[0] == "/"
