import json

import pytest
import torch
from safetensors.torch import save_file

from lightning_cxl.errors import CheckpointError
from lightning_cxl.weights.files import open_weights


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def names(source):
    with open_weights(source) as files:
        return [sorted(file.entries) for file in files]


def test_a_folder_with_an_index_a_file_and_a_list_of_files(sharded):
    assert names(sharded) == names(str(sharded)) == [["a"], ["b", "c"]]
    assert names(sharded / "model.safetensors.index.json") == [["a"], ["b", "c"]]
    assert names(sharded / "two.safetensors") == [["b", "c"]]
    assert names([sharded / "two.safetensors", str(sharded / "one.safetensors")]) == [["b", "c"], ["a"]]


def test_a_single_file_comes_before_an_index_as_in_transformers(sharded):
    save_file({"z": torch.ones(2)}, sharded / "model.safetensors")
    assert names(sharded) == [["z"]]


def test_missing_shards_are_all_named(sharded):
    write_index(sharded, {"a": "one.safetensors", "b": "three.safetensors", "c": "four.safetensors"})
    with pytest.raises(CheckpointError, match=r"2 of 3 files .*three\.safetensors.*four\.safetensors.*Complete"):
        names(sharded)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "two.safetensors"}, r"'a' is in `two\.safetensors`, but it is in none of its files"),
        (
            {"a": "two.safetensors", "b": "one.safetensors"},
            r"'a' is in `two\.safetensors`, but it is in `one\.safetensors`",
        ),
        ({"a": "../one.safetensors"}, "not a file beside it"),
        ({"a": "/etc/passwd"}, "not a file beside it"),
        ({"a": ".."}, "not a file beside it"),
        ({"a": "..\\\\one.safetensors"}, "not a file beside it"),
        ({"a": 3}, "not a file beside it"),
        ({}, "no table of names, or empty"),
        ([], "no table of names, or empty"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(sharded, weight_map, reason):
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match=reason):
        names(sharded)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", "3", '"x"', "\udcff"])
def test_an_index_that_is_none_is_refused(sharded, text):
    (sharded / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        names(sharded)


def test_the_same_name_in_two_files(sharded):
    save_file({"b": torch.ones(3)}, sharded / "old.safetensors")
    with pytest.raises(CheckpointError, match=r"'b' is in .*two\.safetensors` and in .*old\.safetensors`"):
        names([sharded / "two.safetensors", sharded / "old.safetensors"])


def test_folders_without_weights_say_what_they_have(tmp_path):
    with pytest.raises(CheckpointError, match="it has no weights of any kind"):
        names(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"it has pytorch_model\.bin\. .*convert \.bin files"):
        names(tmp_path)
    with pytest.raises(CheckpointError, match="1 of 1 files with weights do not exist"):
        names(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="empty list"):
        names([])
