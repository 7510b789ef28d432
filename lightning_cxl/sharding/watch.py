"""`Watch`: a failure of one process ends all of them, and all of them show it.

[Note: Failures of ranks]
Torch says little when a rank is gone. Its collectives over gloo end with "connection closed by peer" on every rank but
the one that could say why; those over NCCL wait until their timeout, ten minutes. So while a front end trains, every
rank has a *line* to rank 0: a TCP connection, which carries what torch does not know.

* A rank that raises says so on its line, before anything else: `tell`.
* The kernel closes the line of a process that is killed. The line of a machine that is gone ends after
  `_SILENCE` seconds, because the kernel of the other side asks for signs of life. Neither needs Python to run, so a
  rank that keeps the interpreter busy for minutes is not taken for dead.
* Rank 0 decides which failure was first. An error of user code is, at once, and so is a rank that is gone: a launcher
  that notices this may kill rank 0 next. An error in a collective is most likely another's fault: rank 0 waits
  `_SETTLE` seconds for what explains it.
* Every rank gets to know the first failure. What it raises itself carries it as a note, which Python shows below the
  traceback. A rank that has not ended after `_GRACE` seconds shows it and ends itself: it waits in a collective that
  will never be complete.
* Where nobody knows a reason (all others have waited for longer than the timeout), a rank that has not failed shows
  where it is: it is the one they wait for.

Lines are there from `open_watch` to `close`; a rank that closes its line as it should says so. Under Lightning that is
while the Trainer runs. Where users write the loop it is until Python ends (`sharding/program.py`): what nobody catches
is told, and a rank that calls ``sys.exit`` has done its work.
"""

import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.sharding.failures import Cause, Failure, first_of
from lightning_cxl.sharding.processes import broadcast

_SETTLE = 1.0
_GRACE = 30.0
_SILENCE = 25
_CONNECT_SECONDS = 20.0
_MAX_MESSAGE = 1 << 16
_LOOK = "Their output shows where they are."
_BYE: dict[str, Any] = {"bye": True}


