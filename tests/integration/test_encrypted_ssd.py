"""Encrypted state on SSD under the Trainer: the results of state in memory, and nothing readable on the drives."""

import json
import re
import secrets
import sys

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback

import lightning_cxl
from lightning_cxl.errors import ConfigError, LightningCXLWarning, StorageError, TierFullError, UnsupportedError
from lightning_cxl.optim import state_records
from lightning_cxl.run import state_on_ssd
from tests.integration.test_state_on_ssd import (
    REFERENCE,
    Sequential,
    ZeroesMomentum,
    assert_same,
    bfloat16_llama,
    every_step,
    fit,
    on_ssd,
    weights,
)
from tests.integration.training import make_trainer, offload
from tests.models import token_data

pytestmark = [
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
]

KEY = secrets.token_bytes(64)
SAMPLE = 16  # bytes: what one block of the cipher has


@pytest.fixture(autouse=True)
def set_key(monkeypatch):
    monkeypatch.setenv("SSD_KEY", KEY.hex())


def encrypted(folder, checkpoint="copy", key="$SSD_KEY", **options):
    return on_ssd(folder / "ssd", ssd={"checkpoint": checkpoint, "key": key}, **options)


def plain_state(path, **options):
    checkpoint = torch.load(path, weights_only=True, map_location="cpu")
    return lightning_cxl.plain_checkpoint(checkpoint, **options)["optimizer_states"][0]["state"]


def assert_same_state(ours, theirs):
    assert ours.keys() == theirs.keys() and ours
    for key in ours:
        assert ours[key].keys() == theirs[key].keys()
        for name, value in ours[key].items():
            assert torch.equal(value, theirs[key][name]), (key, name)


@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
@pytest.mark.parametrize(
    "options", [{}, {"stream_weights": True, "overlap_step": True, "on_overflow": "ignore"}], ids=["whole", "overlap"]
)
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_run_resumes_exactly(tmp_path, checkpoint, state, options):
    straight = fit(offload(state=state, **options), 7, callbacks=[every_step(tmp_path / "straight")])
    folder = tmp_path / "own"
    first = fit(encrypted(tmp_path, checkpoint, state=state, **options), 4, callbacks=[every_step(folder)])
    saved = next(folder.glob("*.ckpt"))
    second = fit(
        encrypted(tmp_path, checkpoint, state=state, **options), 7, ckpt_path=saved, callbacks=[every_step(folder)]
    )
    assert first.losses + second.losses == straight.losses
    assert_same(([], weights(second)), ([], weights(straight)))
    saved, theirs = (next(each.glob("*step=7.ckpt")) for each in (folder, tmp_path / "straight"))
    assert_same_state(plain_state(saved, key="$SSD_KEY"), plain_state(theirs))


def test_what_refers_to_encrypted_state_becomes_a_whole_checkpoint_with_the_key_only(tmp_path):
    fit(encrypted(tmp_path, "reference"), 2, callbacks=[every_step(tmp_path)])
    saved = next(tmp_path.glob("*.ckpt"))
    with pytest.raises(ConfigError, match="is encrypted, and this run has no key"):
        plain_state(saved)
    entries = plain_state(saved, key="$SSD_KEY").values()
    assert not any(value.isnan().any() for entry in entries for value in entry.values())


