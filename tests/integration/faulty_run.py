"""Short training runs with state on SSD in which one system call goes wrong: each fault at each call, and the outcome.

    python -m tests.integration.faulty_run FOLDER [--schedule overlap] [--resumed] [--faults EIO flip] [--every 1]

Prints a table. A run may end as if nothing had been, bit for bit, or with an error of ours that says where. Afterwards
its newest checkpoint is resumed without faults: again the same, or an error if the fault has damaged the file itself.
"""

import argparse
import collections
import errno
import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from lightning.pytorch import Callback, seed_everything

from lightning_cxl.errors import CheckpointError, ConfigError, LightningCXLError, StorageError, TierFullError
from lightning_cxl.storage import store
from tests import training_device
from tests.faulty_system import FAULTS, FaultySystem
from tests.integration.llama import LlamaInStep, tiny_llama
from tests.integration.training import make_trainer, offload
from tests.models import token_data

SCHEDULES = {"whole": {}, "overlap": {"stream_weights": True, "overlap_step": True, "on_overflow": "ignore"}}
STEPS, MORE_STEPS = 3, 5
SAVED = (2, 3)  # steps after which a checkpoint is saved
SURVIVABLE = ("short", "late", "behind the next")
DAMAGES = ("flip", "vanish")  # of what lies on the drive
_HANGS_S = 60


