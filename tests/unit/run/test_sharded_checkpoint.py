import io
import os
import pickle
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from lightning_cxl.errors import CheckpointError
from lightning_cxl.run import sharded_checkpoint
from lightning_cxl.run.checkpoint import is_sharded_checkpoint, load_file
from lightning_cxl.run.sharded_checkpoint import ShardedCheckpoint, optimizer_tensors, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def weights(value):
    return {"state_dict": {"a.weight": torch.full((3, 4), value)}}


def read(path):
    return ShardedCheckpoint(path).read({"state_dict.a.weight": torch.zeros(3, 4)})["state_dict.a.weight"]


@pytest.mark.parametrize("before", ["nothing", "a folder", "a file"])
def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch, before):
    path = tmp_path / "deep" / "last.ckpt"
    if before == "a folder":
        save(path, weights(1.0), {})
    elif before == "a file":
        path.parent.mkdir()
        path.write_bytes(b"of one process")
    monkeypatch.setattr(sharded_checkpoint.torch, "save", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"last.ckpt.*No space left.*as it was"):
        save(path, weights(2.0), {})
    monkeypatch.undo()
    if before == "a folder":
        assert read(path).eq(1.0).all()
    else:
        assert path.exists() == (before == "a file")
    save(path, weights(2.0), {"epoch": 3})
    assert is_sharded_checkpoint(path)
    assert read(path).eq(2.0).all() and ShardedCheckpoint(path).rest() == {"epoch": 3}
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


