"""Accelerate's own test scripts, with our accelerator in the place of theirs, in one process."""

import importlib

import pytest

from lightning_cxl.accelerate import CXLAccelerator
from tests.integration.accelerate_loop import forget_accelerators

SCRIPTS = "accelerate.test_utils.scripts."


@pytest.fixture
def script(request, monkeypatch):
    """One of their scripts, whose accelerators are ours; yields it and those accelerators that were made."""
    forget_accelerators()
    module = importlib.import_module(SCRIPTS + request.param)
    made = []

    class Ours(CXLAccelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(module, "Accelerator", Ours)
    yield module, made
    while made:
        made.pop().free_memory()
    forget_accelerators()


def check_trained(made):
    assert any(each.report()["optimizers"] for each in made), "nothing was trained with our accelerator"


@pytest.mark.filterwarnings("ignore:RegressionModel was moved to `cpu`, which ends its run")  # as it does
@pytest.mark.parametrize("script", ["test_script"], indirect=True)
def test_the_test_script(script, monkeypatch, capsys):
    module, made = script
    monkeypatch.setattr(module, "is_fp16_available", bool)  # Accelerate refuses it on devices unknown to it
    module.main()
    check_trained(made)
    assert "**Test reinstantiated state**" in capsys.readouterr().out, "its last part"


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore:RegressionModel gets gradients and was prepared without")  # one half of test_sync
@pytest.mark.parametrize("script", ["test_script", "test_sync"], indirect=True)
def test_scripts_on_the_cpu(script, capsys):
    module, made = script
    module.main()
    check_trained(made)