class Saves(Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in SAVED:
            before = newest(self._folder)
            trainer.save_checkpoint(self._folder / f"{trainer.global_step}.ckpt")
            if before:
                before.unlink()


def newest(folder: Path) -> Path | None:
    return max(folder.glob("*.ckpt"), key=lambda path: int(path.stem), default=None)


class Result(NamedTuple):
    losses: list[float]
    weights: dict[str, torch.Tensor]

    def is_end_of(self, whole: "Result") -> bool:
        return self.losses == whole.losses[len(whole.losses) - len(self.losses) :] and all(
            torch.equal(value, whole.weights[name]) for name, value in self.weights.items()
        )


def train(folder: Path, schedule: str, steps: int, system: FaultySystem | None = None, *, on_ssd=True) -> Result:
    folder.mkdir(exist_ok=True)
    seed_everything(11, verbose=False)
    module = LlamaInStep(tiny_llama(1).to(torch.bfloat16))
    ssd = {"ssd": {"path": str(folder / "ssd"), "budget": "8MiB", "checkpoint": "reference"}} if on_ssd else {}
    rule = {"*": {"optimizer_state": "ssd"}} if on_ssd else {}
    strategy = offload(tiers=ssd, tier_rules=rule, **SCHEDULES[schedule])
    callbacks = [Saves(folder)] if on_ssd else []
    trainer = make_trainer(strategy, max_steps=steps, callbacks=callbacks, enable_checkpointing=False)
    with mock.patch.object(store, "System", lambda: system or FaultySystem()):
        trainer.fit(module, token_data(), ckpt_path=newest(folder))
    return Result(module.losses, {name: value.cpu().clone() for name, value in module.state_dict().items()})


class Outcome(NamedTuple):
    fault: str
    call: str
    run: str
    """same, refused, WRONG, or the name of an exception that is not ours."""
    resumed: str
    """same, none, damaged, WRONG."""
    left: str
    error: str


class Runs:
    """Runs with faults, and the run without; with `resumed` they begin with a checkpoint of step 2."""

    def __init__(self, folder: Path, schedule: str, *, resumed: bool = False) -> None:
        self._folder, self._schedule = folder / "run", schedule
        self._start = folder / "start"
        self._start.mkdir(parents=True)
        self._straight = {
            steps: train(folder / "memory", schedule, steps, on_ssd=False) for steps in (STEPS, MORE_STEPS)
        }
        if resumed:
            train(self._folder, schedule, SAVED[0])
            shutil.rmtree(self._start)
            self._folder.rename(self._start)
        self._prepare()
        system = FaultySystem()
        assert train(self._folder, schedule, STEPS, system).is_end_of(self._straight[STEPS])
        self.calls = system.calls

    def _prepare(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        shutil.copytree(self._start, self._folder)

    def one(self, fault: str, at: int) -> Outcome:
        """Let a fault happen at a call, and resume the run that it happened to."""
        self._prepare()
        gc.collect()
        before = _held()
        system = FaultySystem(fault, at)
        run, told = self._trained(STEPS, system)
        left = _left(before)
        call = system.calls[at] if at < len(system.calls) else "none"
        if newest(self._folder) is None:
            return Outcome(fault, call, run, "none", left, told)
        resumed, error = self._trained(MORE_STEPS, FaultySystem())
        if resumed == "refused":
            resumed = "damaged" if fault in DAMAGES else f"LOST: {error}"
        return Outcome(fault, call, run, resumed, left or _left(before), told)

    def _trained(self, steps: int, system: FaultySystem) -> tuple[str, str]:
        """Return how a run ended, and its error; not the exception itself, which would keep what its frames hold."""
        handler = signal.getsignal(signal.SIGTERM)
        try:
            result = train(self._folder, self._schedule, steps, system)
        except LightningCXLError as error:
            return ("refused" if _is_clear(error, system) else f"UNCLEAR: {error!r}"), repr(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}", repr(error)
        finally:
            signal.signal(signal.SIGTERM, handler)  # after an error in the teardown Lightning's stays
        return ("same" if result.is_end_of(self._straight[steps]) else "WRONG"), ""


def _is_clear(error: LightningCXLError, system: FaultySystem) -> bool:
    fault = system.fault or ""
    if not fault.startswith("E"):
        return isinstance(error, (StorageError, TierFullError, CheckpointError, ConfigError))
    if not isinstance(error, StorageError) or error.errno != getattr(errno, fault.split()[0]) or error.path is None:
        return False
    of_data = system.calls[system.at] in ("preadv", "pwritev") and str(error.path).endswith(".data")
    return error.offset is not None or not of_data


def _held() -> dict[str, Any]:
    """Return what a run must give back."""
    names = sorted(thread.name for thread in threading.enumerate())
    return {"descriptors": sorted(os.listdir("/proc/self/fd")), "threads": names, **training_device.held()}


def _left(before: dict[str, Any]) -> str:
    for _ in range(3):  # what has a finaliser of its own goes one round later
        if _held() == before:
            return ""
        gc.collect()
    return "; ".join(f"{name}: {now} after {before[name]}" for name, now in _held().items() if now != before[name])


def table(outcomes: list[Outcome]) -> str:
    counted = collections.Counter((each.fault, each.run.split(":")[0], each.resumed.split(":")[0]) for each in outcomes)
    lines = [f"{'fault':16}{'run':10}{'resumed':10}{'cases':>6}"]
    lines += [f"{fault:16}{run:10}{resumed:10}{count:6}" for (fault, run, resumed), count in sorted(counted.items())]
    return "\n".join(lines)


def bad(outcomes: list[Outcome]) -> list[Outcome]:
    return [
        each
        for each in outcomes
        if each.run not in ("same", "refused")
        or each.resumed not in ("same", "none", "damaged")
        or each.left
        or (each.run != "same" and each.fault in SURVIVABLE)
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedule", choices=SCHEDULES, default="whole")
    parser.add_argument("--resumed", action="store_true", help="the runs begin with a checkpoint")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--every", type=int, default=1, help="which calls: every, every second, ...")
    parser.add_argument("--device", choices=["cpu", "apart"], default="apart")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_cxl"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    training_device.choose(options.device)
    outcomes = []
    with training_device.on_chosen():
        runs = Runs(options.folder, options.schedule, resumed=options.resumed)
        gc.collect()
        gc.freeze()  # modules are no garbage, and there is much to collect
        print(f"{len(runs.calls)} calls: {dict(collections.Counter(runs.calls))}", flush=True)
        for fault in options.faults:
            for at in range(0, len(runs.calls), options.every):
                faulthandler.dump_traceback_later(_HANGS_S, exit=True)
                outcomes.append(runs.one(fault, at))
                for each in bad(outcomes[-1:]):
                    print(f"call {at}: {each}", flush=True)
        faulthandler.cancel_dump_traceback_later()
        print(table(outcomes), flush=True)
    return bool(bad(outcomes))


if __name__ == "__main__":
    sys.exit(main())
