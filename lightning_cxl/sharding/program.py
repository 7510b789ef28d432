"""`watch_program`: watches ranks whose loop the user has written, so that nobody else sees it fail or end."""

import dis
import inspect
import os
import sys
import threading
import weakref
from multiprocessing.util import Finalize
from types import FrameType, TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_cxl.sharding.watch import Watch, open_watch

_programs: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Program]" = weakref.WeakKeyDictionary()
"""By the group whose ranks are watched: several models of one program need one watch."""


def watch_program(address: str) -> None:
    """Watch all ranks until Python ends, once for each process group. Every rank calls this, with the group up.

    An error that nobody catches is told to all ranks, and goes into the file that ``torchrun`` reads for its summary.
    So is a call of ``sys.exit`` with a status other than 0. See [Note: Failures of ranks].

    Args:
        address: of the machine of rank 0, as others reach it.
    """
    group = dist.group.WORLD
    assert group is not None
    if group not in _programs:
        _programs[group] = program = _Program(open_watch(address))
        sys.excepthook, sys.exit = program.fail, program.exit
        Finalize(None, program.end, exitpriority=0)  # not atexit, which forked processes of a notebook do not run


class _Program:
    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._show = sys.excepthook
        self._leave = sys.exit
        self._pid = os.getpid()
        self._has_failed = False
        self._exit: tuple[SystemExit, FrameType] | None = None
        """What `sys.exit` was called for last, where that was no success, and the outermost frame then."""

    def exit(self, status: Any = None, /) -> NoReturn:
        """Remember with which status the program asks to end. For `sys.exit`, of which Python tells nobody."""
        if threading.current_thread() is threading.main_thread():  # others end alone
            self._exit, frame = None, inspect.currentframe()
            if _is_failure(status) and frame is not None and (caller := frame.f_back) is not None:
                error = SystemExit(status)
                error.add_note(f"`sys.exit` was called in {caller.f_code.co_filename}, line {caller.f_lineno}")
                self._exit = error, _outermost(caller)
        self._leave(status)

    def fail(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tell an error that nobody has caught, and show it with what explains it. For `sys.excepthook`."""
        if self._pid == os.getpid():
            self._has_failed = True
            self._watch.tell(error)
            if isinstance(error, Exception):
                _record(error.with_traceback(trace))
                error.with_traceback(trace)
        self._show(kind, error, trace)

    def end(self) -> None:
        """This rank has done its work. After an error the line stays: what hangs while Python ends is ended, too."""
        error = sys.exc_info()[1]  # in a process that Python's multiprocessing has started, which calls no hook
        if error is None and self._exit is not None and _has_not_returned(self._exit[1]):
            error = self._exit[0]
        if isinstance(error, Exception) or (isinstance(error, SystemExit) and _is_failure(error.code)):
            self._watch.tell(error)
        elif not self._has_failed:
            self._watch.close()


def _is_failure(status: Any) -> bool:
    return status is not None and status != 0


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_not_returned(frame: FrameType) -> bool:
    """Return whether an exception has ended a frame: an `except` of the program may have caught what was remembered."""
    own = inspect.currentframe()
    if own is None or _outermost(own) is frame:
        return False  # it still runs
    return not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _record(error: Exception) -> None:
    """Write an error where torchrun asks for it; torch takes the traceback of what is handled just now."""
    try:
        raise error
    except Exception as handled:
        get_error_handler().record_exception(handled)
