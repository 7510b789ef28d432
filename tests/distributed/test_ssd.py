import os
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_cxl.run.run import Run
from lightning_cxl.run.session import whole_state
from lightning_cxl.streaming.units import find_units
from tests import apart
from tests.cases import every_value, others_full
from tests.distributed import lightning_runs, training
from tests.distributed.ranks import of_rank_0
from tests.distributed.training import (
    Job,
    Training,
    assert_identical,
    assert_same,
    assert_same_weights,
    error_of,
    place,
)  # fmt: skip
from tests.storage_cases import damage
from tests.training_device import LATE

STATE = {"*": {"optimizer_state": "ssd", "activations": "ssd"}}
WEIGHTS = {"*": {"weights": "ssd"}}
ALL = {"*": {"weights": "ssd", "optimizer_state": "ssd", "activations": "ssd"}}
WIDE = {"hidden_size": 64, "intermediate_size": 256}
MIB = 1 << 20


def on_ssd(folder, rule=STATE, **options):
    return {"tiers": {"ssd": {"path": str(folder), "budget": 64 * MIB, **options}}, "tier_rules": rule}


def there(job, folder, rule=ALL):
    """Return a job with what a rule says on SSD."""
    return replace(job, options={**job.options, **on_ssd(folder / "ssd", rule)})


def of_two(ranks, *args):
    return ranks.of(2, "apart").run(*args)


def by_us(job):
    """Train with us, with inputs of units that are offloaded however small they are."""
    with mock.patch.object(Run, "min_activation_bytes", 1):
        return training.by_us(job)


LORA = Job(lora=True, clip=0.05)
UNEVEN = Job(model="transformer", tied=False, scalars=True, bf16=True, clip=0.1)
EIGHT_BIT = Job(options={"state": "8bit"}, sizes=WIDE)
JOBS = {
    "state, float32": (STATE, Job(micro_batches=2, clip=0.5)),
    "state, uneven shards, split masters": (STATE, UNEVEN),
    "state, 8 bit": (STATE, EIGHT_BIT),
    "state, lora": (STATE, LORA),
    "weights alone": (WEIGHTS, Job(micro_batches=2, clip=0.5, sizes={**WIDE, "num_hidden_layers": 6})),
    "all": (ALL, Job(micro_batches=2, clip=0.5)),
    "all, uneven shards, split masters": (ALL, UNEVEN),
    "weights, float32 masters": (WEIGHTS, Job(bf16=True, options={"master": "fp32"})),
    "all, 8 bit": (ALL, EIGHT_BIT),
    "weights, frozen": (WEIGHTS, LORA),
    "weights, reduced once": (WEIGHTS, Job(micro_batches=3, no_sync=True)),
}


def compare(ranks, folder, device, rule, job):
    """Train with what a rule puts on SSD, and in memory; return the reports of both ranks."""
    ours, theirs = (ranks.of(2, device).run(by_us, each) for each in (there(job, folder, rule), job))
    assert_same(ours, theirs)
    left = {name: os.listdir(folder / "ssd" / name) for name in os.listdir(folder / "ssd")}
    assert left == {"rank-0": ["lightning_cxl.lock"], "rank-1": ["lightning_cxl.lock"]}
    return [each.report for each in ours]


CASES = [
    *every_value([name for name, (rule, _) in JOBS.items() if rule is STATE], ["cpu", "apart"]),
    *((name, "apart") for name, (rule, _) in JOBS.items() if rule is not STATE),
]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "device"), others_full(CASES, [("state, float32", "cpu"), ("weights alone", "apart")])
)
def test_training_is_that_of_memory(ranks, tmp_path, device, name):
    rule, job = JOBS[name]
    for report in compare(ranks, tmp_path, device, rule, job):
        tier, planned = report["tiers"]["ssd"], dict(report["planned_roles"]["compute_weights"])
        assert tier["budget_bytes"] == 32 * MIB and 0 < tier["peak_bytes"] <= 32 * MIB
        if rule is not WEIGHTS:
            assert not {"momentum", "variance", "activations"} & report["peak_roles"].keys(), "they were in memory"
        if name == "weights alone":  # read for each forward and backward and the update, written once
            assert report["ssd"]["written_bytes_per_step"] == pytest.approx(planned["ssd"], rel=0.2)
            assert report["ssd"]["read_bytes_per_step"] == pytest.approx(5 * planned["ssd"], rel=0.2)
        if rule is not STATE:
            assert planned.pop("ssd") > 0
            assert planned == report["peak_roles"]["compute_weights"], "more of the weights was in memory"


@pytest.mark.parametrize(
    ("device", "role", "layers", "steps", "dram_mib"),
    [("cpu", "momentum", 8, 2, 28), pytest.param("apart", "compute_weights", 32, 1, 60, marks=pytest.mark.full)],
)
def test_what_memory_cannot_hold_goes_there(ranks, tmp_path, device, role, layers, steps, dram_mib):
    job = Job(sizes={"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": layers}, steps=steps)
    tiers = {"ssd": {"path": str(tmp_path), "budget": "1GiB"}, "dram": f"{dram_mib}MiB"}
    spilling = replace(job, options={"tiers": tiers, "on_tier_full": "error"})
    ours, theirs = (ranks.of(2, device).run(by_us, each) for each in (spilling, job))
    assert_same(ours, theirs)
    for mine in ours:
        assert "ssd" in mine.report["planned_roles"][role]
        assert mine.report["tiers"]["dram"]["peak_bytes"] <= dram_mib // 2 * MIB


STATES = {"bf16 with split masters": ({"precision": "bf16-true"}, {}), "8 bit": ({}, {"state": "8bit"})}


