"""A failure of one rank reaches all, whoever it is and however it ends. Ranks are threads, or small processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.sharding import watch
from lightning_cxl.sharding.failures import Cause, Failure
from lightning_cxl.sharding.watch import Watch

pytestmark = pytest.mark.on_cpu
HOST = Failure(0, "first", 7, Cause.GONE, "gone")
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


@pytest.fixture
def board(monkeypatch):
    monkeypatch.setattr(watch, "_SETTLE", 1.0)
    return watch._Switchboard(3)


@pytest.fixture
def ranks(board):
    made = [connect(board, rank) for rank in range(3)]
    until(lambda: len(board._callers) == 3)
    yield made
    for each in made:
        each.close()
    until(lambda: not board._callers)


def connect(board, rank, token=None) -> Watch:
    return Watch(rank, ("127.0.0.1", board.port), token or board.token, HOST)


_START_S = 300  # of processes that import torch, on a busy machine


def until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def has_heard_the_end(rank) -> bool:
    return rank.first is not None or not rank._listener.is_alive()


def notes(error) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_an_error_is_told_to_all_at_once(ranks, monkeypatch):
    """An error of its own needs no explanation."""
    monkeypatch.setattr(watch, "_SETTLE", 3600.0)
    own = ValueError("this batch is bad")
    ranks[1].tell(own)
    until(lambda: all(each.first is not None for each in ranks))
    other = RuntimeError(str(GLOO))
    ranks[2].tell(other)
    assert "rank 1" in notes(other) and notes(other).endswith("ValueError: this batch is bad") and not notes(own)


def test_a_rank_that_dies_explains_errors_that_came_before(ranks, monkeypatch):
    monkeypatch.setattr(watch, "_SETTLE", 60.0)
    other = RuntimeError(str(GLOO))
    dies = threading.Timer(0.1, ranks[2]._line.socket.shutdown, [socket.SHUT_RDWR])  # as where a process is killed
    dies.start()
    ranks[0].tell(other)
    assert ranks[0].first.rank == 2 and ranks[0].first.cause is Cause.GONE
    assert "rank 2" in notes(other) and "it was killed" in notes(other)


def test_a_rank_that_dies_is_known_at_once(ranks, monkeypatch):
    """A launcher kills the others soon, and rank 0 is to show why before."""
    monkeypatch.setattr(watch, "_SETTLE", 3600.0)
    ranks[2]._line.socket.shutdown(socket.SHUT_RDWR)
    until(lambda: ranks[0].first is not None)
    assert ranks[0].first.cause is Cause.GONE


def test_who_is_waited_for_is_named(ranks):
    errors = [RuntimeError(f"{GLOO} {rank}") for rank in range(2)]
    ranks[0]._has_told = ranks[2]._has_told = True
    ranks[1].tell(errors[1])
    assert "perhaps waited for: rank 0, 2" in notes(errors[1])


def test_a_rank_that_does_not_fail_shows_where_it_is(ranks, capfd):
    ranks[1].tell(RuntimeError(str(GLOO)))
    until(lambda: "Rank 2 has not failed" in (shown := capfd.readouterr().err) and "until(" in shown)


def test_ranks_that_are_done_are_no_failure(board, ranks):
    ranks[1].close()
    ranks[0].close()
    board.rank_0_may_end.wait()
    for line in list(board._callers):
        line.socket.shutdown(socket.SHUT_RDWR)  # the process of rank 0 ends first
    until(lambda: all(has_heard_the_end(each) for each in ranks))
    assert [each.first for each in ranks] == [None] * 3


def test_rank_0_ends_after_all_know_that_it_does():
    """Its process may end within the time that another thread of it needs to be heard."""
    code = """
        import os, sys, time
        from lightning_cxl.sharding import watch
        from lightning_cxl.sharding.failures import Cause, Failure
        board = watch._Switchboard(2)
        host = Failure(0, "m", 1, Cause.GONE, "gone")
        print(board.port, board.token, flush=True)
        own = watch.Watch(0, ("127.0.0.1", board.port), board.token, host, board)
        input()
        while board._num_called < 2:  # a rank that has not called cannot be told
            time.sleep(0.01)
        sys.setswitchinterval(1000)  # as good as never: other threads run where this one waits
        own.close()
        os._exit(0)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        port, token = process.stdout.readline().split()
        rank = Watch(1, ("127.0.0.1", int(port)), token, HOST)
        process.communicate("\n")
    try:
        until(lambda: has_heard_the_end(rank))
        assert rank.first is None
    finally:
        rank.close()  # else it ends this process, 30 s after a failure


