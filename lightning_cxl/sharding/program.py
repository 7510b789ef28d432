"""`watch_program`: watches ranks whose loop the user has written, so that nobody else sees it fail or end."""

import os
import sys
import weakref
from multiprocessing.util import Finalize
from types import TracebackType

import torch.distributed as dist

from lightning_cxl.sharding.error_file import record
from lightning_cxl.sharding.watch import Watch, open_watch

_programs: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Program]" = weakref.WeakKeyDictionary()
"""By the group whose ranks are watched: several models of one program need one watch."""


def watch_program(address: str) -> None:
    """Watch all ranks until Python ends, once for each process group. Every rank calls this, with the group up.

    An error that nobody catches is told to all ranks, and goes into the file that ``torchrun`` reads for its summary.
    See [Note: Failures of ranks].
    """
    group = dist.group.WORLD
    assert group is not None
    if group not in _programs:
        _programs[group] = program = _Program(open_watch(address))
        sys.excepthook = program.fail
        Finalize(None, program.end, exitpriority=0)  # not atexit, which forked processes of a notebook do not run


class _Program:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._show = sys.excepthook
        self._pid = os.getpid()
        self._has_failed = False

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell an error that nobody has caught, and show it with what explains it. For `sys.excepthook`."""
        if self._pid == os.getpid():
            self._has_failed = True
            self._watch.tell(error)
            if isinstance(error, Exception):
                record(error)
        self._show(kind, error, trace)

    def end(self) -> None:
        """This rank has done its work. After an error the line stays: what hangs while Python ends is ended, too."""
        error = sys.exc_info()[1]  # in a process that Python's multiprocessing has started, which calls no hook
        if isinstance(error, Exception):
            self._watch.tell(error)
        elif not self._has_failed and not (isinstance(error, SystemExit) and error.code):
            self._watch.close()
