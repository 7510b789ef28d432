"""Checkpoints of a user's loop with several processes: a folder for each model. See [Note: Sharded checkpoints]."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.run import sharded_checkpoint
from lightning_cxl.run.checkpoint import entry_of, restore_masters
from lightning_cxl.run.state_on_ssd import KEY, check_together
from lightning_cxl.run.user_loop import UserLoop
from lightning_cxl.sharding.processes import on_all_ranks


def save(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    loop: UserLoop,
    rest: Mapping[str, Any],
    *,
    weights: bool = True,
) -> None:
    """Write a model and its optimizers, on all processes together.

    Args:
        rest: what is no tensor; under our key more for our entry.
    """
    tensors: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for index, optimizer in enumerate(optimizers):
        run = loop.run_of(optimizer)
        on_all_ranks(run.wait_for_updates)  # a drive of one may fail
        run.adopt_joined()
        check_together(run.on_ssd)
        tensors[f"optimizer_{index}"] = sharded_checkpoint.optimizer_tensors(optimizer, run.masters.name_of)
        own = entry_of(optimizers, run.masters, run.num_received)
    masters = own.pop("master_weights", None)
    if masters:
        tensors[KEY] = {"master_weights": masters}
    if weights:
        tensors["state_dict"] = model.state_dict()
    sharded_checkpoint.save(path, tensors, {**rest, KEY: {**rest.get(KEY, {}), **own}})


def read_rest(path: Path, *, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what of a checkpoint is no tensor, and our entry."""
    from lightning_cxl.run.sharded_reading import ShardedCheckpoint  # imports torch's checkpoints

    rest = ShardedCheckpoint(path).rest(weights_only=weights_only)
    return rest, rest.pop(KEY, None) or {}


def load(
    path: Path,
    model: nn.Module,
    optimizers: Mapping[int, Optimizer],
    loop: UserLoop,
    *,
    strict: bool,
    weights: bool = True,
    weights_only: bool | None = None,
) -> None:
    """Load a model and its optimizers, each process what it has of them.

    Args:
        optimizers: of it, as `loop` gave them back, by their number in the checkpoint. INOUT.
        strict: whether the names of weights must be the same here and there.
    """
    from lightning_cxl.run.sharded_reading import ShardedCheckpoint  # imports torch's checkpoints

    folder = ShardedCheckpoint(path)
    own = folder.rest(weights_only=weights_only).get(KEY) or {}
    if any(index >= folder.num_optimizers for index in optimizers):
        raise CheckpointError(
            f"checkpoint `{path}` has state of {folder.num_optimizers} optimizers, and {len(optimizers)} are to be "
            "loaded: make those that were saved, in the same order"
        )
    if weights:
        folder.read_weights(model, strict=strict)
    for index, optimizer in optimizers.items():
        run = loop.run_of(optimizer)
        run.adopt_joined()
        folder.optimizer(index, optimizer, run.masters.name_of)
        run.rehome_state(optimizer)
        run.num_received = own.get("num_gradients", 0)
    for run in {id(run): run for run in map(loop.run_of, optimizers.values())}.values():
        saved = folder.masters({pair.name: pair.master for pair in run.masters})
        restore_masters(saved, run.masters, run.optimizers)
