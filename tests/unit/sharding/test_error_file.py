"""What torchrun reads of a rank that failed is whole, whatever comes while it is written."""

import json
import os
import signal
import threading

import pytest
from torch.distributed.elastic.multiprocessing.errors import error_handler

from lightning_cxl.sharding.error_file import record


@pytest.fixture
def path(tmp_path, monkeypatch):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def failed():
    try:
        raise ValueError("this batch is bad")
    except ValueError as error:
        return error


def message_in(path):
    return json.loads(path.read_text())["message"]


def test_the_file_has_the_error_and_its_traceback(path):
    error = failed()
    trace = error.__traceback__
    record(error)
    assert message_in(path)["message"] == "ValueError: this batch is bad"
    assert "in failed" in message_in(path)["extraInfo"]["py_callstack"]
    assert error.__traceback__ is trace


def test_a_signal_whose_handler_raises_leaves_a_whole_file(path, monkeypatch):
    """torchrun ends the other ranks while they write why they fail; a file without content would end torchrun, too."""
    dump = json.dump

    def dump_while_told_to_end(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        handled.wait(60)
        dump(*args)

    def handler(*_):
        raise ConnectionError("as Lightning's handler does where its broadcast fails")

    handled = threading.Event()
    before = signal.signal(signal.SIGTERM, handler)
    monkeypatch.setattr(error_handler.json, "dump", dump_while_told_to_end)
    try:
        with pytest.raises(ConnectionError):
            record(failed())
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not path.read_text(), "it is still being written"
    (thread,) = [each for each in threading.enumerate() if each.name == "error-file"]
    assert not thread.daemon, "Python waits for it"
    handled.set()
    thread.join()
    assert message_in(path)["message"] == "ValueError: this batch is bad"
