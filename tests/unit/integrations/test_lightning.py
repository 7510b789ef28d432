import subprocess
import sys

import lightning.pytorch.strategies
import pytest

from lightning_cxl.integrations import lightning as ours


def test_lightning_is_the_choice_when_nothing_else_was_imported():
    assert issubclass(ours.ParallelStrategy, lightning.pytorch.strategies.ParallelStrategy)


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "expected"),
    [("pytorch_lightning", "pytorch_lightning"), ("lightning.pytorch, pytorch_lightning", "lightning")],
)
def test_the_package_follows_what_the_program_imported(first, expected):
    program = f"import {first}, lightning_cxl; print(lightning_cxl.CXLOffloadStrategy.__mro__[2].__module__)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split("\n")[-2].split(".")[0] == expected