@pytest.mark.parametrize("before, after, state", [(1, 2, "8 bit"), (2, 1, "8 bit"), (2, 2, "bf16 with split masters")])
def test_checkpoints_go_on_in_any_number_of_processes(ranks, tmp_path, before, after, state):
    trainer, options = STATES[state]
    there, path = {**options, **on_ssd(tmp_path / "ssd")}, [str(tmp_path / each) for each in ("ssd.ckpt", "ram.ckpt")]
    fit = partial(of_rank_0, ranks, train=lightning_runs.fit, trainer=trainer)
    fit(before, steps=3, options=there, save=path[0])
    fit(before, steps=3, options=options, save=path[1])
    rest = fit(after, steps=6, options=there, resume=path[0])
    assert_identical(rest, fit(after, steps=6, options=options, resume=path[1]))


def save_damaged_state(folder, path):
    """Return the error of a save by Lightning after the drive of rank 1 was damaged."""

    class Damages(Callback):
        def on_train_batch_end(self, trainer, *_):
            _ = trainer.optimizers[0].state  # waits for the writes
            if place()[0] == 1:
                damage(folder / "ssd" / "rank-1")
            errors.append(error_of(lambda: trainer.save_checkpoint(path)))

    errors = []
    lightning_runs.fit(1, options=on_ssd(folder / "ssd"), callback=Damages())
    return errors[0]


def save_damaged_weights(folder, path):
    """The same in a loop of the user's own."""
    with Training(there(Job(), folder, WEIGHTS)) as ours:
        ours.steps(0, 1)
        if ours.rank == 1:
            damage(folder / "ssd" / "rank-1")
        return error_of(lambda: ours.loop.save_folder(path, ours.model, [ours.optimizer]))


@pytest.mark.every_case
@pytest.mark.parametrize(("act", "device"), [(save_damaged_state, "cpu"), (save_damaged_weights, "apart")])
def test_what_is_damaged_on_one_rank_is_not_saved(ranks, tmp_path, act, device):
    path = tmp_path / "it.ckpt"
    for error in ranks.of(2, device).run(act, tmp_path, path):
        assert error.startswith("StorageError: rank 1 of the group: ") and "is damaged" in error, error
    assert not path.exists()


def refusal(options):
    return error_of(lambda: lightning_runs.fit(1, options=options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "reference"}, "checkpoint='reference' of tier 'ssd' serves one process"),
        ({"rule": WEIGHTS}, "a CPU gathers them from memory"),
    ],
)
def test_what_needs_one_process_is_refused(ranks, tmp_path, options, message):
    for found in ranks.of(2).run(refusal, on_ssd(tmp_path / "ssd", **options)):
        assert found.startswith("UnsupportedError") and message in found, found


def evaluated(ours):
    """Return a loss without gradients."""
    with torch.no_grad():
        return float(training.loss_of(ours.model, ours.first()))


def save_and_resume(job, resumed, path):
    """Save after two steps and go on in another training; return its losses and weights."""
    with Training(job) as first:
        first.steps(0, 2)
        first.loop.save_folder(path, first.model, [first.optimizer])
        first.steps(2, 3)
    with Training(resumed) as second:
        second.loop.load_folder(path, second.model, {0: second.optimizer}, strict=True)
        return second.steps(2, 4), second.whole()


def evaluated_and_written(job):
    """Evaluate, write weights and look at them between steps; return what was seen, also after the end."""
    with Training(job) as ours:
        model, found = ours.model, {}
        found["before"] = evaluated(ours)
        found["losses"] = ours.steps(0, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        found["evaluated"] = evaluated(ours)
        found["losses"] += ours.steps(1, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.add_(0.01)
        found["losses"] += ours.steps(2, 3)
        nn.init.normal_(next(find_units(model)[0][1].parameters()))
        torch.manual_seed(3)
        found["losses"] += ours.steps(3, 4)
        found["whole"] = whole_state(model)
        num_steps = ours.session.runs[0].guard.num_steps
        ours.session.runs[0].close()
        found["closed"] = evaluated(ours)
    return {**found, "num_steps": num_steps, "after": whole_state(model)}


def late(job, delays):
    """Train while copies or kernels are late."""
    apart.set_delay(**delays)
    return training.by_us(job)


@pytest.mark.parametrize("delays", ["copies and kernels", "to the device, much", "to the host, much"])
def test_nothing_overtakes_a_late_copy_or_kernel(ranks, tmp_path, delays):
    job = Job(sizes={"num_hidden_layers": 4})
    assert_same(of_two(ranks, late, there(job, tmp_path), LATE[delays]), of_two(ranks, by_us, job))


@pytest.mark.parametrize("saved, resumed", [(True, True), (True, False), (False, True)])
def test_a_run_resumes_exactly(ranks, tmp_path, saved, resumed):
    job = Job(bf16=True, micro_batches=2)
    on_drives = there(job, tmp_path)
    before, after = (on_drives if each else job for each in (saved, resumed))
    ours = of_two(ranks, save_and_resume, before, after, tmp_path / "ours.ckpt")
    theirs = of_two(ranks, save_and_resume, job, job, tmp_path / "theirs.ckpt")
    for (losses, weights), (wanted, wanted_weights) in zip(ours, theirs, strict=True):
        assert losses == wanted
        assert_same_weights(weights, wanted_weights)


def test_who_looks_and_writes_between_steps_sees_the_weights_of_now(ranks, tmp_path):
    job = Job(sizes={"num_hidden_layers": 3})
    ours, theirs = (of_two(ranks, evaluated_and_written, each) for each in (there(job, tmp_path), job))
    for mine, reference in zip(ours, theirs, strict=True):
        for kind in ("whole", "after"):
            assert_same_weights(mine.pop(kind), reference.pop(kind))
        assert mine == reference
