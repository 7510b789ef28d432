"""State, weights and inputs of units on SSD: training is that of memory, bit for bit, in every way to train."""

import errno
import gc
import json
import os
import time
import warnings
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_cxl import empty_weights, load_weights, save_weights
from lightning_cxl.errors import SpillWarning, StorageError, TierFullError
from lightning_cxl.memory.host_memory import HeapTrimmer
from lightning_cxl.run.session import format_report
from lightning_cxl.storage import store
from lightning_cxl.storage.drive import System
from tests.cases import every_pair, every_value, others_full
from tests.faulty_system import FaultySystem
from tests.integration.llama import LlamaTask, tiny_llama
from tests.integration.training import assert_identical as assert_same
from tests.integration.training import make_trainer, offload, run, train
from tests.integration.weight_memory import Peak
from tests.models import Task, TinyConvNet, TinyTransformer, image_data, token_data
from tests.processes import in_a_process

STATE, WEIGHTS, INPUTS = ({"*": {role: "ssd"}} for role in ("optimizer_state", "weights", "activations"))
BOTH = {"*": {"weights": "ssd", "optimizer_state": "ssd"}}
ALL = {"*": {**BOTH["*"], "activations": "ssd"}}
STEPS = 4
MORE_STEPS = 6  # of which bytes of a step are the mean
OVERLAPS = {
    "none": {"overlap_step": False},
    "forward": {"overlap_step": True, "on_overflow": "skip"},
    "backward": {"overlap_step": True, "on_overflow": "ignore"},
}
GIVEN = ("optimizer", "optimizer_args", "trainer_args", "task", "data")


def on_ssd(folder, rules=BOTH, **options):
    ssd = {"path": str(folder), "budget": "64MiB", **options.pop("ssd", {})}
    return offload(**{"tiers": {"ssd": ssd}, "tier_rules": rules, "stream_weights": True, **options})


def both(tmp_path, make_model=tiny_llama, rules=BOTH, **options):
    """Train with tensors on SSD, and in memory; returns the first run's strategy."""
    given = {"task": LlamaTask, **{key: options.pop(key) for key in GIVEN if key in options}}
    strategy = on_ssd(tmp_path / "ssd", rules, **options)
    ours = train(make_model, strategy, steps=STEPS, **given)
    options.pop("ssd", None)
    assert_same(ours, train(make_model, offload(**{"stream_weights": True, **options}), steps=STEPS, **given))
    assert "activations" not in rules["*"] or "activations" not in strategy.report()["peak_roles"]
    return strategy


def bfloat16_four():
    return tiny_llama(4, hidden_size=64, intermediate_size=128).to(torch.bfloat16)


def tiny_four():
    return tiny_llama(4)


CASES = every_pair(
    [STATE, WEIGHTS, BOTH, INPUTS, ALL], ["fp32", "bf16", "8bit"], [torch.float32, torch.bfloat16],
    ["stays", *OVERLAPS],
    where=lambda rules, state, dtype, overlap: overlap != "stays" or "weights" not in rules["*"],
)  # fmt: skip


FIRST = [next(case for case in CASES if case[0] is rules) for rules in (STATE, BOTH, ALL)]


@pytest.mark.every_case
@pytest.mark.parametrize(("rules", "state", "dtype", "overlap"), others_full(CASES, FIRST), ids=str)
def test_training_is_that_of_memory(tmp_path, rules, state, dtype, overlap):
    def make_model():
        return tiny_llama(hidden_size=64, intermediate_size=128).to(dtype)

    options = {"stream_weights": False} if overlap == "stays" else OVERLAPS[overlap]
    report = both(tmp_path, make_model, rules, state=state, **options).report()
    assert report["tiers"]["ssd"]["peak_bytes"] > 0
    if "optimizer_state" in rules["*"]:
        assert not {"momentum", "variance"} & report["peak_roles"].keys(), "state was in memory"
    assert os.listdir(tmp_path / "ssd") == ["lightning_cxl.lock"]