def test_rank_0_that_dies_is_known(board):
    ranks = [connect(board, rank) for rank in range(3)]
    until(lambda: len(board._callers) == 3)
    board._has_decided = True  # it is dead, and tells nobody
    for line in list(board._callers):
        line.socket.shutdown(socket.SHUT_RDWR)
    until(lambda: ranks[2].first is not None)
    assert (ranks[2].first.rank, ranks[2].first.machine, ranks[2].first.pid) == (0, "first", 7)
    for each in ranks:
        each.close()


def test_a_failure_is_known_that_comes_together_with_the_end_of_rank_0():
    """A busy machine may let a rank read both at once."""
    failure = Failure.of(ValueError("this batch is bad"), 0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        rank = Watch(1, ("127.0.0.1", door.getsockname()[1]), "token", HOST)
        line, _ = door.accept()
        line.sendall(
            b"".join(json.dumps(each).encode() + b"\n" for each in ({"failure": failure.values()}, watch._BYE))
        )
        until(lambda: rank.first is not None)
        assert rank.first == failure
        rank.close()
        line.close()


def test_a_failure_that_is_not_explained_yet_is_told_before_rank_0_ends(board, ranks, monkeypatch):
    monkeypatch.setattr(watch, "_SETTLE", 3600.0)
    ranks[1]._line.say({"failure": Failure.of(RuntimeError(str(GLOO)), 1).values()})
    until(lambda: board._failures)
    ranks[0].close()
    until(lambda: ranks[2].first is not None)
    assert ranks[2].first.rank == 1


def test_strangers_are_sent_away(board, ranks):
    stranger = socket.create_connection(("127.0.0.1", board.port))
    stranger.sendall(b'{"failure": ')  # no whole message: nobody may wait for the rest of it
    with socket.create_connection(("127.0.0.1", board.port)) as other:
        other.sendall(b'{"token": "guessed", "rank": 1}\n')
        assert other.recv(1) == b""
    ranks[1].tell(ValueError("x"))
    until(lambda: ranks[0].first is not None)
    stranger.close()


def test_a_rank_that_cannot_reach_rank_0_goes_on_with_a_warning():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.warns(LightningCXLWarning, match="rank 1 cannot reach rank 0"):
        alone = Watch(1, ("127.0.0.1", port), "token", HOST)
    alone.tell(ValueError("x"))
    alone.close()


def program(board, body: str) -> subprocess.Popen:
    """Start a rank 2 in a process of its own."""
    code = f"""
        import os, sys, time
        from lightning_cxl.sharding import watch
        from lightning_cxl.sharding.failures import Cause, Failure
        watch._GRACE = 0.5
        own = watch.Watch(2, ("127.0.0.1", {board.port}), "{board.token}", Failure(0, "m", 1, Cause.GONE, "gone"))
        {body}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_rank_that_waits_for_ever_ends_and_says_why(board):
    others = [connect(board, rank) for rank in range(2)]
    process = program(board, "time.sleep(600)")
    until(lambda: len(board._callers) == 3, _START_S)
    others[1].tell(ValueError("this batch is bad"))
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "on rank 1" in shown and "ValueError: this batch is bad" in shown and "Rank 2 ends itself" in shown
    for each in others:
        each.close()


def test_a_child_does_not_hide_that_its_parent_was_killed(board):
    """Workers of a DataLoader live on for seconds."""
    others = [connect(board, rank) for rank in range(2)]
    process = program(board, 'os.write(1, b"%d\\n" % os.fork()); time.sleep(600)')
    children = [int(process.stdout.readline()), int(process.stdout.readline())]
    until(lambda: len(board._callers) == 3, _START_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        until(lambda: others[0].first is not None)
    finally:
        os.kill(max(children), signal.SIGKILL)
        process.communicate()
    assert others[0].first.rank == 2 and others[0].first.cause is Cause.GONE
    for each in others:
        each.close()
