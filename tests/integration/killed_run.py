"""One training run that is killed again and again, at any moment, and goes on each time with its newest checkpoint.

    python -m tests.integration.killed_run FOLDER --kills 50 [--checkpoint reference] [--overlap]

A tiny Llama in bfloat16 with its optimizer state on SSD. Each life is a process of its own: it takes the newest
checkpoint file that is there, or begins anew, and trains until it is killed or has taken its last step. The parent
kills it in a phase. At the end every loss of every life, the final weights and the final optimizer state must be those
of a run that nobody killed and that kept its state in memory. Prints how many died in which phase, and what differed.
"""

import argparse
import gc
import json
import os
import random
import re
import signal
import sys
import time
import traceback
import warnings
from contextlib import contextmanager, nullcontext
from multiprocessing.sharedctypes import RawArray, RawValue
from pathlib import Path

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_cxl
from lightning_cxl.integrations.lightning import CXLCheckpointIO, CXLOffloadStrategy
from lightning_cxl.storage.store import Store
from tests import training_device
from tests.integration.llama import LlamaInStep, tiny_llama
from tests.integration.training import make_trainer, offload
from tests.models import token_data

PHASES = ("start", "step", "save", "commit", "file", "settle", "remove")
"""What a life is doing; ``save``: what a checkpoint takes besides the phases after it."""
SIZES = {"hidden_size": 128, "intermediate_size": 256}
_POLL_S = 2e-4
_LIFE_S = 60  # a life that takes longer hangs


class Board:
    """Memory that a life writes and its parent reads: the present phase, how often each began and how long it took."""

    def __init__(self) -> None:
        self._now = RawValue("i")
        self.counts, self.seconds = RawArray("q", len(PHASES)), RawArray("d", len(PHASES))

    def clear(self) -> None:
        """Forget all but the seconds."""
        self._now.value, self.counts[:] = 0, [0] * len(PHASES)

    @property
    def phase(self) -> str:
        return PHASES[self._now.value]

    @contextmanager
    def within(self, phase: str):
        number, before, start = PHASES.index(phase), self._now.value, time.perf_counter()
        self._now.value = number
        self.counts[number] += 1
        try:
            yield
        finally:
            self.seconds[number] = time.perf_counter() - start
            self._now.value = before

    def watch(self, owner: type, name: str, phase: str) -> None:
        method = getattr(owner, name)

        def watched(*args, **kwargs):
            with self.within(phase):
                return method(*args, **kwargs)

        setattr(owner, name, watched)


class Sequential(LlamaInStep):
    """Notes each loss at once."""

    def __init__(self, model, notes: Path) -> None:
        super().__init__(model)
        self._notes = notes

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        with open(self._notes, "a") as file:
            file.write(f"{self.global_step} {loss.item().hex()}\n")
        return loss


