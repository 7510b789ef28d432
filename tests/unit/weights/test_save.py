"""`save_weights`: what the files hold, and what failures leave."""

import json
import os
import resource

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLWarning
from lightning_cxl.weights import models as saving
from lightning_cxl.weights.files import NamedTensor
from lightning_cxl.weights.models import empty_weights, save_weights
from tests.models import TinyConvNet, TinyTransformer


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def loaded(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize("make", [TinyTransformer, TinyConvNet])
def test_one_file_with_every_parameter_and_persistent_buffer(tmp_path, make):
    model, folder, mine = make(), tmp_path / "new" / "folder", tmp_path / "mine.safetensors"
    assert save_weights(model, folder) == [folder / "model.safetensors"]
    assert files(folder) == ["model.safetensors"]
    assert save_weights(model, mine, max_shard_bytes=1) == [mine]
    for state in (loaded(folder), load_file(mine)):
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_shards_with_an_index_in_the_format_of_hugging_face(tmp_path):
    model = TinyTransformer()
    paths = save_weights(model, tmp_path, max_shard_bytes="20KB")
    largest = max(value.nbytes for value in model.state_dict().values())
    for path in paths:
        state = load_file(path)
        nbytes = sum(value.nbytes for value in state.values())
        assert nbytes <= 20_000 or (len(state) == 1 and nbytes == largest)
    names = [f"model-{i:05}-of-{len(paths):05}.safetensors" for i in range(1, 1 + len(paths))]
    assert [path.name for path in paths] == names
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in model.state_dict().values())
    assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
    assert index["weight_map"] == {name: path.name for path in paths for name in load_file(path)}
    assert loaded(tmp_path).keys() == model.state_dict().keys()


def test_a_later_save_replaces_an_earlier_one_whatever_its_shards(tmp_path):
    (tmp_path / "config.json").touch()
    save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    for _ in range(2):
        model = TinyTransformer()
        save_weights(model, tmp_path, max_shard_bytes=50_000)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert files(tmp_path) == sorted({*index["weight_map"].values(), "config.json", "model.safetensors.index.json"})
        assert torch.equal(loaded(tmp_path)["embed.weight"], model.embed.weight)
        save_weights(TinyTransformer(), tmp_path)
        assert files(tmp_path) == ["config.json", "model.safetensors"]


def test_tied_weights_are_written_once_under_the_name_that_is_not_declared_tied(tmp_path):
    save_weights(TinyTransformer(tied=True), tmp_path / "a")
    assert "embed.weight" in loaded(tmp_path / "a") and "head.weight" not in loaded(tmp_path / "a")
    model = TinyTransformer(tied=True)
    model._tied_weights_keys = {"embed.weight": "head.weight"}
    model._keys_to_ignore_on_save = {"norm.bias"}
    save_weights(model, tmp_path / "b")
    state = loaded(tmp_path / "b")
    assert "head.weight" in state and "embed.weight" not in state and "norm.bias" not in state


class OwnState(nn.Linear):
    def get_extra_state(self):
        return {"scale": 1.0}


def test_views_of_one_storage_are_written_as_what_they_are_and_other_state_is_named(tmp_path):
    both, model = torch.randn(2, 5), nn.Module()
    model.a, model.b = nn.Parameter(both[0]), nn.Parameter(both[1])
    save_weights(model, tmp_path)
    state = loaded(tmp_path)
    assert torch.equal(state["a"], both[0]) and torch.equal(state["b"], both[1])
    assert (tmp_path / "model.safetensors").stat().st_size < 300
    with pytest.warns(LightningCXLWarning, match="OwnState: 1 entries .* such as `_extra_state`") as told:
        save_weights(OwnState(2, 2), tmp_path)
    assert told[0].filename == __file__
    assert loaded(tmp_path).keys() == {"weight", "bias"}
    assert save_weights(nn.Identity(), tmp_path) == [tmp_path / "model.safetensors"] and loaded(tmp_path) == {}


def test_what_cannot_be_written_is_named(tmp_path):
    def with_buffer(value):
        module = nn.Module()
        module.register_buffer("s", value)
        return module

    with empty_weights():
        on_meta = TinyTransformer()
    for model, message in (
        (on_meta, r"on the meta device .* `embed\.weight`: load them"),
        (with_buffer(torch.eye(3).to_sparse()), "`s` is sparse or quantized"),
        (with_buffer(torch.ones(2, dtype=torch.complex128)), "complex128"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_weights(model, tmp_path)
    twins = [NamedTensor("a", torch.full((2,), float(number)), torch.float32) for number in range(2)]
    with pytest.raises(CheckpointError, match="one name"):
        saving.save_tensors(twins, tmp_path, 8)
    assert files(tmp_path) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file: give a folder"):
        save_weights(TinyTransformer(), tmp_path / "file")


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path):
    """Return what checks that the folder is as an earlier save left it."""
    save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    content = lambda: {path.name: path.read_bytes() for path in tmp_path.iterdir()}  # noqa: E731
    before = content()
    return lambda: content() == before


def test_when_the_file_system_refuses_the_earlier_save_is_as_it_was(tmp_path, earlier):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"could not save .* KiB of weights to `{tmp_path}`: File too large"):
            save_weights(TinyTransformer(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert earlier()


def failing(monkeypatch, module, name, number, error):
    """Let the call with this number fail: a function of a module."""
    function, calls = getattr(module, name), []

    def fail(*args):
        calls.append(args)
        if len(calls) == number:
            raise error
        function(*args)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt("No space left")])
def test_an_error_at_the_third_shard_leaves_nothing(tmp_path, earlier, monkeypatch, error):
    failing(monkeypatch, saving, "write_tensors", 3, error)
    with pytest.raises((CheckpointError, KeyboardInterrupt), match="No space left"):
        save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    assert earlier()


def test_a_crash_between_the_renames_leaves_no_mixture_that_loads(tmp_path, earlier, monkeypatch):
    failing(monkeypatch, os, "replace", 2, OSError(5, "Input/output error"))
    with pytest.raises(CheckpointError, match="Input/output error"):
        save_weights(TinyTransformer(), tmp_path, max_shard_bytes=20_000)
    assert not {"model.safetensors.index.json", "model.safetensors"}.intersection(files(tmp_path))
    assert not [name for name in files(tmp_path) if name.startswith(".")]


def test_dtype_converts_parameters_and_leaves_buffers_and_the_model(tmp_path):
    model = TinyConvNet()
    save_weights(model, tmp_path, dtype=torch.bfloat16)
    state = loaded(tmp_path)
    assert torch.equal(state["stem.weight"], model.stem.weight.bfloat16())
    assert state["blocks.0.1.running_mean"].dtype == model.stem.weight.dtype == torch.float32
    assert state["blocks.0.1.num_batches_tracked"].dtype == torch.int64
