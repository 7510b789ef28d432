"""`HostSlots`: host memory that records visit, one piece with a hard cap; and who holds slots where Ctrl-C may come.

[Note: Ctrl-C]
Python raises ``KeyboardInterrupt`` in the main thread, between any two bytecodes: a slot may have been taken and not
be noted yet. So one thread, which no signal reaches, does for the main thread all that changes slots, lists and
records (`uninterrupted`). The main thread puts a request, and waits. Requests are done in the order in which they were
put, also where the main thread has stopped waiting. What a region of code holds belongs to an object, a `Stay`, that
is made before anything is taken: it is given back when the region ends, and if that is interrupted, too, when the
object dies.
"""

import _thread
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from lightning_cxl.memory.resource import BlockList, Buffer
from lightning_cxl.storage.drive import BLOCK_BYTES

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Requests:
    """Calls that one thread makes in turn; a forked child has a thread of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._serving = _thread.allocate_lock()  # of two threads, where a start was interrupted, one serves
        self._is_started = False

    def put(self, call: Callable[[], object]) -> None:
        if not self._is_started:
            _thread.start_new_thread(self._serve, ())
            self._is_started = True
        self._queue.put(call)

    def _serve(self) -> None:
        with self._serving:
            while True:
                with suppress(BaseException):  # a call notes its own errors; of what is given back late nobody waits
                    self._queue.get()()


_requests = _Requests()


def _renew() -> None:
    global _requests
    _requests = _Requests()


os.register_at_fork(after_in_child=_renew)


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Return a function that Ctrl-C ends the wait for, and not what it does. See [Note: Ctrl-C]."""

    @wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _T:
        if threading.current_thread() is not threading.main_thread():
            return function(*args, **options)
        done = _thread.allocate_lock()
        found: list[_T] = []
        errors: list[BaseException] = []
        done.acquire()

        def run() -> None:
            try:
                found.append(function(*args, **options))
            except BaseException as error:
                errors.append(error)
            finally:
                done.release()

        _requests.put(run)
        done.acquire()
        if errors:
            raise errors.pop()  # out of the list, which frames of the error refer to
        return found.pop()

    return call


class Stay:
    """Holds slots for a region of the caller's code. See [Note: Ctrl-C]."""

    @uninterrupted
    def leave(self) -> None:
        """Give back what is held. Idempotent."""
        give_back = self._give_back
        self.__class__ = _Left  # type: ignore[assignment]  # without a finaliser: Python ignores Ctrl-C in one
        give_back()

    def _give_back(self) -> None:
        raise NotImplementedError

    def __del__(self) -> None:
        """Give back what an interrupted end has not."""
        _requests.put(self.leave)


class _Left:
    """A `Stay` that is over."""

    def leave(self) -> None:
        """Return at once."""

    def _give_back(self) -> None:
        """Do nothing: a call of `leave` was queued while the first one waited."""


class HostSlots:
    """Cuts slots of exact sizes from one piece of memory. Not thread-safe.

    Args:
        allocate: gives page-aligned memory; called when the first slot is taken, and again where what is asked for
            together is larger than all the slots so far.
        cap_bytes: of all slots together. What is asked for together and is larger gets as much as it needs, while there
            are no other slots.
    """

    def __init__(self, allocate: Callable[[int], Buffer], cap_bytes: int) -> None:
        self._allocate = allocate
        self.cap_bytes = cap_bytes
        self._memory: Buffer | None = None
        self._blocks = BlockList()
        self._num_taken = 0

    def take(self, nbytes: int) -> Buffer | None:
        """Return a slot of `nbytes`; None while others leave no room for it."""
        slots = self.take_all([nbytes])
        return None if slots is None else slots[0]

    def take_all(self, sizes: Sequence[int]) -> list[Buffer] | None:
        """Return slots of these sizes, whole blocks; None, and no slot, while others leave no room for all of them."""
        needed = sum(sizes)
        if self._memory is None or needed > self._memory.nbytes:
            if self._num_taken:
                return None
            self.close()
            self.cap_bytes = max(self.cap_bytes, needed)
            self._memory = self._allocate(self.cap_bytes)
            self._blocks.add_range(self._memory.address, self._memory.nbytes)
        addresses: list[int] = []
        for nbytes in sizes:
            address = self._blocks.allocate(nbytes, BLOCK_BYTES)
            if address is None:
                for taken in addresses:
                    self._blocks.free(taken)
                return None
            addresses.append(address)
        self._num_taken += len(addresses)
        start = self._memory.address
        return [self._memory.slice(at - start, nbytes) for at, nbytes in zip(addresses, sizes, strict=True)]

    def give_back(self, slot: Buffer) -> None:
        """Take a slot back; nobody reads or writes it any more."""
        self._blocks.free(slot.address)
        self._num_taken -= 1

    def close(self) -> None:
        """Let go of the memory; all slots have been given back. Idempotent."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._blocks.drop_range(memory.address)