class Steps(Callback):
    def __init__(self, board: Board) -> None:
        self._board = board

    def on_train_batch_start(self, *_):
        self._step = self._board.within("step")
        self._step.__enter__()

    def on_train_batch_end(self, *_):
        self._step.__exit__(None, None, None)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the latest step; of several for this step the one written last."""

    def age(path):
        return int(re.search(r"step=(\d+)", path.name)[1]), path.stat().st_mtime_ns

    return max(folder.glob("*.ckpt"), key=age, default=None)


def live(folder: Path, options: argparse.Namespace, board: Board, tiers: dict) -> None:
    """Train from the newest checkpoint to the last step, and save weights and state."""
    warnings.simplefilter("ignore")
    folder.mkdir(exist_ok=True)
    training_device.choose(options.device)  # its threads and its state belong to one process
    with training_device.on_chosen() if options.device == "apart" else nullcontext():
        _train(folder, options, board, tiers)
        gc.collect()  # nothing may be left on the device


def _train(folder: Path, options: argparse.Namespace, board: Board, tiers: dict) -> None:
    with board.within("start"):
        seed_everything(11, verbose=False)
        module = Sequential(tiny_llama(**SIZES).to(torch.bfloat16), folder / "losses")
        roles = ["optimizer_state", *(["weights", "activations"] if options.everything else [])]
        rule = {"*": dict.fromkeys(roles, "ssd")} if tiers else {}
        overlap = {"stream_weights": True, "overlap_step": True, "on_overflow": "ignore"} if options.overlap else {}
        strategy = offload(tiers=tiers, tier_rules=rule, state=options.state, **overlap)
        saver = ModelCheckpoint(folder, every_n_train_steps=options.every, save_top_k=1, monitor=None)
        trainer = make_trainer(
            strategy, max_steps=options.steps, callbacks=[Steps(board), saver], enable_checkpointing=True
        )
        found = newest(folder)
    trainer.fit(module, token_data(), ckpt_path=found)
    trainer.save_checkpoint(folder / "end")
    end = lightning_cxl.plain_checkpoint(torch.load(folder / "end", weights_only=True, map_location="cpu"))
    state = end["optimizer_states"][0]["state"]
    entries = {f"{number} {name}": each for number, entry in state.items() for name, each in entry.items()}
    torch.save({**end["state_dict"], **entries}, folder / "result")


def born(board: Board, errors: Path, *life) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with open(errors, "a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        for owner, name, phase in (
            (CXLOffloadStrategy, "save_checkpoint", "save"),
            (Store, "commit", "commit"),
            (CXLCheckpointIO, "save_checkpoint", "file"),
            (Store, "settle", "settle"),
            (CXLCheckpointIO, "remove_checkpoint", "remove"),
        ):
            board.watch(owner, name, phase)
        live(*life)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def end_of(child: int, board: Board, kill=None) -> int:
    """Return the exit status of a life. It is killed in a phase that has begun so often, after a part of its time."""
    start, killed = time.monotonic(), False
    phase, count, part = kill or (PHASES[0], 0, 0.0)
    number = PHASES.index(phase)
    usual = board.seconds[number]
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if kill and not killed and board.counts[number] >= count:
            time.sleep(part * usual)
            os.kill(child, signal.SIGKILL)
            killed = True
        if time.monotonic() - start > _LIFE_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError("a life hangs")
        time.sleep(_POLL_S)


def noted(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "losses").read_text().splitlines(keepends=True) if (folder / "losses").exists() else []
    return [(int(line.split()[0]), line.split()[1]) for line in lines if line.endswith("\n")]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, help="default: enough for all kills")
    parser.add_argument("--checkpoint", choices=["copy", "reference"], default="reference")
    parser.add_argument("--state", default="fp32")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--everything", action="store_true", help="weights and inputs of units are on SSD, too")
    parser.add_argument("--device", choices=["cpu", "apart"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.steps = options.steps or options.every * options.kills + 10
    torch.set_num_threads(1)
    rng, board = random.Random(options.seed), Board()
    straight, folder = options.folder / "straight", options.folder / "killed"
    errors = options.folder / "errors.txt"
    ssd = {"path": str(options.folder / "ssd"), "budget": "64MiB", "checkpoint": options.checkpoint}
    tiers = {"ssd": ssd}

    if end_of(born(board, errors, straight, options, board, {}), board):
        print(errors.read_text(), file=sys.stderr)
        return 1
    theirs = dict(noted(straight))
    reference = options.checkpoint == "reference"
    phases = [each for each in PHASES if reference or each not in ("commit", "settle")]
    result = {"deaths": dict.fromkeys(phases, 0), "from_scratch": 0, "wrong_losses": 0, "lost": 0}
    kills, lives, known, furthest = 0, 0, 0, 0
    while True:
        kill = None
        if kills < options.kills:
            phase = phases[kills % len(phases)]
            kill = (phase, rng.randint(1, 2) if phase != "start" else 1, rng.uniform(0, 1.2))
        found = newest(folder)
        board.clear()
        status = end_of(born(board, errors, folder, options, board, tiers), board, kill)
        lives += 1
        if status not in (0, -signal.SIGKILL):
            print(errors.read_text()[-4000:], file=sys.stderr)
            return 1
        losses = noted(folder)
        first = losses[known][0] if len(losses) > known else None
        at = 0 if found is None else int(re.search(r"step=(\d+)", found.name)[1])
        result["from_scratch"] += found is None and lives > 1
        result["lost"] += at < furthest or (first is not None and first != at)
        result["wrong_losses"] += sum(theirs[step] != loss for step, loss in losses[known:])
        furthest, known = at, len(losses)
        if status == 0:
            break
        kills += 1
        result["deaths"][board.phase] += 1
    result |= {"kills": kills, "lives": lives, "steps": options.steps, "losses": len(losses)}
    ours, expected = (torch.load(each / "result", weights_only=True) for each in (folder, straight))
    equal = [torch.equal(value, expected.pop(name)) for name, value in ours.items()]
    result["same_result"] = all(equal) and not expected
    result["partial_files"] = len([name for name in os.listdir(folder) if name.endswith(".partial")])
    result["in_folder"] = sorted(re.sub("[0-9a-f]{16}", "ID", name) for name in os.listdir(options.folder / "ssd"))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