class Searches(Callback):
    """Looks after every step, and when a checkpoint has been saved, for all of the state in all files of a folder."""

    def __init__(self, folder, path):
        self.folder, self.path = folder, path
        self.found, self.sought = 0, 0

    def on_train_batch_end(self, trainer, *_):
        samples = self.samples(trainer)
        self.search(samples)
        if self.path is not None:
            trainer.save_checkpoint(self.path)
            self.search(samples)

    def on_fit_end(self, trainer, *_):
        self.last = self.samples(trainer)

    def samples(self, trainer):
        contents = [
            value.contiguous().view(torch.uint8).numpy().tobytes()
            for entry in trainer.optimizers[0].state.values()
            for key, value in entry.items()
            if value.numel() >= SAMPLE and not key.startswith("qmap")
        ]
        return {each[start : start + SAMPLE] for each in contents for start in range(0, len(each) - SAMPLE, 1024)}

    def search(self, samples):
        raw = b"".join(path.read_bytes() for path in self.folder.iterdir() if path.is_file())
        # zeros and the like are everywhere; state has thousands of other samples
        distinct = [sample for sample in samples if len(set(sample)) > SAMPLE // 2]
        self.sought += len(distinct)
        self.found += sum(sample in raw for sample in distinct)


@pytest.mark.parametrize("state", ["fp32", "8bit"])
@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
def test_no_state_lies_on_the_drives_in_plain(tmp_path, state, checkpoint):
    found = {}
    for key in ("$SSD_KEY", None):
        search = Searches(tmp_path / "ssd", tmp_path / "saved.ckpt")
        ssd = {"checkpoint": checkpoint, **({"key": key} if key else {})}
        fit(on_ssd(tmp_path / "ssd", ssd=ssd, state=state, tiers={}), 3, callbacks=[search])
        search.search(search.last)
        found[key] = search.found
        assert search.sought > 500
        for path in (tmp_path / "ssd").iterdir():
            path.unlink()
    assert found["$SSD_KEY"] == 0
    assert found[None] > 500, "the search finds nothing where there is something"


class Reads(Callback):
    """Reads state between steps as users do: through the optimizer, and through tensors that it holds."""

    def __init__(self):
        self.values, self.held, self.held_values = [], [], []

    def on_train_batch_end(self, trainer, *_):
        self.held_values.append([tensor.isnan().all().item() for tensor in self.held])
        entries = list(trainer.optimizers[0].state.values())
        self.values.append([entry["exp_avg"].clone() for entry in entries])
        self.held = self.held or [entry["exp_avg"] for entry in entries]


def test_who_reads_state_between_steps_gets_its_values(tmp_path):
    ours, theirs = Reads(), Reads()
    fit(encrypted(tmp_path, overlap_step=False), 3, callbacks=[ours])
    fit(offload(overlap_step=False), 3, callbacks=[theirs])
    for own, other in zip(ours.values, theirs.values, strict=True):
        assert all(map(torch.equal, own, other))
    assert all(ours.held_values[1]) and ours.held_values[1], "tensors that are held show numbers of the step before"


@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
def test_a_checkpoint_after_the_run_has_the_state(tmp_path, checkpoint):
    fit(encrypted(tmp_path, checkpoint), 3, save=tmp_path / "ours.ckpt")
    fit(offload(), 3, save=tmp_path / "theirs.ckpt")
    assert_same_state(plain_state(tmp_path / "ours.ckpt"), plain_state(tmp_path / "theirs.ckpt"))


@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
def test_a_checkpoint_has_what_someone_wrote_to_the_state_while_it_was_made(tmp_path, checkpoint):
    fit(encrypted(tmp_path, checkpoint), 2, callbacks=[ZeroesMomentum(tmp_path / "it.ckpt")])
    entries = plain_state(tmp_path / "it.ckpt", key="$SSD_KEY").values()
    for entry in entries:
        assert not entry["exp_avg"].any() and entry["exp_avg_sq"].any() and not entry["exp_avg_sq"].isnan().any()


def no_memory(monkeypatch):
    monkeypatch.setattr(state_records, "host_available_bytes", lambda root: 100_000)


def test_a_run_that_memory_cannot_hold_resumes_from_references_without_a_look(tmp_path, monkeypatch):
    straight = fit(offload(), 5)
    no_memory(monkeypatch)
    with pytest.warns(LightningCXLWarning, match="is not in memory: its run is over"):
        first = fit(encrypted(tmp_path, "reference"), 3, callbacks=[every_step(tmp_path)])
    with pytest.warns(LightningCXLWarning, match="is not in memory: its run is over"):
        second = fit(encrypted(tmp_path, "reference"), 5, ckpt_path=next(tmp_path.glob("*.ckpt")))
    assert first.losses + second.losses == straight.losses


def test_a_copy_that_memory_cannot_hold_is_refused(tmp_path, monkeypatch, caplog):
    no_memory(monkeypatch)
    fit(encrypted(tmp_path), 0)
    assert "saving one will fail" not in caplog.text  # there may be more memory when one is saved
    monkeypatch.setattr(state_on_ssd, "host_limit_bytes", lambda root: 100_000)
    with pytest.warns(LightningCXLWarning), pytest.raises(TierFullError, match="checkpoint='reference'"):
        fit(encrypted(tmp_path), 2, callbacks=[every_step(tmp_path)])
    with pytest.warns(LightningCXLWarning), pytest.raises(StorageError, match="its run is over"):
        fit(encrypted(tmp_path), 2, save=tmp_path / "end.ckpt")
    assert not list(tmp_path.glob("*.ckpt"))
    assert re.search(r"needs .* KiB of memory, and this process can have 97\.7 KiB: saving one will fail", caplog.text)
    caplog.clear()
    with pytest.warns(LightningCXLWarning):
        fit(encrypted(tmp_path, "reference"), 2)
    assert "will fail" not in caplog.text


def fit_twice(first, second):
    """Train with one optimizer object in two runs; return the losses of both."""
    seed_everything(11, verbose=False)
    module = Sequential(bfloat16_llama())
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured
    for strategy, steps in ((first, 3), (second, 5)):
        make_trainer(strategy, max_steps=steps).fit(module, token_data())
    return module.losses


def test_the_next_run_in_the_folder_takes_over_the_state_of_the_optimizer(tmp_path):
    """Without a key that is refused: tensors of the run that is over show files in which the next run writes."""
    ours = fit_twice(encrypted(tmp_path, "reference"), encrypted(tmp_path, "reference"))
    assert ours == fit_twice(offload(), offload())


@pytest.mark.parametrize("other", [None, secrets.token_bytes(64), KEY[:32]], ids=["no key", "another", "a part of it"])
def test_a_run_with_another_key_or_none_is_refused(tmp_path, monkeypatch, other):
    fit(encrypted(tmp_path, "reference"), 2, callbacks=[every_step(tmp_path)])
    saved = next(tmp_path.glob("*.ckpt"))
    before = {path: path.read_bytes() for path in (tmp_path / "ssd").iterdir() if path.suffix != ".lock"}
    if other is not None:
        monkeypatch.setenv("SSD_KEY", other.hex())
    match = "is encrypted, and this run has no key" if other is None else "is encrypted, and this run has another key"
    for ckpt_path in (saved, None):
        strategy = on_ssd(tmp_path / "ssd", **REFERENCE) if other is None else encrypted(tmp_path, "reference")
        with pytest.raises(ConfigError, match=f"{match}. Give the key"):
            fit(strategy, 3, ckpt_path=ckpt_path)
    assert before == {path: path.read_bytes() for path in before}, "what was refused has changed something"
    monkeypatch.setenv("SSD_KEY", KEY.hex())
    fit(encrypted(tmp_path, "reference"), 3, ckpt_path=saved)


def test_a_run_with_a_key_is_refused_where_state_lies_in_plain(tmp_path):
    fit(on_ssd(tmp_path / "ssd", **REFERENCE), 2, callbacks=[every_step(tmp_path)])
    with pytest.raises(ConfigError, match=r"is not encrypted, and this run has a key\. Leave the key out"):
        fit(encrypted(tmp_path, "reference"), 3, ckpt_path=next(tmp_path.glob("*.ckpt")))


def test_a_key_that_is_missing_is_refused_before_there_is_a_model(tmp_path, monkeypatch):
    monkeypatch.delenv("SSD_KEY")
    strategy = encrypted(tmp_path)
    with pytest.raises(ConfigError, match=r"SSD_KEY .* is not set"), strategy.tensor_init_context():
        pytest.fail("a model would be made")


def test_without_the_package_that_encrypts_a_run_is_refused_before_there_is_a_model(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.hashes", None)
    strategy = encrypted(tmp_path)
    with pytest.raises(UnsupportedError, match=r"lightning_cxl\[encryption\]"), strategy.tensor_init_context():
        pytest.fail("a model would be made")


def test_the_key_is_shown_nowhere(tmp_path, caplog, capfd):
    """Not in reports, texts, checkpoints, logs; nor in what lies on the drives."""
    caplog.set_level("DEBUG")
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(KEY)
    strategies = [encrypted(tmp_path, "reference"), encrypted(tmp_path, "reference", key=str(path))]
    shown = []
    ckpt_path = None
    for strategy in strategies:
        module = fit(strategy, 2, callbacks=[every_step(tmp_path, save_weights_only=False)], ckpt_path=ckpt_path)
        ckpt_path = next(tmp_path.glob("*.ckpt"))
        shown += [repr(strategy), str(strategy), json.dumps(strategy.report(), default=str), repr(vars(strategy))]
        shown += [repr(vars(module)), repr(strategy.config), caplog.text, *capfd.readouterr()]
    files = [each.read_bytes() for each in tmp_path.rglob("*") if each.is_file() and each != path]
    everything = "\n".join(shown).encode() + b"".join(files)
    for part in (KEY, KEY[:16], KEY[32:48], repr(KEY)[2:30].encode(), KEY.hex()[:32].encode()):
        assert part not in everything and part.upper() not in everything
    assert b"$SSD_KEY" in everything  # where it lies is shown


def test_weights_are_refused_with_a_key(tmp_path):
    rule = {"*": {"weights": "ssd", "optimizer_state": "ssd"}}
    with pytest.raises(UnsupportedError, match="weights on tier `ssd` cannot be encrypted yet"):
        fit(encrypted(tmp_path, tier_rules=rule, stream_weights=True), 1)