def test_what_does_not_fit_is_said(tmp_path):
    path = tmp_path / "one.ckpt"
    save(path, weights(1.0), {})
    folder = ShardedCheckpoint(path)
    with pytest.raises(CheckpointError, match=r"has no `state_dict.b`; it has `state_dict.a.weight`"):
        folder.read({"state_dict.b": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"shape \(3, 4\), and \(4, 3\) here"):
        folder.read({"state_dict.a.weight": torch.zeros(4, 3)})
    for file in path.glob("*.distcp"):
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        read(path)
    whole = (path / ".metadata").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", None):
        (path / ".metadata").unlink() if damaged is None else (path / ".metadata").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
            ShardedCheckpoint(path)


class Nested(torch.optim.Optimizer):
    """Keeps lists and dicts of tensors, as second-order optimizers do."""

    def __init__(self, groups, lr=0.1):
        super().__init__(groups, {"lr": torch.tensor(lr), "betas": [torch.tensor(0.9), torch.tensor(0.95)]})

    def fill(self, number):
        for group in self.param_groups:
            for parameter in group["params"]:
                number += 1
                like = torch.full_like(parameter, number)
                self.state[parameter] = {"factors": [like, like[:1] + 1], "of.dim": {"0": like + 2}, "step": number}
        return self


class Model(nn.Module):
    """Names with digits, and something beside tensors."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(3, 2)) for _ in range(2)])
        self.exp_avg = nn.ModuleList([nn.Linear(2, 2)])
        self.note = {"text": "", "list": [0]}

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def optimizer_of(model):
    return Nested([{"params": list(model.weights)}, {"params": list(model.exp_avg.parameters()), "lr": 0.5}])


def names_of(model):
    return {parameter: name for name, parameter in model.named_parameters()}.__getitem__


def test_names_with_dots_and_nested_state_come_back(tmp_path):
    model = Model()
    optimizer = optimizer_of(model).fill(7)
    with torch.no_grad():
        model.weights[1].fill_(3)
    model.note = {"text": "kept", "list": [1, 2]}
    path = tmp_path / "a.ckpt"
    save(path, {"state_dict": model.state_dict(), "optimizer_0": optimizer_tensors(optimizer, names_of(model))}, {})
    other = Model()
    loaded = optimizer_of(other)
    folder = ShardedCheckpoint(path)
    assert folder.read_weights(other, strict=True) == []
    folder.optimizer(0, loaded, names_of(other))
    assert other.note == model.note and torch.equal(other.weights[1], model.weights[1])
    assert [group["lr"] for group in loaded.param_groups] == [torch.tensor(0.1), 0.5]
    assert all(list(map(float, group["betas"])) == pytest.approx([0.9, 0.95]) for group in loaded.param_groups)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine, expected = loaded.state[ours], optimizer.state[theirs]
        assert mine.keys() == expected.keys() and mine["step"] == expected["step"]
        assert all(torch.equal(a, b) for a, b in zip(mine["factors"], expected["factors"], strict=True))
        assert torch.equal(mine["of.dim"]["0"], expected["of.dim"]["0"])
    larger = Model()
    larger.added = nn.Parameter(torch.ones(2))
    del larger.weights
    with pytest.raises(CheckpointError, match=r"lacks \['added'\] \(1\), and the model lacks \['weights\.0'"):
        folder.read_weights(larger, strict=True)
    assert folder.read_weights(larger, strict=False) == ["added"] and larger.added.tolist() == [1, 1]
    parameters = list(other.parameters())
    regrouped = Nested([{"params": parameters[:1]}, {"params": parameters[1:]}])
    with pytest.raises(CheckpointError, match=r"`weights\.1`\) are spread over the saved groups"):
        folder.optimizer(0, regrouped, names_of(other))


class Hostile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Kept:
    """What a user may have among the values of an optimizer."""

    def __init__(self, number=7):
        self.number = number


def folder_with(path, **values):
    save(path, {"state_dict": {"weight": torch.arange(6.0).view(2, 3)}, "optimizer_0": values}, {})
    return path


def test_a_list_of_tensors_that_asks_for_code_is_refused(tmp_path):
    path = folder_with(tmp_path / "a.ckpt")
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"a\.ckpt.*was not read.*asks for \w+\.mkdir"):
        ShardedCheckpoint(path)
    (path / ".metadata").write_bytes(pickle.dumps({"weight": 3}))
    with pytest.raises(CheckpointError, match=r"its list of tensors is a dict.*damaged"):
        ShardedCheckpoint(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["{}/b.ckpt/__0_0.distcp", "../b.ckpt/__0_0.distcp", "..", "..\\\\__0_0.distcp", ""])
def test_a_list_of_tensors_that_names_files_elsewhere_is_refused(tmp_path, name):
    path, _ = folder_with(tmp_path / "a.ckpt"), folder_with(tmp_path / "b.ckpt")
    found = pickle.loads((path / ".metadata").read_bytes())
    for each in found.storage_data.values():
        each.relative_path = name.format(tmp_path)
    (path / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CheckpointError, match=r"names '.*', no checkpoint file"):
        ShardedCheckpoint(path)


@pytest.mark.parametrize("value", [Hostile("made"), Kept()], ids=["blocked", "unknown"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_no_error_advises_to_run_code(tmp_path, kind, value):
    if kind == "file":
        torch.save({"value": value}, tmp_path / "a.ckpt")
    else:
        torch.save({"value": value}, folder_with(tmp_path / "a.ckpt") / "meta.pt")
    with pytest.raises(CheckpointError, match=r"was not read: .*(mkdir|Kept).*add_safe_globals") as found:
        if kind == "file":
            load_file(tmp_path / "a.ckpt", "cpu", None)
        else:
            ShardedCheckpoint(tmp_path / "a.ckpt").rest(weights_only=None)
    assert "False" not in str(found.value)


def test_a_value_that_asks_for_code_is_refused_and_a_class_that_the_user_names_is_read(tmp_path):
    folder = ShardedCheckpoint(folder_with(tmp_path / "a.ckpt", value=Kept(5), other=Hostile(tmp_path / "made")))
    for name, message in (("value", r"Kept.*add_safe_globals"), ("other", r"was not read.*mkdir")):
        with pytest.raises(CheckpointError, match=message):
            folder.read({f"optimizer_0.{name}": None})
    assert not (tmp_path / "made").exists()
    with torch.serialization.safe_globals([Kept]):
        assert folder.read({"optimizer_0.value": None})["optimizer_0.value"].number == 5


def test_every_list_of_torchs_own_is_known(tmp_path):
    """Types, layouts and memory formats of whatever may be saved."""
    dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn]
    tensors = {str(each): torch.zeros(4, dtype=each) for each in dtypes}
    tensors["last"] = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    save(tmp_path / "a.ckpt", {"state_dict": tensors, "other": {"text": "kept"}}, {})
    metadata = ShardedCheckpoint(tmp_path / "a.ckpt")._reader.metadata
    kinds = {type(each) for each in metadata.state_dict_metadata.values()}
    assert kinds == {TensorStorageMetadata, BytesStorageMetadata} and len(metadata.state_dict_metadata) == 9
    whole = pickle.load(io.BytesIO((tmp_path / "a.ckpt" / ".metadata").read_bytes()))
    assert whole.state_dict_metadata == metadata.state_dict_metadata
