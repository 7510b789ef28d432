"""Nothing stays behind: memory, file descriptors, mappings, threads, hooks; after success, exceptions and Ctrl-C."""

import contextlib
import gc
import os
import threading
import weakref
from pathlib import Path

import psutil
import pytest
import torch

from lightning_cxl.run.run import Run
from lightning_cxl.run.state_on_ssd import KEY
from tests import training_device
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data


class Failing(Task):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def big_model():
    return TinyTransformer(width=256, depth=4, vocab=1000)  # 3.7 M parameters: 59 MB of host state


def cycle(task, precision="32-true"):
    trainer = make_trainer("cxl_offload", max_steps=2, precision=precision)
    with contextlib.suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(task(big_model()), token_data())
    assert trainer.global_step == (1 if task is Failing else 2)
    del trainer
    gc.collect()


def resources():
    process = psutil.Process()
    return {
        "rss": process.memory_info().rss,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": threading.active_count(),
        "on the device": training_device.held(),
    }


@pytest.mark.parametrize(("task", "precision"), [(Failing, "32-true"), (Task, "bf16-true")])
def test_ten_cycles_leak_nothing(task, precision):
    for _ in range(3):
        cycle(task, precision)
    before = resources()
    for _ in range(10):
        cycle(task, precision)
    after = resources()
    assert after["on the device"] == before["on the device"], "with what is page-locked for it"
    assert after["threads"] <= before["threads"]
    if training_device.current.type != "cuda":  # its driver loads kernels and maps memory when it likes
        assert after["rss"] - before["rss"] < 16 * 2**20, "a fourth of what one run holds"
        assert after["descriptors"] <= before["descriptors"]
        assert after["mappings"] - before["mappings"] <= 6, "allocator noise, not one per cycle"


@pytest.mark.on_cpu
def test_what_the_run_held_goes_back_at_teardown():
    module, memories = Task(big_model()), []
    module.on_train_end = lambda: memories.append(module.trainer.strategy.host.memory)
    make_trainer(offload(tiers={"cxl": "1GiB"}), max_steps=2).fit(module, token_data())
    gc.collect()
    roles = memories[0].stats()["roles"]
    weights = sum(p.numel() * 4 for p in module.parameters())
    assert roles["compute_weights"]["dram"] == weights, "the model is the user's"
    assert roles["momentum"]["dram"] == weights, "so is the optimizer"
    assert roles["compute_grads"]["dram"] == 0 and roles["activations"]["cxl"] == 0
    module.trainer = None  # the last that holds the Trainer and its optimizers
    gc.collect()
    assert memories[0].stats()["roles"]["momentum"]["dram"] == 0


@pytest.mark.on_cpu
def test_masters_of_a_run_are_gone_while_the_next_one_trains():
    alive = []

    class Looking(Task):
        def on_train_start(self):
            gc.collect()
            alive.append(sum(each() is not None for each in masters))

    masters: list = []
    strategy = offload()
    trainer = make_trainer(strategy, max_steps=1, precision="bf16-true")
    module = Looking(TinyTransformer(), "sgd")
    trainer.fit(module, token_data())
    masters = [weakref.ref(pair.master) for pair in strategy._session._finished.masters if not pair.is_shared]
    assert masters
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, token_data())
    assert alive[-1] == 0


@pytest.mark.on_cpu
def test_a_checkpoint_after_a_teardown_that_raised_has_the_masters_of_that_run(tmp_path, monkeypatch):
    def close(self, **options):
        plain(self, **options)
        raise RuntimeError("the last update has failed")

    plain = Run.close
    strategy = offload()
    trainer = make_trainer(strategy, max_steps=1, precision="bf16-true")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "close", close)
        with pytest.raises(RuntimeError, match="the last update has failed"):
            trainer.fit(Task(TinyTransformer(), "sgd"), token_data())
    assert strategy.report()["state"] == "finished"
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    own = torch.load(tmp_path / "after.ckpt", weights_only=True)[KEY]
    assert own["master_weights"].keys() == {name for name, _ in trainer.lightning_module.named_parameters()}