def open_watch(address: str) -> "Watch":
    """Return the watch of this rank. Every rank calls this, with the process group up.

    Warns:
        LightningCXLWarning: rank 0 cannot be reached; this rank is not watched then.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    board = _Switchboard(size) if rank == 0 else None
    host = Failure(0, socket.gethostname(), os.getpid(), Cause.GONE, _gone(None)) if board else None
    port, token, host = broadcast(None if board is None else (board.port, board.token, host))
    return Watch(rank, (address, port), token, host, board)


class Watch:
    """The end of the line that a rank has. See [Note: Failures of ranks].

    Args:
        host: what has happened where rank 0 does not answer any more.
    """

    def __init__(
        self,
        rank: int,
        address: tuple[str, int],
        token: str,
        host: Failure,
        board: "_Switchboard | None" = None,
    ) -> None:
        self.rank = rank
        self._board = board
        self.first: Failure | None = None
        """The first failure of all ranks, once it is known."""
        self._known = threading.Event()
        self._over = threading.Event()
        self._has_told = False
        self._host = host
        self._line: _Line | None = None
        try:
            self._line = _Line(socket.create_connection(address, _CONNECT_SECONDS))
            self._line.say({"token": token, "rank": rank, "machine": socket.gethostname(), "pid": os.getpid()})
        except OSError as error:
            warnings.warn(
                f"rank {rank} cannot reach rank 0 at {address[0]}:{address[1]} ({error}), so it notices failures of "
                "other ranks by torch's timeouts alone. Let machines reach each other at all ports: gloo and NCCL need "
                "that, too",
                LightningCXLWarning,
                stacklevel=2,
            )
        else:
            self._listener = threading.Thread(target=self._listen, daemon=True, name="watch-of-ranks")
            self._listener.start()

    def tell(self, error: BaseException) -> None:
        """Tell all ranks that this one fails, and note on the error which failure was first."""
        self._has_told = True
        own = Failure.of(error, self.rank)
        if self._line is None or not self._line.say({"failure": own.values()}):
            self._known.wait(_SETTLE)  # rank 0 is gone; the line says so, too
        else:
            self._known.wait(2 * _SETTLE)
        first = self.first
        if first is not None and first.text.splitlines()[-1] != own.text.splitlines()[-1]:
            error.add_note(first.describe())

    def close(self) -> None:
        """End the watch: this rank has done its work, or has handled its failure. Idempotent."""
        self._over.set()
        if self._line is not None:
            if self._line.say(_BYE) and self._board is not None:
                self._board.rank_0_may_end.wait(_SETTLE)  # else its process may end before the others are told
            self._line.close()

    def _listen(self) -> None:
        assert self._line is not None
        while self.first is None:
            messages = self._line.hear()
            if self._over.is_set():
                return
            if messages is None:
                self.first = replace(self._host, text=_gone(self._line.error))
            for message in messages or ():
                if message == _BYE:
                    return
                self.first = Failure.read(message["failure"])
                break  # rank 0 may have ended by it, and its "bye" may have come together with it
        self._known.set()
        if self.first.cause is Cause.GONE and self.rank == (1 if self.first.rank == 0 else 0):
            _show(self.first.describe())  # now: it could not say so itself, and a launcher may kill this process
        if self.first.cause is Cause.OTHERS and not self._over.wait(_SETTLE) and not self._has_told:
            _show(
                f"Rank {self.rank} has not failed, the others may wait for it. It is here:\n{_place_of_main_thread()}"
            )
        if not self._over.wait(_GRACE):
            _show(f"{self.first.describe()}\nRank {self.rank} ends itself: it still waited {_GRACE:g} s after that.")
            os._exit(1)


_OPEN: "weakref.WeakSet[_Line]" = weakref.WeakSet()


def _hang_up_in_child() -> None:
    """A child of this process, such as a worker of a DataLoader, would keep lines open after this process is gone."""
    for line in list(_OPEN):
        line.socket.close()


os.register_at_fork(after_in_child=_hang_up_in_child)


class _Line:
    """One end of a connection: messages in JSON, one a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.error: OSError | None = None
        """Why the line ended, where the other side has not closed it."""
        self._rest = b""
        _OPEN.add(self)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {"KEEPIDLE": 10, "KEEPINTVL": 5, "KEEPCNT": 3, "USER_TIMEOUT": 1000 * _SILENCE}.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)

    def say(self, message: dict[str, Any]) -> bool:
        """Send a message; return whether that went well."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def hear(self) -> list[dict[str, Any]] | None:
        """Wait until something arrives, and return the messages that are whole by then; None where the line ended."""
        try:
            part = self.socket.recv(4096)
        except OSError as error:
            self.error = error
            return None
        *texts, self._rest = (self._rest + part).split(b"\n")
        if not part or len(self._rest) > _MAX_MESSAGE:
            return None
        try:
            return [dict(json.loads(text)) for text in texts]
        except (ValueError, TypeError):
            return None  # a stranger

    def close(self) -> None:
        """Hang up; the thread that hears is let go."""
        with suppress(OSError):  # the other side was faster
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


class _Switchboard:
    """The other end of all lines, in a thread of rank 0: it decides which failure was first, and tells all."""

    def __init__(self, size: int) -> None:
        if socket.has_dualstack_ipv6():
            self._door = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=size)
        else:
            self._door = socket.create_server(("", 0), backlog=size)
        self.port = int(self._door.getsockname()[1])
        self.token = secrets.token_hex(16)
        self._size = size
        self._callers: dict[_Line, dict[str, Any]] = {}  # lines of ranks that have said who they are
        self._num_called = 0
        self._failures: list[Failure] = []
        self._decides_at: float | None = None
        self._has_decided = False
        self._rank_0_ends = False
        self.rank_0_may_end = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        threading.Thread(target=self._run, daemon=True, name="switchboard-of-ranks").start()

    def _run(self) -> None:
        while self._callers or self._num_called < self._size:
            wait = None if self._decides_at is None else max(0.0, self._decides_at - time.monotonic())
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._door:
                    line = _Line(self._door.accept()[0])
                    self._selector.register(line.socket, selectors.EVENT_READ, line)
                else:
                    self._hear(key.data)
            if self._decides_at is not None and (self._rank_0_ends or time.monotonic() >= self._decides_at):
                self._decide()  # where rank 0 ends, nobody is left to do so later
            if self._rank_0_ends and not self.rank_0_may_end.is_set():
                self._tell_all(_BYE)
                self.rank_0_may_end.set()
        self._selector.close()
        self._door.close()

    def _hear(self, line: _Line) -> None:
        messages = line.hear()
        for message in messages or ():
            who = self._callers.get(line)
            if who is None:
                if not secrets.compare_digest(str(message.get("token")), self.token):
                    break  # a stranger
                self._callers[line] = message
                self._num_called += 1
            elif "failure" in message:
                self._note(Failure.read(message["failure"]))
            else:
                del self._callers[line]
                if who["rank"] == 0:  # what arrived with its "bye" is heard first, then all learn that it may end
                    self._rank_0_ends = True
        if messages is None and line in self._callers:
            who = self._callers.pop(line)
            self._note(Failure(who["rank"], who["machine"], who["pid"], Cause.GONE, _gone(line.error)))
        if line not in self._callers and messages != []:
            self._selector.unregister(line.socket)
            line.close()

    def _note(self, failure: Failure) -> None:
        """A rank that ends after it has said why is no news; an error in a collective waits for what explains it."""
        if self._has_decided or any(each.rank == failure.rank for each in self._failures):
            return
        self._failures.append(failure)
        if failure.cause is Cause.ERROR:
            self._decide()
        elif failure.cause is Cause.GONE:
            self._decides_at = time.monotonic()  # when all that has arrived is heard
        elif self._decides_at is None:
            self._decides_at = time.monotonic() + _SETTLE

    def _decide(self) -> None:
        self._has_decided, self._decides_at = True, None
        first = first_of(self._failures)
        silent = {who["rank"] for who in self._callers.values()} - {failure.rank for failure in self._failures}
        if first.cause is Cause.OTHERS and silent:
            ranks = ", ".join(map(str, sorted(silent)))
            first = replace(first, text=f"{first.text}\nNot failed, and perhaps waited for: rank {ranks}. {_LOOK}")
        self._tell_all({"failure": first.values()})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for line in self._callers:
            line.say(message)


def _gone(error: OSError | None) -> str:
    if isinstance(error, TimeoutError):
        return f"it does not answer any more: its machine, or the network to it, has been down for {_SILENCE} s"
    return (
        "its process ended without an error of Python's: it was killed, perhaps because memory was full (`dmesg` says "
        "so then), or it crashed"
    )


def _place_of_main_thread() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)).rstrip()


def _show(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