NARROW, OF_INPUTS, PLAIN = {"make_model": bfloat16_four}, {"rules": INPUTS}, {"task": Task}
WAYS = {
    "float32 masters in memory": NARROW | {"master": "fp32"},
    "float32 masters, not overlapped": NARROW | {"master": "fp32", "overlap_step": False},
    "accumulated": NARROW | {"trainer_args": {"accumulate_grad_batches": 3}, "on_overflow": "ignore"},
    "not pinned, clipped": NARROW | {"pin_memory": False, "trainer_args": {"gradient_clip_val": 0.1}},
    "inputs, accumulated": OF_INPUTS | {"trainer_args": {"accumulate_grad_batches": 3}},
    "inputs, not pinned": OF_INPUTS | {"pin_memory": False},
    "inputs, mixed precision": OF_INPUTS | {"trainer_args": {"precision": "bf16-mixed"}},
    "generations": {"ssd": {"checkpoint": "reference"}, "rules": ALL},
    "inputs, dropout": OF_INPUTS | PLAIN | {"make_model": TinyTransformer},
    "inputs, a unit that is called twice": OF_INPUTS | PLAIN | {"make_model": lambda: TinyTransformer(twice=True)},
    "inputs, units that change theirs": OF_INPUTS | PLAIN | {"make_model": TinyConvNet, "data": image_data},
}


@pytest.mark.every_case
@pytest.mark.parametrize("way", others_full(WAYS, ["accumulated", "inputs, accumulated", "inputs, dropout"]))
def test_every_way_to_train_gives_the_same(tmp_path, way):
    both(tmp_path, **WAYS[way])


# -- what users read and write between steps ---------------------------------------------------------------------------


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


class SlowWrites(System):
    def pwritev(self, fd, views, offset):
        time.sleep(0.03)
        return super().pwritev(fd, views, offset)


@pytest.mark.parametrize("overlap", OVERLAPS)
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


class Frozen(LlamaTask):
    """Trains the second half of its blocks, and in the first half one matrix of each; writes to frozen ones once."""

    def __init__(self, model, *args, **options):
        super().__init__(model, *args, **options)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(part in name for part in ("layers.2", "layers.3", "q_proj")))

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def test_frozen_weights_are_written_only_where_a_user_has_written(tmp_path, written):
    class Written(Frozen):
        @torch.no_grad()
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1:
                for parameter in self.model.model.layers[0].parameters():
                    parameter.mul_(0.9)
            if batch_idx == 3:  # and nobody has looked since
                counts.append(written.count("model.model.layers.0 frozen weights"))

    counts = []
    both(tmp_path, tiny_four, task=Written)
    assert counts[0] == 2  # when they moved, and once more
    assert written.count("model.model.layers.1 frozen weights") == 1
    assert not [name for name in written if "frozen" in name and ("layers.2" in name or "layers.3" in name)]
    assert written.count("model.model.layers.3 weights") == 1 + STEPS


# -- several runs ------------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize("checkpoint", ["copy", "reference"])
def test_weights_outlive_the_run_and_move_again(tmp_path, checkpoint):
    """Where the file keeps a generation they lie in that of the new run, at places not written before."""

    class Saved(LlamaTask):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if not (tmp_path / "saved.ckpt").exists():
                self.trainer.save_checkpoint(tmp_path / "saved.ckpt")

    fewer = {**STATE, "*layers.1": {"weights": "ssd"}, "*layers.2": {"weights": "ssd"}}
    tasks = []
    for make in (
        lambda rules: on_ssd(tmp_path / "ssd", rules, ssd={"checkpoint": checkpoint}),
        lambda rules: offload(stream_weights=True),
    ):
        tasks.append(Saved(tiny_llama()))
        for rules in (BOTH, BOTH, fewer, BOTH):
            run(make(rules), tasks[-1], 2)
            with torch.no_grad():
                for parameter in tasks[-1].parameters():
                    parameter.mul_(0.9)
    ours, theirs = tasks
    assert_same((ours.losses, ours.state_dict()), (theirs.losses, theirs.state_dict()))


# -- drives that fail --------------------------------------------------------------------------------------------------

SURVIVABLE = ("short", "late", "behind the next")
FAULTS = [
    *((INPUTS, fault, None) for fault in ("EIO", "EIO for good", "flip", *SURVIVABLE)),
    *((WEIGHTS, fault, overlap) for fault, overlap in every_value(["EIO", "EIO for good", "flip", "late"], OVERLAPS)),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("rules", "fault", "overlap"), others_full(FAULTS, [FAULTS[0], FAULTS[6]]), ids=str)
