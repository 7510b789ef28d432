"""Python ends after gloo's threads have let go of their last tensors; else one of them aborts the process.

A thread of gloo that drops the last reference to a tensor of Python's needs the interpreter's lock. Once Python begins
to end, it stops whoever waits for that lock, and C++ answers with "terminate called without an active exception": a run
that has done all its work fails, with SIGABRT (torch 2.13; see https://github.com/pytorch/pytorch/pull/179291).
Destroying the process group is no remedy: whatever still holds the group, as a device mesh does, keeps the threads.
Not covered is a collective that nobody has waited for, and one that Python runs after this, as it ends.
"""

import time
from contextlib import suppress
from pathlib import Path

from lightning_cxl.sharding.torch_private import GLOO_THREAD

_LOOKS = 3  # a thread that sleeps until it gets the lock has it by the next look, as the pause gives the lock up
_PAUSE = 0.01  # seconds
_PATIENCE = 5.0  # seconds; a collective that other ranks never join costs none, for its thread sleeps


def wait_for_gloo() -> None:
    """Wait until no thread of gloo in this process runs, or waits for the interpreter's lock. For `atexit`."""
    deadline, quiet_looks = time.monotonic() + _PATIENCE, 0
    while quiet_looks < _LOOKS and time.monotonic() < deadline and (states := _states()):
        quiet_looks = quiet_looks + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE)


def _states() -> list[str]:
    """Return what gloo's threads do, in the kernel's letters: "S" sleep, "R" run or wait for a core."""
    found = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name == GLOO_THREAD:
                found.append(rest.split()[0])
    return found
