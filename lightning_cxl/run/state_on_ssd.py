"""`StateOnSsd`: what of a run lies on SSD, state, weights and inputs of units: store, slots, and each one's record."""

import logging
import os
import secrets
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cxl.config import SsdOptions
from lightning_cxl.devices import TransferEngine
from lightning_cxl.errors import CheckpointError, StorageError, UnsupportedError
from lightning_cxl.inventory import tensors
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.swapped_state import OnSsd, StateRecord, StateSwapper, taken_nbytes
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import local
from lightning_cxl.storage.drive import BLOCK_BYTES, MANIFEST, make_parents
from lightning_cxl.storage.store import Area, Store, files_shown_at
from lightning_cxl.storage.swap import BufferPool, Swapper
from lightning_cxl.streaming.on_ssd import InputsOnSsd, WeightRecord, WeightsOnSsd

KEY = "lightning_cxl"  # of our entry in a checkpoint
SSD = "ssd"  # in our entry, where the checkpoint refers to state on SSD: ``folders``, ``generation`` and its ``token``

log = logging.getLogger(__name__)

_WAYS = ("read", "written")
_MOST_TENSORS = 5  # of one parameter: two moments, in 8 bit with scales beside them, and the remainder
_MOST_BYTES = 10  # of an element: two moments in float32, and the remainder


