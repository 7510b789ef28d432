"""Inputs of units on SSD: training is that of inputs in memory, bit for bit, in every way to train."""

import errno
import os

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cxl.errors import SpillWarning, StorageError, TierFullError
from lightning_cxl.storage import store
from tests.cases import every_pair
from tests.faulty_system import FaultySystem
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import assert_identical as assert_same
from tests.integration.training import make_trainer, offload, train
from tests.models import Task, TinyConvNet, TinyTransformer, image_data, token_data

INPUTS = {"*": {"activations": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd", "activations": "ssd"}}
STEPS = 6


def on_ssd(folder, rules=INPUTS, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(**{"tiers": {"ssd": ssd}, "tier_rules": rules, **options})


GIVEN = ("optimizer", "optimizer_args", "trainer_args", "task", "data")


def both(tmp_path, make_model=tiny_llama, rules=INPUTS, **options):
    given = {key: options.pop(key) for key in GIVEN if key in options}
    given.setdefault("task", LlamaTask)
    strategy = on_ssd(tmp_path / "ssd", rules, **options)
    ours = train(make_model, strategy, steps=STEPS, **given)
    options.pop("ssd", None)
    theirs = train(make_model, offload(**options), steps=STEPS, **given)
    assert_same(ours, theirs)
    assert "activations" not in strategy.report()["peak_roles"]
    return strategy


@pytest.mark.parametrize(
    ("rules", "dtype", "stream"), every_pair([INPUTS, ALL], [torch.float32, torch.bfloat16], [False, True])
)
def test_training_is_that_of_inputs_in_memory(tmp_path, rules, dtype, stream):
    if not stream:
        rules = {"*": {field: tier for field, tier in rules["*"].items() if field != "weights"}}
    strategy = both(tmp_path, lambda: tiny_llama(4).to(dtype), rules, stream_weights=stream, on_overflow="ignore")
    assert strategy.report()["tiers"]["ssd"]["peak_bytes"] > 0
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]


class Evaluated(LlamaTask):
    def validation_step(self, batch, batch_idx):
        self.record(self.loss(batch))

    def val_dataloader(self):
        return token_data(2)


class TwoBackwards(LlamaTask):
    """Goes back through every graph twice, and drops another one."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch)
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()
        self.record(loss)


WAYS = {
    "accumulated": {"trainer_args": {"accumulate_grad_batches": 3}},
    "evaluated": {"trainer_args": {"val_check_interval": 2, "limit_val_batches": 2}, "task": Evaluated},
    "two backwards": {"task": TwoBackwards},
    "not pinned": {"pin_memory": False},
    "mixed precision": {"trainer_args": {"precision": "bf16-mixed"}},
    "generations": {"ssd": {"checkpoint": "reference"}, "rules": ALL, "stream_weights": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_gives_the_same(tmp_path, way):
    both(tmp_path, **WAYS[way])


MODELS = {
    "dropout": {"make_model": TinyTransformer, "task": Task},
    "a unit that is called twice": {"make_model": lambda: TinyTransformer(twice=True), "task": Task},
    "units that change their inputs": {"make_model": TinyConvNet, "task": Task, "data": image_data},
}


@pytest.mark.parametrize("model", MODELS)
def test_all_kinds_of_units_give_the_same(tmp_path, model):
    both(tmp_path, **MODELS[model])


class Differentiated(Task):
    """Looks for the gradients of inputs without an optimizer."""

    def test_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = self.loss(batch)
            loss.backward()
        self.record(loss)

    def test_dataloader(self):
        return token_data(2)


def test_evaluation_with_gradients_has_its_inputs_in_memory(tmp_path):
    module = Differentiated(TinyTransformer(), "adamw")
    strategy = on_ssd(tmp_path, stream_weights=False)
    make_trainer(strategy, inference_mode=False).test(module, token_data(2), verbose=False)
    assert len(module.losses) == 2 and not list(tmp_path.iterdir())


def tiny_four():
    return tiny_llama(4)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_report_says_what_a_step_moves(tmp_path, accumulate):
    strategy = on_ssd(tmp_path)
    train(tiny_four, strategy, steps=STEPS, task=LlamaTask, trainer_args={"accumulate_grad_batches": accumulate})
    moved = strategy.report()["ssd"]
    blocks = accumulate * 4 * 4096  # each input takes one block of the drive
    assert moved["num_steps"] >= STEPS - 2
    assert 0.7 * blocks <= moved["written_bytes_per_step"] <= 1.05 * blocks
    assert 0.5 * blocks <= moved["read_bytes_per_step"] <= 1.05 * blocks  # of the last unit there is no need


@pytest.mark.parametrize("on_tier_full", ["spill", "error"])
def test_larger_batches_than_planned_take_more_and_stay_in_memory_where_there_is_no_more(tmp_path, on_tier_full):
    def data():
        batches = [*token_data(2, batch=2), *token_data(4, batch=6)]  # an input has 3 KiB, then 9 KiB
        return DataLoader(batches, batch_size=None)

    def run(strategy):
        return train(tiny_four, strategy, steps=STEPS, task=LlamaTask, data=data)

    theirs = run(offload())
    assert_same(run(on_ssd(tmp_path, batch_tokens=24)), theirs)
    few = on_ssd(tmp_path, batch_tokens=24, ssd={"budget": 7 * 4096}, on_tier_full=on_tier_full)
    if on_tier_full == "error":
        with pytest.raises(TierFullError, match="inputs of units"):
            run(few)
        return
    with pytest.warns(SpillWarning, match="stays in memory, and others may: tier `ssd` is full"):
        assert_same(run(few), theirs)
    assert few.report()["peak_roles"]["activations"]["dram"] == 2 * 9 * 1024  # two of four have room


@pytest.mark.parametrize("fault", ["EIO", "EIO for good", "flip", "short", "late", "behind the next"])
def test_a_drive_that_fails_ends_the_run_with_its_error(tmp_path, monkeypatch, fault):
    def run(fault=None, at=-1):
        system = FaultySystem(fault, at)
        monkeypatch.setattr(store, "System", lambda: system)
        return system, train(tiny_four, on_ssd(tmp_path / "ssd"), steps=3, task=LlamaTask)

    system, theirs = run()
    moves = [number for number, name in enumerate(system.calls) if name in ("preadv", "pwritev")]
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
    if fault in ("short", "late", "behind the next"):
        assert outcomes == {"right"}
    else:
        assert "error" in outcomes  # what nobody needs may fail
    assert "right" not in outcomes or fault != "EIO for good"


def test_inputs_that_memory_cannot_hold_go_there_by_themselves(tmp_path):
    """With state there already: the inputs of the first units, and no more than needed."""

    def run(strategy):
        return train(lambda: tiny_llama(6), strategy, steps=STEPS, task=LlamaTask, data=large_batches)

    def with_memory(dram, **ssd):
        return offload(tiers={"dram": dram, **ssd}, stream_weights=True, batch_tokens=16 * 64)

    everything = offload(stream_weights=True, batch_tokens=16 * 64, tiers={"dram": "1GiB"})
    theirs = run(everything)
    peak = everything.report()["tiers"]["dram"]["peak_bytes"]
    ssd = {"ssd": {"path": str(tmp_path), "budget": "64MiB"}}
    strategy = with_memory(peak * 9 // 10, **ssd)
    assert_same(run(strategy), theirs)
    report = strategy.report()
    activations = report["planned_roles"]["activations"]
    assert 0 < activations["ssd"] < 6 * 16 * 64 * 32 * 4
    assert report["tiers"]["dram"]["peak_bytes"] <= peak * 9 // 10


def large_batches():
    return token_data(batch=16, length=64)


def test_memory_of_inputs_does_not_grow_with_the_number_of_units(tmp_path):
    peaks = []
    for depth in (3, 12):
        strategy = on_ssd(tmp_path, batch_tokens=16 * 64)
        train(lambda depth=depth: tiny_llama(depth), strategy, steps=2, task=LlamaTask, data=large_batches)
        peaks.append(strategy.report()["peak_roles"]["staging"]["dram"])
        assert "activations" not in strategy.report()["peak_roles"]
    assert peaks[0] == peaks[1]
