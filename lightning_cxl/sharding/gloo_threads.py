"""Python ends after gloo's threads have let go of their last tensors; else one of them aborts the process.

A thread of gloo that drops the last reference to a tensor of Python's needs the interpreter's lock. Once Python begins
to end, it stops whoever waits for that lock, and C++ answers with "terminate called without an active exception": a run
that has done all its work fails, with SIGABRT (torch 2.13; see https://github.com/pytorch/pytorch/pull/179291).
Destroying the process group is no remedy: whatever still holds the group, as a device mesh does, keeps the threads.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from lightning_cxl.sharding.torch_private import GLOO_THREAD

_LOOKS = 2  # a thread that sleeps for the lock at the first look has got it before the second
_PAUSE = 0.005  # seconds
_PATIENCE = 5.0  # seconds; a collective that other ranks never join costs none, for its thread sleeps


def wait_for_gloo() -> None:
    """Wait until no thread of gloo in this process has work left. For `atexit`: Python's lock is free meanwhile."""
    deadline, quiet_looks = time.monotonic() + _PATIENCE, 0
    while quiet_looks < _LOOKS and time.monotonic() < deadline and (states := _states()):
        quiet_looks = quiet_looks + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE)


def _states() -> list[str]:
    """Return what gloo's threads do, in the kernel's letters: "S" sleep, "R" run or wait for a core."""
    found = []
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(OSError):  # it has ended
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD:
                found.append(rest.split()[0])
    return found
