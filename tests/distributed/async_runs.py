"""What a rank does in tests of checkpoints that are written while training goes on."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_cxl.errors import LightningCXLError, LightningCXLWarning
from lightning_cxl.run.session import Session
from lightning_cxl.run.sharded_checkpoint import AsyncSaves, ShardedCheckpoint
from lightning_cxl.sharding.fsdp import cut
from lightning_cxl.streaming.units import find_units
from tests.distributed import lightning_runs, training
from tests.distributed.training import Job, place

LIMIT_S = 30


def fit(steps: int, callback: Callback | list[Callback] | None = None, **keywords: Any) -> lightning_runs.Result:
    """Train, with checkpoints that are written meanwhile."""
    trainer = {"plugins": [AsyncCheckpointIO()], **keywords.pop("trainer", {})}
    return lightning_runs.fit(steps, callback=callback, trainer=trainer, **keywords)


@contextlib.contextmanager
def writing(before: Callable[[], None]) -> Iterator[None]:
    """Return a region in which something is done before this rank writes its shards."""
    usual = FileSystemWriter.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        before()
        return usual(self, plan, planner)

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemWriter.write_data = usual  # type: ignore[method-assign]


class Held:
    """Lets writes wait until `go`."""

    def __init__(self) -> None:
        self._go = threading.Event()
        self.go = self._go.set

    def __call__(self) -> None:
        """Wait."""
        if not self._go.wait(LIMIT_S):
            raise TimeoutError("training has not gone on")

    def go_later(self) -> None:
        """Let it write while this thread waits for it."""
        threading.Timer(0.5, self.go).start()


def full_drive() -> None:
    """Fail on the last rank."""
    rank, world = place()
    if rank == world - 1:
        raise OSError(28, "No space left on device")


class At(Callback):
    """Does something at the end of some steps, and has state that changes with every step."""

    state_key = "At"

    def __init__(self, **actions: Callable[[Any], None]) -> None:
        self.actions = actions
        self.steps: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Do it."""
        self.steps.append(trainer.global_step)
        self.actions.get(f"step_{trainer.global_step}", lambda trainer: None)(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return what training changes."""
        return {"steps": self.steps}


def saved_meanwhile(path: str, **keywords: Any) -> list[bool]:
    """Save at step 3, and write that when step 5 has ended; return whether it had its name then and at the end."""
    held, found = Held(), []

    def look(trainer: Any) -> None:
        found.append(Path(path).exists())
        held.go()

    with writing(held):
        fit(6, At(step_3=lambda trainer: trainer.save_checkpoint(path), step_5=look), **keywords)
    return [*found, Path(path).exists()]


def error_of(act: Callable[[], Any]) -> str | None:
    """Return the error of an act of ours."""
    try:
        act()
    except LightningCXLError as error:
        return f"{type(error).__name__}: {error}"
    return None


def failing(folder: Path) -> list[Any]:
    """Return the errors of saves, of which the first cannot be written, and of the end of the run; what is there."""
    errors: list[str | None] = []

    def save(number: int) -> Callable[[Any], None]:
        return lambda trainer: errors.append(error_of(lambda: trainer.save_checkpoint(folder / f"{number}.ckpt")))

    with writing(full_drive):
        first = At(step_1=save(1), step_2=save(2))
        errors.append(error_of(lambda: fit(3, first)))
        errors.append(error_of(lambda: fit(2, At(step_1=save(3)))))
    errors.append(error_of(lambda: fit(2, At(step_1=save(4)))))
    return errors


def unpicklable(path: Path) -> list[Any]:
    """Return the errors of a save that one rank cannot copy, and of the one after it."""
    errors: list[str | None] = []

    class Bad(At):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if not errors and place()[0] == 0:
                checkpoint["bad"] = threading.Lock()

    def save(trainer: Any) -> None:
        try:
            trainer.save_checkpoint(path)
            errors.append(None)
        except Exception as error:
            errors.append(str(error))

    fit(2, Bad(step_1=save, step_2=save))
    return errors


def saved_twice(folder: Path) -> tuple[list[bool], list[str]]:
    """Save twice; return which were complete when the second save returned."""
    held, found = Held(), []

    def save_both(trainer: Any) -> None:
        trainer.save_checkpoint(folder / "1.ckpt")
        held.go_later()
        trainer.save_checkpoint(folder / "2.ckpt")
        found.append((folder / "1.ckpt").exists())

    with writing(held):
        fit(1, At(step_1=save_both))
    return found, sorted(path.name for path in folder.iterdir())


def loaded_at_once(path: Path) -> list[Any]:
    """Save, and load while that is being written; return what training had counted by then."""
    held, found = Held(), []

    def save_and_load(trainer: Any) -> None:
        trainer.save_checkpoint(path)
        held.go_later()
        found.append(trainer.strategy.load_checkpoint(path, weights_only=False)["seen"])

    with writing(held):
        fit(3, At(step_2=save_and_load))
    return found


def raising(path: Path, *, fails: bool) -> tuple[str, bool, list[str]]:
    """Save, and raise while that is being written; return the error, whether the checkpoint is there, and what is told.

    Args:
        path: of the checkpoint.
        fails: whether it cannot be written.
    """
    held = Held()

    def before() -> None:
        held()
        if fails:
            full_drive()

    def save_and_raise(trainer: Any) -> None:
        trainer.save_checkpoint(path)
        held.go_later()
        raise ValueError("of the user")

    with writing(before), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(3, At(step_1=save_and_raise))
        except ValueError as error:
            told = [str(each.message) for each in caught if each.category is LightningCXLWarning]
            return str(error), path.exists(), told
    raise AssertionError("no error of the user's")


def replacing(folder: Path, *, fails: bool) -> list[list[str]]:
    """Let `ModelCheckpoint` keep one checkpoint of two; return which there are while the second is written, and after.

    Args:
        folder: of the checkpoints.
        fails: whether the second cannot be written.
    """
    held, number = Held(), [0]

    def before() -> None:
        number[0] += 1
        if number[0] == 2:
            held()
            if fails:
                full_drive()

    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    found: list[list[str]] = []

    def look(trainer: Any) -> None:
        found.append(names())
        held.go()

    keeping = ModelCheckpoint(folder, "{step}", every_n_train_steps=2)
    with writing(before):
        error = error_of(lambda: fit(5, [keeping, At(step_5=look)], trainer={"enable_checkpointing": True}))
    assert (error is not None) == fails, error
    return [*found, names()]


def refusal(**keywords: Any) -> str | None:
    """Return the error with which a run is refused."""
    return error_of(lambda: fit(1, **keywords))


def of_host_shards(path: Path) -> list[bool]:
    """Write shards that lie on the host for a device apart, which change meanwhile; return whether they are as then."""
    job, (_, world) = Job(), place()
    model, session = training.make_model(job), Session()
    engine = session.host_on(training.device()).engine
    cut(model, find_units(model), training.mesh_of(job, world), engine)
    before = {name: training.whole(each) for name, each in model.named_parameters()}
    saves, held = AsyncSaves(), Held()
    try:
        with writing(held):
            saves.save(path, {"state_dict": model.state_dict()}, {})
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            held.go()
            saves.wait()
    finally:
        saves.close()
        session.close()
    folder = ShardedCheckpoint(path)
    return [torch.equal(folder.tensor(f"state_dict.{name}"), value) for name, value in before.items()]


def removed_meanwhile(folder: Path) -> list[str]:
    """Remove a checkpoint that is being written; return what is there after the run."""
    held = Held()

    def save_and_remove(trainer: Any) -> None:
        trainer.save_checkpoint(folder / "1.ckpt")
        trainer.strategy.remove_checkpoint(folder / "1.ckpt")
        held.go()

    with writing(held):
        fit(1, At(step_1=save_and_remove))
    return sorted(path.name for path in folder.iterdir())
