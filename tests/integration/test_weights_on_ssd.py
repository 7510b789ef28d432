"""Weights of units on SSD: training is that of weights in memory, bit for bit, in every precision."""

import errno
import json
import os
import subprocess
import sys
import time

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_cxl.errors import LightningCXLWarning, StorageError
from lightning_cxl.inventory.tensors import NUM_HOP_SLOTS, PlannedRecord
from lightning_cxl.machine.speeds import MachineSsd
from lightning_cxl.run import run
from lightning_cxl.run.state_on_ssd import StateOnSsd
from lightning_cxl.storage import store
from lightning_cxl.storage.drive import System
from lightning_cxl.storage.store import Store
from tests.cases import every_pair, every_value
from tests.faulty_system import FaultySystem
from tests.integration.llama import LlamaInStep, LlamaTask, tiny_llama
from tests.integration.training import assert_identical as assert_same
from tests.integration.training import make_trainer, offload, train
from tests.models import token_data
from tests.storage_cases import data_file

WEIGHTS = {"*": {"weights": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd"}}
STEPS = 6


def on_ssd(folder, rules=ALL, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(**{"tiers": {"ssd": ssd}, "tier_rules": rules, "stream_weights": True, **options})


def both(tmp_path, make_model=tiny_llama, rules=ALL, **options):
    given = {key: options.pop(key) for key in ("optimizer", "optimizer_args", "trainer_args", "task") if key in options}
    given.setdefault("task", LlamaTask)
    strategy = on_ssd(tmp_path / "ssd", rules, **options)
    ours = train(make_model, strategy, steps=STEPS, **given)
    theirs = train(make_model, offload(stream_weights=True, **options), steps=STEPS, **given)
    assert_same(ours, theirs)
    return strategy


@pytest.mark.parametrize(
    ("rules", "dtype", "overlap"), every_pair([WEIGHTS, ALL], [torch.float32, torch.bfloat16], [False, True])
)
def test_training_is_that_of_weights_in_memory(tmp_path, rules, dtype, overlap):
    def make_model():
        return tiny_llama(hidden_size=64, intermediate_size=128).to(dtype)

    strategy = both(tmp_path, make_model, rules, overlap_step=overlap, on_overflow="ignore")
    assert strategy.report()["tiers"]["ssd"]["peak_bytes"] > 0
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]


KINDS = {
    "8bit": {"state": "8bit"},
    "float32 masters in memory": {"master": "fp32"},
    "float32 masters, not overlapped": {"master": "fp32", "overlap_step": False},
    "accumulated": {"trainer_args": {"accumulate_grad_batches": 3}, "on_overflow": "ignore"},
    "not pinned, clipped": {"pin_memory": False, "trainer_args": {"gradient_clip_val": 0.1}},
    "another optimizer": {"optimizer": "sgd"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_train_gives_the_same(tmp_path, kind):
    def make_model():
        return tiny_llama(4, hidden_size=64, intermediate_size=128).to(torch.bfloat16)

    if kind == "another optimizer":
        with pytest.warns(LightningCXLWarning, match=r"no weights lie on tier `ssd`: rule '\*' asks for ssd, and only"):
            both(tmp_path, make_model, WEIGHTS, **KINDS[kind])
    else:
        both(tmp_path, make_model, ALL, **KINDS[kind])


def test_weights_are_read_for_forward_backward_and_update_and_written_once(tmp_path):
    strategy = on_ssd(tmp_path, WEIGHTS, on_overflow="ignore")
    train(lambda: tiny_llama(6), strategy, steps=STEPS, task=LlamaTask)
    report = strategy.report()
    planned, moved = dict(report["planned_roles"]["compute_weights"]), report["ssd"]
    nbytes = planned.pop("ssd")
    assert moved["written_bytes_per_step"] == pytest.approx(nbytes, rel=0.35)
    # before forward, backward and update; of the six units, one or two are on the device still where it turns round
    assert 2 * nbytes < moved["read_bytes_per_step"] < 3.4 * nbytes
    assert report["peak_roles"].get("compute_weights", {}) == planned, "weights were in memory"


class Frozen(LlamaTask):
    """Trains the second half of its blocks, and in the first half one matrix of each."""

    def __init__(self, model, *args, **options):
        super().__init__(model, *args, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.2" in name or "layers.3" in name or "q_proj" in name)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def test_frozen_weights_are_never_written(tmp_path, monkeypatch):
    written = written_records(monkeypatch)
    both(tmp_path, lambda: tiny_llama(4), ALL, task=Frozen)
    frozen = sorted(name for name in written if "frozen" in name)
    assert frozen == [f"model.model.layers.{i} frozen weights" for i in (0, 1)]  # when they moved
    assert written.count("model.model.layers.0 weights") == written.count("model.model.layers.3 weights") == 1 + STEPS


def written_records(monkeypatch):
    """Return a list that gets the name of every record that is written."""
    names, write = [], Store.write

    def noted(store, record, memory):
        names.append(record.name)
        return write(store, record, memory)

    monkeypatch.setattr(Store, "write", noted)
    return names


@pytest.mark.parametrize(
    ("how", "overlap"), every_value(["unseen", "seen", "replaced"], ["none", "forward", "backward"])
)
def test_what_a_user_writes_between_steps_counts(tmp_path, overlap, how):
    class Clipped(LlamaTask):
        @torch.no_grad()
        def on_train_batch_end(self, *args):
            for parameter in self.parameters():
                if how == "replaced":
                    parameter.data = parameter.data * 0.9
                else:
                    (parameter.data if how == "unseen" else parameter).mul_(0.9)

    both(tmp_path, task=Clipped, **OVERLAPS[overlap])


OVERLAPS = {
    "none": {"overlap_step": False},
    "forward": {"overlap_step": True, "on_overflow": "skip"},
    "backward": {"overlap_step": True, "on_overflow": "ignore"},
}


@pytest.mark.parametrize("overlap", list(OVERLAPS))
def test_whoever_looks_between_steps_sees_the_weights_of_now(tmp_path, monkeypatch, overlap):
    monkeypatch.setattr(store, "System", SlowWrites)

    class Summed(LlamaTask):
        """Sums weights of the model, of the optimizer, or, where no update runs behind, those that it holds."""

        def on_train_start(self):
            self.held = list(self.parameters())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            (optimizer,) = self.trainer.optimizers
            looks = [self.parameters(), reversed([p for group in optimizer.param_groups for p in group["params"]])]
            if overlap == "none":
                looks.append(self.held)
            self.record_sums(looks[batch_idx % len(looks)])

    both(tmp_path, task=Summed, **OVERLAPS[overlap])


def test_weights_outlive_the_run_and_move_again(tmp_path):
    tasks = []
    for strategies in ([on_ssd(tmp_path), on_ssd(tmp_path)], [offload(stream_weights=True) for _ in range(2)]):
        seed_everything(11, verbose=False)
        task = LlamaTask(tiny_llama())
        for strategy in strategies:
            make_trainer(strategy, max_steps=3).fit(task, token_data())
            with torch.no_grad():
                for parameter in task.parameters():
                    parameter.mul_(0.9)
        tasks.append(task)
    ours, theirs = tasks
    assert_same((ours.losses, ours.state_dict()), (theirs.losses, theirs.state_dict()))


@pytest.mark.parametrize(
    ("checkpoint", "dtype"), [("copy", torch.float32), ("reference", torch.bfloat16)], ids=["copy", "reference"]
)
def test_a_run_resumes_exactly(tmp_path, checkpoint, dtype):
    def fit(strategy, steps, ckpt_path=None, save=None):
        seed_everything(11, verbose=False)
        task = LlamaInStep(tiny_llama().to(dtype))
        trainer = make_trainer(strategy, max_steps=steps)
        trainer.fit(task, token_data(), ckpt_path=ckpt_path)
        if save:
            trainer.save_checkpoint(save)
        return task

    options = {"ssd": {"checkpoint": checkpoint}}
    straight = fit(offload(stream_weights=True), 6)
    first = fit(on_ssd(tmp_path / "ssd", **options), 3, save=tmp_path / "saved.ckpt")
    second = fit(on_ssd(tmp_path / "ssd", **options), 6, ckpt_path=tmp_path / "saved.ckpt")
    assert_same((first.losses + second.losses, second.state_dict()), (straight.losses, straight.state_dict()))


@pytest.mark.parametrize(("fault", "overlap"), every_value(["EIO", "EIO for good", "flip", "late"], OVERLAPS))
def test_a_drive_that_fails_ends_the_run_with_its_error(tmp_path, monkeypatch, fault, overlap):
    def run(fault=None, at=-1):
        system = FaultyReads(fault, at) if fault == "flip" else FaultySystem(fault, at)
        monkeypatch.setattr(store, "System", lambda: system)
        strategy = on_ssd(tmp_path / "ssd", WEIGHTS, **OVERLAPS[overlap])
        return system, train(tiny_llama, strategy, steps=3, task=LlamaTask)

    system, theirs = run()
    calls = [name for name in system.calls if name == "preadv" or fault != "flip"]
    moves = [number for number, name in enumerate(calls) if name in ("preadv", "pwritev")]
    outcomes = set()
    for part in (0.2, 0.5, 0.8):
        try:
            _, ours = run(fault, moves[int(part * len(moves))])
        except StorageError as error:
            outcomes.add("error")
            assert error.errno == (errno.EIO if "EIO" in fault else None)
        else:
            outcomes.add("right")
            assert_same(ours, theirs)
    # what was read ahead in vain may fail
    assert outcomes == {"right"} if fault == "late" else "error" in outcomes
    assert "right" not in outcomes or fault != "EIO for good"


class FaultyReads(FaultySystem):
    """Reads wrong bytes. What is written wrongly is found when it is read: the last weights of a run may not be."""

    def _call(self, name, function, *args):
        return super()._call(name, function, *args) if name == "preadv" else function(*args)


@pytest.mark.on_cpu
def test_memory_does_not_grow_with_the_model(tmp_path):
    command = [sys.executable, "-m", "tests.integration.large_model_run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2, done.stderr
    small, large = found
    grown = large["peak"] - small["peak"]
    # weights, state and gradients would be four times as much as the weights; objects of Python are some 0.3 MB a block
    assert grown < 0.3 * (large["weights"] - small["weights"]), found


class SlowWrites(System):
    def pwritev(self, fd, views, offset):
        time.sleep(0.03)
        return super().pwritev(fd, views, offset)


def test_what_hooks_of_a_step_see_and_write_counts(tmp_path, monkeypatch):
    """Hooks that look before the step look again after it, while weights are still written."""

    class Hooked(LlamaTask):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            made["optimizer"].register_step_pre_hook(lambda *args: self.record_sums(self.parameters()))
            made["optimizer"].register_step_post_hook(self.after)
            return made

        @torch.no_grad()
        def after(self, *args):
            self.record_sums(self.parameters())
            for parameter in self.parameters():
                parameter.mul_(0.99)

    monkeypatch.setattr(store, "System", SlowWrites)
    both(tmp_path, lambda: tiny_llama(5), task=Hooked, **OVERLAPS["forward"])


def test_weights_of_an_earlier_run_are_not_overwritten_before_they_have_moved(tmp_path):
    """They lie in the file of the new run where that keeps a generation, and at other places there."""

    class Saved(LlamaTask):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if not (tmp_path / "saved.ckpt").exists():
                self.trainer.save_checkpoint(tmp_path / "saved.ckpt")

    state = {"*": {"optimizer_state": "ssd"}}
    fewer = {**state, "*layers.1": {"weights": "ssd"}, "*layers.2": {"weights": "ssd"}}
    tasks = []
    for make in (
        lambda rules: on_ssd(tmp_path / "ssd", rules, ssd={"checkpoint": "reference"}),
        lambda rules: offload(stream_weights=True),
    ):
        seed_everything(11, verbose=False)
        task = Saved(tiny_llama())
        for rules in (ALL, fewer, ALL):
            make_trainer(make(rules), max_steps=2).fit(task, token_data())
        tasks.append(task)
    ours, theirs = tasks
    assert_same((ours.losses, ours.state_dict()), (theirs.losses, theirs.state_dict()))


def test_damaged_weights_are_not_saved(tmp_path):
    class Damaged(LlamaTask):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                file = data_file(tmp_path / "ssd")
                contents = file.read_bytes()
                with open(file, "r+b") as in_place:  # a shorter file meanwhile would fail reads ahead in another way
                    in_place.write(bytes(byte ^ 1 for byte in contents))
                self.trainer.save_checkpoint(tmp_path / "saved.ckpt")

    with pytest.raises(StorageError, match="is damaged"):
        train(tiny_llama, on_ssd(tmp_path / "ssd", WEIGHTS), steps=3, task=Damaged)
    assert not (tmp_path / "saved.ckpt").exists()


def test_a_run_takes_the_bytes_that_were_planned(tmp_path, monkeypatch):
    records = planned_records(monkeypatch)
    paths = [str(tmp_path / f"ssd{drive}") for drive in range(3)]
    strategy = on_ssd(paths[0], ssd={"path": paths, "checkpoint": "reference"})
    seed_everything(11, verbose=False)
    make_trainer(strategy, max_steps=3, default_root_dir=str(tmp_path)).fit(
        SmallPartTrained(tiny_llama(4)), token_data()
    )
    report = strategy.report()
    ssd = MachineSsd(capacity_bytes=0, versions=2, num_drives=3)
    assert report["tiers"]["ssd"]["peak_bytes"] == sum(each.stored_bytes(ssd) for each in records)
    staging = report["planned_roles"]["staging"]
    assert sum(staging.values()) >= NUM_HOP_SLOTS * max(each.nbytes_on(3) for each in records)
    for tier, nbytes in report["peak_roles"]["staging"].items():
        assert nbytes <= staging[tier]


def planned_records(monkeypatch):
    """Return a list that gets the records of the next run."""
    planned: list[PlannedRecord] = []

    def noted(options, budget_bytes, records, *args):
        planned.extend(records)
        return StateOnSsd(options, budget_bytes, records, *args)

    monkeypatch.setattr(run, "StateOnSsd", noted)
    return planned


class SmallPartTrained(LlamaTask):
    """Trains little of each block, as adapters do, and saves while it trains."""

    def __init__(self, model, *args, **options):
        super().__init__(model, *args, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layernorm" in name)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    def on_train_batch_end(self, *args):
        self.trainer.save_checkpoint(self.trainer.default_root_dir + "/saved.ckpt")


def test_what_a_user_wrote_to_frozen_weights_is_written_once(tmp_path, monkeypatch):
    class Written(Frozen):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                with torch.no_grad():
                    for parameter in self.model.model.layers[0].parameters():
                        parameter.mul_(0.9)
            if batch_idx == 3:  # and nobody has looked since
                counts.append(written.count("model.model.layers.0 frozen weights"))

    written, counts = written_records(monkeypatch), []
    both(tmp_path, lambda: tiny_llama(4), ALL, task=Written)
    assert counts[0] == 2