def test_a_drive_that_fails_ends_the_run_with_its_error(tmp_path, monkeypatch, rules, fault, overlap):
    # what is written wrongly is found when it is read: the last weights of a run may not be
    of_reads = rules is WEIGHTS and fault == "flip"
    options = OVERLAPS.get(overlap, {})

    def trained(fault=None, at=-1):
        system = FaultyReads(fault, at) if of_reads else FaultySystem(fault, at)
        monkeypatch.setattr(store, "System", lambda: system)
        return system, train(tiny_four, on_ssd(tmp_path / "ssd", rules, **options), steps=3, task=LlamaTask)

    system, theirs = trained()
    calls = [name for name in system.calls if name == "preadv" or not of_reads]
    moves = [number for number, name in enumerate(calls) if name in ("preadv", "pwritev")]
    outcomes = set()
    for part in (0.2, 0.5, 0.8):
        try:
            _, ours = trained(fault, moves[int(part * len(moves))])
        except StorageError as error:
            outcomes.add("error")
            assert error.errno == (errno.EIO if "EIO" in fault else None)
        else:
            outcomes.add("right")
            assert_same(ours, theirs)
    # what was read ahead in vain may fail
    assert outcomes == {"right"} if fault in SURVIVABLE else "error" in outcomes
    assert "right" not in outcomes or fault != "EIO for good"


class FaultyReads(FaultySystem):
    def _call(self, name, function, *args):
        return super()._call(name, function, *args) if name == "preadv" else function(*args)


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_weights_are_read_for_forward_backward_and_update_and_written_once(tmp_path):
    strategy = on_ssd(tmp_path, WEIGHTS, on_overflow="ignore")
    train(lambda: tiny_llama(6), strategy, steps=MORE_STEPS, task=LlamaTask)
    report = strategy.report()
    planned, moved = dict(report["planned_roles"]["compute_weights"]), report["ssd"]
    nbytes = planned.pop("ssd")
    assert moved["written_bytes_per_step"] == pytest.approx(nbytes, rel=0.35)
    # before forward, backward and update; of the six units, one or two are on the device still where it turns round
    assert 2 * nbytes < moved["read_bytes_per_step"] < 3.4 * nbytes
    assert report["peak_roles"].get("compute_weights", {}) == planned, "weights were in memory"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_inputs_are_written_and_read_once_a_micro_batch(tmp_path, accumulate):
    strategy = on_ssd(tmp_path, INPUTS)
    train(tiny_four, strategy, steps=MORE_STEPS, task=LlamaTask, trainer_args={"accumulate_grad_batches": accumulate})
    moved = strategy.report()["ssd"]
    blocks = accumulate * 4 * 4096  # each input takes one block of the drive
    assert moved["num_steps"] >= MORE_STEPS - 2
    assert 0.7 * blocks <= moved["written_bytes_per_step"] <= 1.05 * blocks
    assert 0.5 * blocks <= moved["read_bytes_per_step"] <= 1.05 * blocks  # of the last unit there is no need


def trained_from_a_file(folder, depth):
    """Train a model whose weights are the pages of a file; return their bytes, and what memory it took besides."""
    torch.manual_seed(0)
    path = folder / f"{depth}.safetensors"
    save_weights(TinyTransformer(depth=depth, width=256), path)
    with empty_weights():
        model = TinyTransformer(depth=depth, width=256)
    load_weights(model, path, mapped=True)
    strategy = on_ssd(folder / "ssd", ssd={"budget": "1GiB"}, overlap_step=True, on_overflow="ignore")
    gc.collect()
    HeapTrimmer().trim_now()  # so that nothing of before is counted, or given back meanwhile
    with Peak() as peak:
        make_trainer(strategy, max_steps=3).fit(Task(model), token_data())
        for parameter in model.parameters():  # whoever looks sees all of it
            float(parameter.detach().sum())
    return sum(parameter.nbytes for parameter in model.blocks.parameters()), peak.peak - peak.start


