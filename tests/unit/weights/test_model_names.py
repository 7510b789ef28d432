"""A name is checked at once: folders and cached models without network, the hub for a few seconds at most."""

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from lightning_cxl.errors import ConfigError
from lightning_cxl.weights import hf as model_names
from lightning_cxl.weights.hf import is_cached, require_model


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Let the hub answer with what is put in here; records who was asked for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    answers = {"asked": [], "raises": None}

    def model_info(self, name, *, timeout):
        answers["asked"].append((name, timeout))
        if answers["raises"] is not None:
            raise answers["raises"]

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    return answers


def refused(name):
    with pytest.raises(ConfigError) as caught:
        require_model(name)
    return str(caught.value)


def test_a_folder_is_a_model_when_it_has_a_config(hub, tmp_path):
    assert "has no config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    require_model(str(tmp_path))
    assert not hub["asked"]


@pytest.mark.parametrize("name", ["llama-3.1-8", "./runs/export", "/no/such/folder", "a/b/c", "owner/", "../x"])
def test_what_is_no_hub_id_is_not_asked_for(hub, name, tmp_path, monkeypatch):
    here = tmp_path / "here"  # the folder of the tests may have runs/export in it, or x beside it
    here.mkdir()
    monkeypatch.chdir(here)
    assert "It is no folder" in refused(name)
    assert not hub["asked"]


def test_a_model_of_the_hub_is_asked_for_once_with_a_time_limit(hub):
    require_model("Qwen/Qwen2.5-0.5B")
    assert hub["asked"] == [("Qwen/Qwen2.5-0.5B", model_names._HUB_SECONDS)]


def test_a_mistyped_model_of_the_hub_is_answered_with_the_nearest(hub):
    hub["raises"] = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    message = refused("Qwen/Qwen2.5-0.5")
    assert "the hub has no such model" in message
    assert "did you mean qwen2.5-0.5b (Qwen/Qwen2.5-0.5B)" in message


def test_a_hub_that_cannot_be_reached_says_what_to_do(hub, monkeypatch):
    hub["raises"] = OSError("Name or service not known")
    message = refused("Qwen/Qwen2.5-0.5B")
    assert "cannot be asked (https://huggingface.co: Name or service not known)" in message
    assert "HF_HOME" in message and "HF_ENDPOINT" in message
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub["asked"].clear()
    assert "HF_HUB_OFFLINE is set" in refused("Qwen/Qwen2.5-0.5B")
    assert not hub["asked"]


def test_a_cached_model_needs_no_hub(hub, tmp_path):
    name, revision = "owner/name", "0" * 40
    folder = tmp_path / "cache" / "models--owner--name"
    (folder / "snapshots" / revision).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    assert not is_cached(name)
    (folder / "snapshots" / revision / "config.json").write_text("{}")
    assert is_cached(name)
    require_model(name)
    assert not hub["asked"]
