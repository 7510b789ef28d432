"""Checkpoints that refer to state on SSD instead of copying it.

[Note: Referring checkpoints]
With ``checkpoint="reference"`` a checkpoint file has everything but the state on SSD. In the place of each tensor of
that lies a *reference*: the record, and where the tensor begins in it. Our entry of the checkpoint names the generation
of the store ([Note: Generations]) to which the references belong.

Saved: the generation is committed; the file is written; the generations before are let go of. Who is killed in between
has both, and so whichever file is there can be loaded. Which generation stays after an error, or in a run that starts
anew, is read from the file: the newer one if the file refers to it, else the one before. Where the other one cannot be
let go of, that is tried again before the next write or commit.

Loaded: the run has made the same records, in the same folder. They become those of the generation, no byte is copied,
and training goes on in the versions that are not committed: until the next checkpoint this one can be loaded again.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from lightning_cxl.errors import CheckpointError, StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.swapped_state import OnSsd
from lightning_cxl.run.state_on_ssd import StateOnSsd, saved_generation
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.storage.folder import MANIFEST
from lightning_cxl.storage.record import Record
from lightning_cxl.storage.store import Store

log = logging.getLogger(__name__)

_REFERENCE = "lightning_cxl_record"


def refer(states: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return state dicts of optimizers with references in the place of tensors that lie in records."""
    return _converted(states, lambda value: value.reference() if isinstance(value, OnSsd) else value)