def bytes_of_weights_and_peaks(folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trained_from_a_file(folder, 2)  # what is imported and allocated once
    return [trained_from_a_file(folder, depth) for depth in (3, 9)]


@pytest.mark.on_cpu
def test_memory_does_not_grow_with_the_model(tmp_path):
    small, large = in_a_process(bytes_of_weights_and_peaks, tmp_path)
    # weights, state and gradients would be four times as much as the weights; objects of Python are some 0.3 MB a block
    assert large[1] - small[1] < 0.3 * (large[0] - small[0]), (small, large)


@pytest.mark.parametrize("on_tier_full", ["spill", "error"])
def test_larger_batches_than_planned_take_more_and_stay_in_memory_where_there_is_no_more(tmp_path, on_tier_full):
    def data():
        batches = [*token_data(2, batch=2), *token_data(4, batch=6)]  # an input has 3 KiB, then 9 KiB
        return DataLoader(batches, batch_size=None)

    def trained(strategy):
        return train(tiny_four, strategy, steps=MORE_STEPS, task=LlamaTask, data=data)

    options = {"batch_tokens": 24}
    theirs = trained({})
    assert_same(trained(on_ssd(tmp_path, INPUTS, **options)), theirs)
    few = on_ssd(tmp_path, INPUTS, ssd={"budget": 7 * 4096}, on_tier_full=on_tier_full, **options)
    if on_tier_full == "error":
        with pytest.raises(TierFullError, match="inputs of units"):
            trained(few)
        return
    with pytest.warns(SpillWarning, match="stays in memory, and others may: tier `ssd` is full"):
        assert_same(trained(few), theirs)
    assert few.report()["peak_roles"]["activations"]["dram"] == 2 * 9 * 1024  # two of four have room


@pytest.mark.on_cpu
def test_a_run_that_does_not_fit_in_memory_trains_as_one_that_does(tmp_path):
    def model():
        return tiny_llama(6, hidden_size=64, intermediate_size=128)

    free = offload(stream_weights=True)
    theirs = train(model, free, steps=6, task=LlamaTask)
    roles = free.report()["planned_roles"]
    activations = free.report()["peak_roles"]["activations"]
    needed = sum(sum(tiers.values()) for tiers in [*roles.values(), activations])
    ssd = {"path": str(tmp_path / "ssd"), "budget": "64MiB"}
    strategy = offload(stream_weights=True, tiers={"dram": needed, "ssd": ssd}, on_tier_full="error")
    ours = train(model, strategy, steps=6, task=LlamaTask)
    assert ours[0] == theirs[0]
    report = json.loads(json.dumps(strategy.report()))
    moments = report["planned_roles"]["momentum"]
    assert 0 < moments["ssd"] < roles["momentum"]["dram"] == sum(moments.values())
    assert report["tiers"]["ssd"]["used_bytes"] >= 2 * moments["ssd"]
    # a step reads and writes all of it once; the report may be made before the last write
    assert report["ssd"]["num_steps"] == pytest.approx(4, abs=1)
    assert report["ssd"]["written_bytes_per_step"] == pytest.approx(report["tiers"]["ssd"]["used_bytes"], rel=0.3)
    assert report["ssd"]["step_seconds"] > 0
    text = format_report(report)
    assert "GB read and" in text and "streamed weights" in text


def test_inputs_that_memory_cannot_hold_go_there_by_themselves(tmp_path):
    """With state there already: the inputs of the first units, and no more than needed."""

    def trained(dram, **ssd):
        strategy = offload(tiers={"dram": dram, **ssd}, stream_weights=True, batch_tokens=16 * 64)
        data = partial(token_data, batch=16, length=64)
        result = train(lambda: tiny_llama(6), strategy, steps=MORE_STEPS, task=LlamaTask, data=data)
        return result, strategy.report()

    theirs, report = trained("1GiB")
    peak = report["tiers"]["dram"]["peak_bytes"]
    ours, report = trained(peak * 9 // 10, ssd={"path": str(tmp_path), "budget": "64MiB"})
    assert_same(ours, theirs)
    assert 0 < report["planned_roles"]["activations"]["ssd"] < 6 * 16 * 64 * 32 * 4
    assert report["tiers"]["dram"]["peak_bytes"] <= peak * 9 // 10
