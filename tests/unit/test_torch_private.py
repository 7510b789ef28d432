import runpy
import weakref

import pytest
import torch

from lightning_cxl import torch_private
from lightning_cxl.errors import UnsupportedError


def test_versions_that_are_not_tested_are_refused():
    for tested in ("2.11.0", "2.11.0+cu130", "2.15.1", "2.15.0a0+git12"):
        torch_private.check_version(tested)
    for other in ("1.13.1", "2.9.1", "2.10.0", "2.16.0.dev20270101", "3.0"):
        with pytest.raises(UnsupportedError, match=f"torch {other} .*tested with torch 2.11 to 2.15: install one"):
            torch_private.check_version(other)


def test_a_missing_name_is_told(monkeypatch):
    missing = ("torch._gone", "name")
    with pytest.raises(UnsupportedError) as error:
        torch_private.find(*missing, "count to three")
    for part in (torch.__version__, f"`{'.'.join(missing)}`", "needs to count to three", "2.11 to 2.15"):
        assert part in str(error.value)
    monkeypatch.delattr("torch.amp.GradScaler._unscale_grads_")
    with pytest.raises(UnsupportedError, match=r"has no `torch\.amp\.GradScaler\._unscale_grads_`"):
        runpy.run_path(torch_private.__file__)


def test_what_autograd_keeps_for_a_moment_after_a_backward_keeps_no_run(monkeypatch):
    class Sink:
        def finish(self):
            finished.append(True)

    finished, kept, queue = [], [], torch_private._queue_callback
    monkeypatch.setattr(torch_private, "_queue_callback", lambda call: kept.append(call) or queue(call))
    sink, x = Sink(), torch.ones(1, requires_grad=True)
    is_alive = weakref.ref(sink)
    x.register_hook(lambda _: torch_private.at_end_of_backward(is_alive().finish))
    x.sum().backward()
    del sink
    assert finished and kept and is_alive() is None
