"""A torch that lacks a private name, or that nobody has tested, is refused with a message that says what to do."""

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


@pytest.mark.parametrize(
    "missing", [("torch", "_C._no_such_thing"), ("torch.optim.optimizer", "_gone"), ("torch._gone", "name")]
)
def test_a_missing_name_is_told(missing):
    with pytest.raises(UnsupportedError) as error:
        torch_private.find(*missing, "count to three")
    for part in (torch.__version__, f"`{'.'.join(missing)}`", "needs to count to three", "2.11 to 2.15"):
        assert part in str(error.value)


@pytest.mark.parametrize(("owner", "name"), [("_C", "_current_graph_task_id"), ("amp.GradScaler", "_unscale_grads_")])
def test_the_package_refuses_a_torch_without_a_name_when_it_is_imported(monkeypatch, owner, name):
    monkeypatch.delattr(f"torch.{owner}.{name}")
    with pytest.raises(UnsupportedError, match=f"torch .* has no `torch.{owner}.{name}`"):
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


def test_hooks_of_an_optimizer_that_torch_has_renamed_are_told():
    class Renamed:
        pass

    with pytest.raises(UnsupportedError, match="_optimizer_step_pre_hooks"):
        torch_private.step_hooks(Renamed())
