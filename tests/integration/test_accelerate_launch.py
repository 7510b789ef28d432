"""`accelerate launch` with a script of the user's, whose options are in a YAML file and in variables."""

import pytest

from lightning_cxl.errors import ConfigError
from tests.integration.accelerate_loop import make_accelerator

pytestmark = pytest.mark.on_cpu


def test_options_of_the_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_CPU_ADAM", "false")
    accelerator = make_accelerator(None)
    assert accelerator.offload.session.config.cpu_adam is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a list", "must map names of options"),
        ("no_such_option: 1", "unknown option 'no_such_option'"),
        ("tiers: {", "cannot read the options"),
        (None, "cannot read the options"),
    ],
)
def test_a_file_that_is_no_good(text, message, tmp_path):
    path = tmp_path / "options.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        make_accelerator(path)