class StateOnSsd:
    """Gives tensors of records, all state of one parameter in one record; homes for weights, and places for inputs."""

    def __init__(
        self,
        options: SsdOptions,
        budget_bytes: int,
        planned: Sequence[tensors.PlannedRecord],
        allocate: Callable[[int], Buffer],
        engine: TransferEngine,
    ) -> None:
        self.folders = [str(path) for path in options.paths]
        self.refers = options.checkpoint == "reference"  # checkpoints refer to this state instead of copying it
        self.owns_generations = False  # those in the folders are this run's: it has committed, or was resumed from one
        self._to_settle: int | None = None  # the generation that stays, where letting go of the others has failed
        self._record_of: dict[int, StateRecord] = {}  # by id of the parameter
        self._given: dict[int, set[tuple[TensorRole, torch.dtype]]] = {}
        self._weight_records: dict[int, WeightRecord] = {}  # by id of the first parameter
        self._num_added = 0
        self._paces: list[tuple[int, float, Mapping[str, int]]] = []
        self._settling = threading.RLock()  # several threads may update
        if options.is_part:
            make_parents(options.paths)
        with ExitStack() as cleanup:
            self.store = Store(options.paths, budget_bytes=budget_bytes, keeps=self.refers)
            cleanup.callback(self.store.close)
            num_drives = len(options.paths)

            def swapper(cap_bytes: int, **kwargs: Callable[[], None]) -> Swapper:
                made = Swapper(self.store, BufferPool(allocate, cap_bytes), **kwargs)
                cleanup.callback(made.close)
                return made

            updates = swapper(tensors.update_slot_bytes(planned, num_drives), before_write=self.make_room)
            self.state = StateSwapper(updates)
            weights = swapper(tensors.weight_slot_bytes(planned, num_drives), begin_thread=engine.use_in_this_thread)
            self._weights = WeightsOnSsd(weights, engine)
            self.store.check_found({each.name: each.nbytes for each in planned if each.is_state})
            # all planned inputs together: each image gets its place in this space when there is one
            nbytes = sum(tensors.round_up(each.nbytes, BLOCK_BYTES * num_drives) for each in planned if each.is_inputs)
            area = Area(self.store, "inputs of units", nbytes, num_drives)
            images = swapper(tensors.input_slot_bytes(planned, num_drives), begin_thread=engine.use_in_this_thread)
            self.inputs = InputsOnSsd(images, area, engine)
            cleanup.callback(self.inputs.close)
            for each in planned:
                if each.is_inputs:
                    continue
                if each.is_weights:
                    weight = self._weights.reserve(each.name, each.nbytes)
                    self._weight_records[id(each.tensors[0].parameter)] = weight
                    self.state.include(weight)
                else:
                    record = self.state.reserve(each.name, each.nbytes)
                    self._record_of |= {id(tensor.parameter): record for tensor in each.tensors}
            self._cleanup = cleanup.pop_all()

    def flat(
        self, parameter: torch.Tensor, name: str, role: TensorRole, dtype: torch.dtype, numel: int
    ) -> torch.Tensor:
        given = self._given.setdefault(id(parameter), set())
        # not planned: a parameter that came later, or whose state is made again
        if id(parameter) not in self._record_of or (role, dtype) in given:
            self._num_added += 1
            most = local(parameter).numel() * _MOST_BYTES + _MOST_TENSORS * taken_nbytes(1)
            self._record_of[id(parameter)] = self.state.reserve(f"{name}, added as number {self._num_added}", most)
            given.clear()
        given.add((role, dtype))
        return self._record_of[id(parameter)].take(dtype, numel)

    def weight_record(self, first: torch.Tensor) -> WeightRecord:
        return self._weight_records[id(first)]

    @property
    def has_saved(self) -> bool:
        """Whether what checkpoints have lies here: state of optimizers, or weights."""
        return bool(self._record_of or self._weight_records)

    def check_weights(self) -> None:
        for each in self._weight_records.values():
            self._weights.swapper.verify(each.record)

    def refuse_state_of_earlier_run(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers whose state this run would overwrite while it copies that state."""
        # it lies in the same files since an earlier run, and no generation protects what that run wrote last
        own = set(self.store.files)
        for value in (each for opt in optimizers for state in opt.state.values() for each in state.values()):
            is_usual = isinstance(value, torch.Tensor) and not isinstance(value, OnSsd)
            if is_usual and own.intersection(files_shown_at(value.data_ptr())):
                raise UnsupportedError(
                    f"the optimizer has state of an earlier run in `{self.folders[0]}`, which this run would "
                    "overwrite: resume from that run's checkpoint, use another folder, or set checkpoint='copy'"
                )

    def restore(self, generation: int) -> None:
        self.state.drop_prefetched()
        self.store.restore(generation)
        self.settle(generation)
        self.state.take_records_as_they_are()
        self.owns_generations = True

    def settle(self, generation: int) -> None:
        """Let go of all generations of the store but one; again before the next write or commit where that fails."""
        self._to_settle = generation
        self.store.settle(generation)
        self._to_settle = None

    def make_room(self) -> None:
        """Let go of one of two generations before a write or a commit: together they leave no version to write."""
        # It was decided which one stays and could not be done then, or this run was not resumed from either. A run that
        # was killed while it saved leaves two. The newer one stays if its checkpoint file refers to it: the file that
        # is there may be an older one of the same name.
        with self._settling:
            if self._to_settle is not None:
                self.settle(self._to_settle)
            kept = self.store.generations()
            if len(kept) < 2 or self.owns_generations:
                return
            older, newer = kept
            path, token = newer.details["checkpoint"], newer.details.get("token")
            if token is None:  # of an earlier version
                raise CheckpointError(
                    f"`{self.folders[0]}` holds the state of `{older.details['checkpoint']}`, and that of `{path}`, "
                    "during whose save a run was killed: resume from the file that is there, or empty that folder"
                )
            stays = newer if _refers(path, token) else older
            log.warning(
                f"`{self.folders[0]}` held the state of two checkpoints, from which this run was not resumed. That of "
                f"`{stays.details['checkpoint']}` stays until this run saves a checkpoint, the other one is given up"
            )
            self.settle(stays.number)

    def note_pace(self, num_steps: int) -> None:
        """Note what was moved so far: at the end of the first step, which makes the state, and of the last."""
        if num_steps and (not self._paces or num_steps != self._paces[-1][0]):
            self._paces[1:] = [(num_steps, time.monotonic(), self.store.stats())]

    def moved_per_step(self) -> dict[str, Any]:
        """Return what a step has moved from and to the drives, JSON-able; empty before the second step is over."""
        if len(self._paces) < 2:
            return {}
        (first, start, before), (last, end, after) = self._paces
        num_steps = last - first
        moved = {f"{way}_bytes_per_step": (after[f"{way}_bytes"] - before[f"{way}_bytes"]) / num_steps for way in _WAYS}
        return {"num_steps": num_steps, "step_seconds": (end - start) / num_steps, **moved}

    def close(self) -> None:
        """Finish what is on its way, and let go of slots and drives. The tensors can still be read. Idempotent."""
        self._cleanup.close()


def check_together(on_ssd: StateOnSsd | None, *, state: bool = True) -> None:
    """Let all ranks read what they have and compare checksums, before a checkpoint copies what windows show."""

    def check() -> None:
        if on_ssd is not None:
            on_ssd.check_weights()
            if state:
                on_ssd.state.verify()

    on_all_ranks(check)


# Checkpoints that refer to state on SSD instead of copying it.
#
# [Note: Referring checkpoints]
# With ``checkpoint="reference"`` a checkpoint file has everything but the state on SSD. In the place of each tensor of
# that lies a *reference*: the record, and where the tensor begins in it. Our entry of the checkpoint names the
# generation of the store ([Note: Generations]) to which the references belong.
#
# Saved: the generation is committed; the file is written; the generations before are let go of. Who is killed in
# between has both, and so whichever file is there can be loaded. Which generation stays after an error, or in a run
# that starts anew, is read from the file: the newer one if the file refers to it, else the one before. Where the other
# one cannot be let go of, that is tried again before the next write or commit.
#
# Loaded: the run has made the same records, in the same folder. They become those of the generation, no byte is copied,
# and training goes on in the versions that are not committed: until the next checkpoint this one can be loaded again.

_REFERENCE = "lightning_cxl_record"


def refer(states: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return _converted(states, lambda value: value.reference() if isinstance(value, OnSsd) else value)


def _converted(states: Iterable[Mapping[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    return [
        {**each, "state": {k: {n: convert(v) for n, v in entry.items()} for k, entry in each["state"].items()}}
        for each in states
    ]


def is_reference(value: object) -> bool:
    return isinstance(value, Mapping) and _REFERENCE in value


@contextmanager
def commit_beside(on_ssd: StateOnSsd, path: str) -> Iterator[dict[str, Any]]:
    """Return a region in which a checkpoint file is written that refers to the state as it is now."""
    on_ssd.make_room()
    on_ssd.state.wait()  # what someone has written to state counts
    store, number, token = on_ssd.store, None, secrets.token_hex(16)
    before = store.generations()
    if before and not on_ssd.owns_generations:
        log.warning(
            f"`{on_ssd.folders[0]}` held the state of checkpoint `{before[-1].details.get('checkpoint')}`, from which "
            f"this run was not resumed: with checkpoint `{path}` it is given up"
        )
    try:
        number = store.commit({"checkpoint": path if "://" in path else os.path.abspath(path), "token": token})
        on_ssd.owns_generations = True
        yield {"folders": on_ssd.folders, "generation": number, "token": token}
    except BaseException:
        try:
            if number is not None and _refers(path, token):
                on_ssd.settle(number)  # the error came after the file had its name
            elif before:
                on_ssd.settle(before[-1].number)
        except StorageError as another:  # users need the first error; this one is tried again before the next write
            log.warning(f"the error that ended checkpoint `{path}` was not the only one: {another}")
        raise
    on_ssd.settle(number)


def _refers(path: str, token: str) -> bool:
    """Return whether a checkpoint file holds the token of a generation; its tensors and types are not loaded."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            return any(token.encode() in archive.read(name) for name in names)
    except Exception:  # it may be remote, or cut
        return False


def restore(on_ssd: StateOnSsd | None, saved: Mapping[str, Any]) -> None:
    folders, number = saved["folders"], saved["generation"]
    where = f"generation {number} in {', '.join(f'`{folder}`' for folder in folders)}"
    if on_ssd is None or on_ssd.folders != folders:
        own = "none" if on_ssd is None else ", ".join(f"`{folder}`" for folder in on_ssd.folders)
        raise CheckpointError(
            f"the optimizer state of this checkpoint is {where}, and this run keeps state on SSD in {own}. Give it the "
            "same tiers['ssd'] and rules, or turn the checkpoint into a whole one with `lightning_cxl.plain_checkpoint`"
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
    """Return state dicts of optimizers with tensors in the place of references; the tensors show the files."""
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
        entries = (entry for each in states for entry in each["state"].values())
        needed = {value[_REFERENCE] for entry in entries for value in entry.values() if is_reference(value)}
        if not needed <= records.keys():
            raise CheckpointError(
                f"the optimizer state of this checkpoint is in record `{min(needed - records.keys())}`, and "
                f"`{paths[0]}` has no record of this name: that is the state of another run"
            )
        # each record is read once and its checksum compared, in memory as large as the largest one
        nbytes = max((records[name].padded_nbytes for name in needed), default=0)
        room = torch.empty(nbytes + BLOCK_BYTES, dtype=torch.uint8)
        memory = Buffer(room.data_ptr() + -room.data_ptr() % BLOCK_BYTES, nbytes, (), None, room)
        for name in sorted(needed):
            if records[name].is_written:
                store.read(records[name], memory).wait_host()
        windows = {name: store.window(records[name]) for name in needed}
    finally:
        store.close()

    def tensor_of(value: Any) -> Any:
        if not is_reference(value):
            return value
        window, dtype = windows[value[_REFERENCE]], getattr(torch, value["dtype"])
        flat = window.tensor((prod(value["shape"]),), dtype, value["offset"])
        return flat.as_strided(value["shape"], value["stride"])

    return _converted(states, tensor_of)


def resolve(state: Mapping[str, Any], optimizer: CPUAdam) -> dict[str, Any]:
    entries = dict(state["state"])
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            entry = entries.get(key, {})
            for name in [name for name, value in entry.items() if is_reference(value)]:
                value, own = entry[name], optimizer.kept.of(parameter).shown.get(name)
                if not isinstance(own, OnSsd) or own.reference() != value:
                    raise CheckpointError(
                        f"the checkpoint's optimizer state is at {value['offset']} in record `{value[_REFERENCE]}`, "
                        "and this run keeps it elsewhere. Give the run the model, the optimizer, `state`, `master` and "
                        "rules of the run that saved it, or turn the checkpoint into a whole one with "
                        "`lightning_cxl.plain_checkpoint`"
                    )
                entry = entries[key] = {**entry, name: own}
    return {**state, "state": entries}