def _converted(states: Iterable[Mapping[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return state dicts of optimizers with every value of every entry converted."""
    return [
        {**each, "state": {k: {n: convert(v) for n, v in entry.items()} for k, entry in each["state"].items()}}
        for each in states
    ]


def is_reference(value: object) -> bool:
    """Return whether a value of a saved state stands for a tensor on SSD."""
    return isinstance(value, Mapping) and _REFERENCE in value


@contextmanager
def commit_beside(on_ssd: StateOnSsd, path: str) -> Iterator[dict[str, Any]]:
    """Return a region in which a checkpoint file is written that refers to the state as it is now.

    Yields:
        What our entry of the checkpoint says about it.
    """
    on_ssd.make_room()
    on_ssd.state.wait()  # what someone has written to state counts
    store, number = on_ssd.store, None
    before = store.generations()
    if before and not on_ssd.owns_generations:
        log.warning(
            f"`{on_ssd.folders[0]}` held the state of checkpoint `{before[-1].details.get('checkpoint')}`, from which "
            f"this run was not resumed: with checkpoint `{path}` it is given up"
        )
    try:
        number = store.commit({"checkpoint": path if "://" in path else os.path.abspath(path)})
        on_ssd.owns_generations = True
        yield {"folders": on_ssd.folders, "generation": number}
    except BaseException:
        try:
            if number is not None and saved_generation(path, on_ssd.folders) == number:
                on_ssd.settle(number)  # the error came after the file had its name
            elif before:
                on_ssd.settle(before[-1].number)
        except StorageError as another:  # users need the first error; this one is tried again before the next write
            log.warning(f"the error that ended checkpoint `{path}` was not the only one: {another}")
        raise
    on_ssd.settle(number)


def restore(on_ssd: StateOnSsd | None, saved: Mapping[str, Any]) -> None:
    """Make the state on SSD what it was when a checkpoint was saved.

    Args:
        on_ssd: of the run; None where no state of it lies on SSD.
    """
    folders, number = saved["folders"], saved["generation"]
    where = f"generation {number} in {', '.join(f'`{folder}`' for folder in folders)}"
    if on_ssd is None or on_ssd.folders != folders:
        own = "none" if on_ssd is None else ", ".join(f"`{folder}`" for folder in on_ssd.folders)
        raise CheckpointError(
            f"the optimizer state of this checkpoint is {where}, and this run keeps state on SSD in {own}. Give it the "
            f"same tiers['ssd'] and rules, or turn the checkpoint into a whole one with "
            f"`lightning_cxl.plain_checkpoint`"
        )
    known = [each.number for each in on_ssd.store.generations()]
    if number not in known:
        raise CheckpointError(
            f"the optimizer state of this checkpoint was {where}, which is gone: that folder holds "
            f"{', '.join(map(str, known)) or 'none'}. With checkpoint='reference' only the latest checkpoint of a run "
            f"can be loaded"
        )
    on_ssd.restore(number)
    log.info(f"optimizer state resumed from {where}, without a copy")


def whole(states: Iterable[Mapping[str, Any]], saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return state dicts of optimizers with tensors in the place of references.

    The tensors show the files. What is referred to is read once and its checksums compared, in memory as large as the
    largest record.

    Args:
        saved: what our entry of the checkpoint says about the state on SSD.
    """
    states = list(states)
    paths = [Path(folder) for folder in saved["folders"]]
    missing = [path for path in (*paths, paths[0] / MANIFEST) if not path.exists()]
    if missing:  # a store would make the folders
        raise CheckpointError(
            f"the optimizer state of this checkpoint was generation {saved['generation']} in "
            f"{', '.join(f'`{path}`' for path in paths)}, which is gone: there is no `{missing[0]}`. Call this in the "
            "directory that the run was started in if the path is relative, and mount the drive"
        )
    store = Store(paths, budget_bytes=sys.maxsize, keeps=True)
    try:
        records = {name: store.reserve(name, nbytes) for name, nbytes in store.found.items()}
        store.restore(saved["generation"])
        needed = _records_referred_to(states)
        if not needed <= records.keys():
            raise CheckpointError(
                f"the optimizer state of this checkpoint is in record `{min(needed - records.keys())}`, and "
                f"`{paths[0]}` has no record of this name: that is the state of another run"
            )
        _check(store, [records[name] for name in sorted(needed)])
        windows = {name: store.window(records[name]) for name in needed}
    finally:
        store.close()

    def tensor_of(value: Any) -> Any:
        if not is_reference(value):
            return value
        window, dtype = windows[value[_REFERENCE]], getattr(torch, value["dtype"])
        numel = prod(value["shape"])
        flat = window.slice(value["offset"], numel * dtype.itemsize).tensor((numel,), dtype)
        return flat.as_strided(value["shape"], value["stride"])

    return _converted(states, tensor_of)


def _records_referred_to(states: Iterable[Mapping[str, Any]]) -> set[str]:
    entries = (entry for each in states for entry in each["state"].values())
    return {value[_REFERENCE] for entry in entries for value in entry.values() if is_reference(value)}


def _check(store: Store, records: list[Record]) -> None:
    """Read records and compare their checksums."""
    nbytes = max((record.padded_nbytes for record in records), default=0)
    room = torch.empty(nbytes + BLOCK_BYTES, dtype=torch.uint8)
    start = -room.data_ptr() % BLOCK_BYTES
    memory = Buffer(room.data_ptr() + start, nbytes, (), None, room)
    for record in records:
        if record.is_written:
            store.read(record, memory).wait_host()


def resolve(state: Mapping[str, Any], optimizer: CPUAdam) -> dict[str, Any]:
    """Return a state dict with the optimizer's own tensors in the place of references to them."""
    entries = dict(state["state"])
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            entry = entries.get(key)
            if entry is not None and any(map(is_reference, entry.values())):
                own = optimizer.kept.of(parameter).entries
                entries[key] = {name: _resolved(value, own.get(name)) for name, value in entry.items()}
    return {**state, "state": entries}


def _resolved(value: Any, own: torch.Tensor | None) -> Any:
    if not is_reference(value):
        return value
    if not isinstance(own, OnSsd) or own.reference() != value:
        raise CheckpointError(
            f"the checkpoint's optimizer state is at {value['offset']} in record `{value[_REFERENCE]}`, and this run "
            f"keeps it elsewhere. Give the run the model, the optimizer, `state`, `master` and rules of the run that "
            f"saved it, or turn the checkpoint into a whole one with `lightning_cxl.plain_checkpoint`"
        )
    return own
