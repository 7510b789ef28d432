"""Errors that options cause are one message; a bug of the user's own module keeps its traceback."""

import importlib.util
import pickle

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_cxl.errors import ConfigError, TierFullError
from lightning_cxl.finetune.cli import option_errors


@pytest.fixture
def raising(tmp_path):
    """Makes a function that raises in a module of a given name."""

    def make(module, statement, **names):
        path = tmp_path / "raising.py"
        path.write_text(f"def run():\n    {statement}\n")
        spec = importlib.util.spec_from_file_location(module, path)
        made = importlib.util.module_from_spec(spec)
        vars(made).update(names)
        spec.loader.exec_module(made)
        return made.run

    return make


@pytest.mark.parametrize("kind", [MisconfigurationException, ValueError, TypeError, RuntimeError])
def test_what_lightning_itself_raises_is_about_options(raising, kind):
    with pytest.raises(ConfigError, match="no such accelerator"), option_errors():
        raising("lightning.pytorch.trainer", "raise kind('no such accelerator')", kind=kind)()


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine"), OSError("mine"), KeyError("mine")])
def test_a_bug_in_the_users_module_stays_as_it_is(raising, error):
    users = raising("users_module", "raise error", error=error)
    with pytest.raises(type(error)) as caught, option_errors():
        raising("lightning.pytorch.loops", "users()", users=users)()
    assert caught.value is error


@pytest.mark.parametrize("error", [OSError("no room"), pickle.UnpicklingError("no checkpoint"), EOFError()])
def test_a_file_that_lightning_cannot_read_is_about_options(raising, error):
    reads = raising("torch.serialization", "raise error", error=error)
    with pytest.raises(ConfigError, match=str(error) or "EOFError"), option_errors():
        raising("lightning.fabric.cloud_io", "reads()", reads=reads)()


def test_our_errors_are_found_inside_of_others(raising):
    def fails():
        raise TierFullError("no room in dram")

    with pytest.raises(TierFullError, match="no room in dram"), option_errors():
        try:
            fails()
        except TierFullError as error:
            raise ValueError("a long text of jsonargparse") from error


def test_a_bug_that_follows_one_of_our_errors_stays_as_it_is(raising):
    def meets():
        try:
            raise TierFullError("no room in dram")
        except TierFullError:
            users()

    users = raising("users_module", "raise ValueError('mine')")
    with pytest.raises(ValueError, match="mine"), option_errors():
        meets()
