import subprocess
import sys

import lightning.pytorch.strategies
import pytest

from lightning_cxl.integrations.lightning import lightning_api as _lightning

PROGRAM = """
{first}
from lightning_cxl.integrations.lightning import lightning_api as _lightning
print(_lightning.PACKAGE, _lightning.Trainer.__module__.split(".")[0], *_lightning.loaded_packages())
"""


def test_lightning_is_the_choice_when_nothing_else_was_imported():
    assert _lightning.PACKAGE == "lightning"
    assert _lightning.loaded_packages()[0] == "lightning"
    assert issubclass(_lightning.ParallelStrategy, lightning.pytorch.strategies.ParallelStrategy)
    assert all(hasattr(_lightning, name) for name in _lightning.__all__)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("import pytorch_lightning", "pytorch_lightning pytorch_lightning pytorch_lightning"),
        ("import lightning.pytorch, pytorch_lightning", "lightning lightning lightning pytorch_lightning"),
    ],
)
@pytest.mark.full
def test_the_package_follows_what_the_program_imported(first, expected):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split("\n")[-2] == expected
