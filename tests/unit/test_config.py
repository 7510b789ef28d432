import copy
import dataclasses
import pickle
from pathlib import Path

import pytest

from lightning_cxl.config import OffloadConfig, SsdOptions
from lightning_cxl.errors import ConfigError
from lightning_cxl.integrations.accelerate import read_options

NAMES = [field.name for field in dataclasses.fields(OffloadConfig)]


def test_budgets_in_both_forms_and_the_tier_ssd_and_what_front_ends_without_a_command_line_take(monkeypatch):
    tiers = {"cxl": {"budget": "64GiB"}, "dram": "1.5 GiB", "near": 4096}
    config = OffloadConfig(tiers={**tiers, "ssd": {"path": "/nvme/run", "budget": "1TiB"}})
    assert config.budgets() == {"cxl": 64 << 30, "dram": 3 << 29, "near": 4096}
    assert config.ssd() == SsdOptions((Path("/nvme/run"),), 1 << 40, "copy")
    assert OffloadConfig().budgets() == {} and OffloadConfig(tiers={"cxl": "1GiB"}).ssd() is None
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir("/")
    options = OffloadConfig(tiers={"ssd": {"path": ["~/run", "other"], "checkpoint": "reference"}}).ssd()
    assert options == SsdOptions((Path("/home/me/run"), Path("/other")), None, "reference"), "absolute paths"
    assert options.versions == 2
    config = OffloadConfig(state="bf16", tiers={"dram": "1GiB"}, replicate_machines=False)
    found, origins = OffloadConfig.resolve(**read_options(config))
    assert found == config == copy.deepcopy(config) == pickle.loads(pickle.dumps(config))
    assert (origins["state"], origins["units"]) == ("argument", "default")
    assert found.describe(origins)["tiers"] == {"value": {"dram": "1GiB"}, "origin": "argument"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": "cxl"}, "tiers must map names to budgets.*got 'cxl'"),
        ({"tiers": {"cxl": "3 apples"}}, "budget of 'cxl': cannot read '3 apples'"),
        ({"tiers": {"ssd": "1TiB"}}, "\"ssd\" needs a path.*got '1TiB'"),
        ({"tiers": {"ssd": {"path": "/a", "key": "$KEY"}}}, "does not encrypt.*LUKS.*fscrypt"),
        ({"tiers": {"ssd": {"path": ["/a", "/b/../a"]}}}, "none twice"),
        ({"tiers": {"ssd": {"path": "/a", "checkpoint": "copies"}}}, 'must be "copy" or "reference"'),
        ({"tier_rules": {"layers.*": 3}}, r"'layers\.\*': 3 must be a tier name"),
        ({"num_threads": 0}, "num_threads must be a positive"),
        ({"share_weights": False}, "option share_weights was removed: leave it out"),
        ({"stream_weight": True}, r"unknown option 'stream_weight': did you mean stream_weights\?"),
    ],
)
def test_bad_values(options, message):
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.resolve(**options)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tiers", "cxl=64GiB, dram=8GiB", {"cxl": "64GiB", "dram": "8GiB"}),
        ("tiers", '{"ssd": {"path": ["/a", "/b"]}}', {"ssd": {"path": ["/a", "/b"]}}),
        ("tier_rules", '{"layers.*": {"weights": "dram"}}', {"layers.*": {"weights": "dram"}}),
        ("cpu_adam", "No", False),
        ("units", "Block, Head", ["Block", "Head"]),
        ("num_threads", "3", 3),
    ],
)
def test_environment(monkeypatch, name, text, value):
    monkeypatch.setenv(f"LIGHTNING_CXL_{name.upper()}", text)
    config, origins = OffloadConfig.resolve()
    assert getattr(config, name) == value
    assert origins[name] == "environment"


def test_bad_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_CACHE", "folder")
    monkeypatch.setenv("LIGHTNING_CXL_MY_OWN", "1")
    OffloadConfig.resolve()
    monkeypatch.setenv("LIGHTNING_CXL_CPU_ADAM", "perhaps")
    with pytest.raises(ConfigError, match="cpu_adam must be one of True, False, got 'perhaps'"):
        OffloadConfig.resolve()
    monkeypatch.setenv("LIGHTNING_CXL_STATES", "bf16")
    with pytest.raises(ConfigError, match=r"LIGHTNING_CXL_STATES is no option: did you mean LIGHTNING_CXL_STATE\?"):
        OffloadConfig.resolve()


def test_an_argument_beats_the_environment_unless_it_is_one_of_the_defaults_that_lightning_cli_passes(monkeypatch):
    config, origins = OffloadConfig.resolve()
    assert config == OffloadConfig() and origins == dict.fromkeys(NAMES, "default")
    monkeypatch.setenv("LIGHTNING_CXL_NUM_THREADS", "3")
    for given in (5, None):
        config, origins = OffloadConfig.resolve(num_threads=given, units="auto")
        assert (config.num_threads, origins["num_threads"]) == (given, "argument")
    config, origins = OffloadConfig.resolve(**{name: getattr(OffloadConfig(), name) for name in NAMES})
    assert (config.num_threads, origins["num_threads"], origins["units"]) == (3, "environment", "default")
