"""Loops that nobody closes: noted when they are garbage, closed at the next safe moment; all others when Python ends.

The garbage collector finds a loop in any thread, in the middle of anything: perhaps of a pool that holds the very lock
that closing the loop needs, or in the thread whose work closing waits for. So a finaliser only makes a note. The next
loop that does anything closes what is noted, on behalf of the user's own code, which holds no lock of ours.
"""

import atexit
import logging
import os
import weakref
from collections import deque
from contextlib import ExitStack
from typing import Protocol

log = logging.getLogger(__name__)


class Closable(Protocol):
    """What is open until it is closed."""

    pid: int
    """The process that has opened it; a forked child has neither its threads nor its files."""

    def close(self, *, after_error: bool = False) -> None:
        """Free everything. Idempotent."""

    def abandon(self) -> None:
        """Free everything, where nobody has a use for what belongs to the user any more."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_garbage: deque[Closable] = deque()


def note_open(loop: Closable) -> None:
    """Let a loop be closed when Python ends, if it is still there."""
    _open.add(loop)


def note_garbage(loop: Closable) -> None:
    """Keep a loop that is garbage until `close_garbage`. Takes no lock: for finalisers."""
    _garbage.append(loop)


def close_garbage() -> None:
    """Close what finalisers have noted; its errors are logged, since what runs now has nothing to do with them."""
    while _garbage:
        try:
            loop = _garbage.popleft()
        except IndexError:  # another thread has taken it
            return
        if loop.pid != os.getpid():
            continue
        try:
            loop.abandon()
        except Exception as error:
            log.warning(f"a training that nobody has ended did not end well: {error!r}")


def _close_all() -> None:
    close_garbage()
    with ExitStack() as cleanup:  # one that fails does not keep the others from running
        for loop in list(_open):
            if loop.pid == os.getpid():
                cleanup.callback(loop.abandon)


atexit.register(_close_all)
