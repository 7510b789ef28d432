"""`export` of a folder that several processes have written: as that of the same state in one file."""

import pytest
import torch
from safetensors.torch import load_file

from lightning_cxl.commands.export import export_checkpoint
from lightning_cxl.errors import CheckpointError
from tests.distributed import lightning_runs
from tests.integration.llama import tiny_llama

MASTERS = {"split": {}, "whole": {"master": "fp32"}}


@pytest.mark.parametrize("masters", MASTERS)
def test_a_folder_is_exported_as_a_file(ranks, tmp_path, masters):
    folder, file, base = (tmp_path / name for name in ("folder.ckpt", "file.ckpt", "base"))
    job = {"module": {"llama": True}, "trainer": {"precision": "bf16-true"}, "options": MASTERS[masters]}
    ranks.of(2).run(lightning_runs.fit, 3, save=str(folder), **job)
    lightning_runs.fit(3, resume=str(folder), save=str(file), **job)  # no step: the state only changes its form
    assert folder.is_dir() and file.is_file()
    model = tiny_llama(tie_word_embeddings=True).bfloat16()
    model.save_pretrained(base)
    written = {}
    for dtype in (None, torch.float32):
        for source in (folder, file):
            out = tmp_path / f"{source.stem} {dtype}"
            exported = export_checkpoint(source, out, base=base, dtype=dtype)
            assert ("are the float32 master weights" in " ".join(exported.notes)) is (dtype is torch.float32)
            written[source, dtype] = load_file(out / "model.safetensors")
        ours, expected = written[folder, dtype], written[file, dtype]
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in ours)
    narrow, wide = written[folder, None], written[folder, torch.float32]
    assert sum(int((wide[name] != narrow[name].float()).sum()) for name in wide) > 1000


def test_a_state_of_accelerate_is_exported_from_its_newer_part(ranks, tmp_path):
    """`load_state` takes what several processes have written, too, if files of one lie beside it."""
    state, base = tmp_path / "state", tmp_path / "base"
    ranks.of(2).run(lightning_runs.fit, 1, save=str(state / "sharded_model_0"), module={"llama": True})
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(base)
    (state / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes())
    export_checkpoint(state, tmp_path / "out", base=base)
    export_checkpoint(state / "sharded_model_0", tmp_path / "expected", base=base)
    found, expected, older = (
        load_file(each / "model.safetensors") for each in (tmp_path / "out", tmp_path / "expected", base)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(found[name], older[name]) for name in older)
    ranks.of(2).run(lightning_runs.fit, 1, save=str(state / "sharded_model_1"), module={"llama": True})
    with pytest.raises(CheckpointError, match=r"several models: export one of .*sharded_model_1"):
        export_checkpoint(state, tmp_path / "out 2", base=base)
