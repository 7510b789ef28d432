"""`StateOnSsd`: what of a run lies on SSD, state, weights and inputs of units: store, slots, and each one's record."""

import logging
import os
import pickle
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.inventory.tensors import PlannedRecord, hop_slot_bytes, input_slot_bytes, round_up, update_slot_bytes
from lightning_cxl.machine.topology import Tier
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.swapped_state import OnSsd, StateRecord, StateSwapper, taken_nbytes
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import local
from lightning_cxl.ssd_options import SsdOptions
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.storage.folder import make_parents, remove_left
from lightning_cxl.storage.record import files_shown_at
from lightning_cxl.storage.store import Area, Store
from lightning_cxl.storage.swap import BufferPool, Swapper
from lightning_cxl.streaming.on_ssd import InputsOnSsd, WeightRecord, WeightsOnSsd
from lightning_cxl.transfer.engine import TransferEngine

# ----------------------------------------------------------------------------------------------------
# `SsdUse`: what a run has stored on, and moved from and to, the tier `ssd`: measured, for its report.


@dataclass(frozen=True, kw_only=True, slots=True)
class SsdUse:
    """What the tier `ssd` holds now, and what a run has moved so far."""

    used_bytes: int = 0
    """Of records, all versions."""
    peak_bytes: int = 0
    """Most that these have been."""
    held_bytes: int = 0
    """Of the files."""
    read_bytes: int = 0
    """In `num_steps`, as all that follows."""
    written_bytes: int = 0
    num_steps: float = 0.0
    """Of the optimizer; the first is not counted."""
    seconds: float = 0.0
    """With everything between the steps."""


class Pace:
    """Measures what steps move, from the end of the first one on: that one makes the state, and starts the device."""

    def __init__(self) -> None:
        self._first: tuple[float, Mapping[str, int]] | None = None
        self._last: tuple[float, Mapping[str, int]] = (0.0, {})

    def note(self, counts: Mapping[str, int], num_records: int) -> None:
        """Note between two steps what was moved since the run began.

        Args:
            counts: ``read_bytes``, ``written_bytes``, and ``num_uses``: how often a record was updated, or of steps.
        """
        if counts["num_uses"] == self._last[1].get("num_uses"):
            return  # between micro-batches of one step
        self._last = time.monotonic(), {**counts, "num_records": num_records}
        if self._first is None and counts["num_uses"] >= num_records:
            self._first = self._last

    def of_steps(self) -> dict[str, Any]:
        """Return the fields of `SsdUse` that are about steps; none before the second step is over."""
        if self._first is None:
            return {}
        (start, before), (end, after) = self._first, self._last
        moved = {name: after[name] - before[name] for name in ("read_bytes", "written_bytes", "num_uses")}
        return {
            "read_bytes": moved["read_bytes"],
            "written_bytes": moved["written_bytes"],
            "num_steps": moved["num_uses"] / after["num_records"],
            "seconds": end - start,
        }


def tier_row(tier: Tier, use: SsdUse) -> dict[str, int]:
    """Return the row of the tier in the report's table of tiers."""
    return {
        "capacity_bytes": tier.capacity_bytes,
        "budget_bytes": tier.capacity_bytes,
        "used_bytes": use.used_bytes,
        "peak_bytes": use.peak_bytes,
        "held_bytes": use.held_bytes,
    }


def io_data(use: SsdUse) -> dict[str, Any]:
    """Return what a step has moved, JSON-able; empty before the first step."""
    if not use.num_steps or not use.written_bytes:
        return {}
    return {
        "num_steps": use.num_steps,
        "step_seconds": use.seconds / use.num_steps if use.seconds > 0 else None,
        "read_bytes_per_step": use.read_bytes / use.num_steps,
        "written_bytes_per_step": use.written_bytes / use.num_steps,
    }


# ----------------------------------------------------------------------------------------------------
# `saved_generation`: to which generation of state on SSD a checkpoint file refers, read without the types in it.

KEY = "lightning_cxl"
"""Of our entry in a checkpoint."""
SSD = "ssd"
"""In our entry, where the checkpoint refers to state on SSD: ``folders`` and ``generation``."""


def saved_generation(path: str | os.PathLike[str], folders: Sequence[str]) -> int | None:
    """Return the number of the generation to which a checkpoint file refers.

    Neither tensors nor classes of the file are loaded, and no code that it names runs: a user's own types are no
    obstacle.

    Returns:
        None: there is no such file, it cannot be read, or it refers to nothing in these folders.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = [each for each in archive.namelist() if fnmatch(each, "*/data.pkl")]
            with archive.open(name) as file:
                saved = _Unpickler(file).load()[KEY][SSD]
        return int(saved["generation"]) if saved["folders"] == list(folders) else None
    except Exception:  # whatever a damaged file makes of the unpickler
        return None


class _Anything(dict[Any, Any]):
    """Stands for an object of any class: has the entries of a mapping, and takes everything else without effect."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __call__(self, *args: object) -> "_Anything":
        return _Anything()

    def __setstate__(self, state: object) -> None:
        pass

    def append(self, item: object) -> None:
        pass

    def extend(self, items: object) -> None:
        pass

    def add(self, item: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _Anything

    def persistent_load(self, pid: Any) -> Any:
        return None


log = logging.getLogger(__name__)

_MOST_TENSORS = 5  # of one parameter: two moments, in 8 bit with scales beside them, and the remainder
_MOST_BYTES = 10  # of an element: two moments in float32, and the remainder


class StateOnSsd:
    """Gives tensors of records, all state of one parameter in one record; homes for weights, and places for inputs.

    Args:
        planned: all of these records are made now, so that a full drive shows before training.
        engine: copies weights and inputs to the device, and inputs from it.
    """

    def __init__(
        self,
        options: SsdOptions,
        budget_bytes: int,
        planned: Sequence[PlannedRecord],
        allocate: Callable[[int], Buffer],
        engine: TransferEngine,
    ) -> None:
        self.folders = [str(path) for path in options.paths]
        self.refers = options.checkpoint == "reference"
        """Whether checkpoints refer to this state instead of copying it."""
        self.owns_generations = False
        """Whether the generations in the folders are this run's: it has committed, or was resumed from one."""
        self._to_settle: int | None = None  # the generation that stays, where letting go of the others has failed
        self._record_of: dict[int, StateRecord] = {}  # by id of the parameter
        self._given: dict[int, set[tuple[TensorRole, torch.dtype]]] = {}
        self._homes: dict[int, WeightRecord] = {}  # by id of the first parameter
        self._num_updated_weights = 0
        self._num_added = 0
        self._pace = Pace()
        self._settling = threading.RLock()  # several threads may update
        make_parents(options.paths) if options.is_part else remove_left(options.paths)
        with ExitStack() as cleanup:
            self.store = Store(options.paths, budget_bytes=budget_bytes, keeps=self.refers)
            cleanup.callback(self.store.close)

            num_drives = len(options.paths)

            def swapper(cap_bytes: int, **kwargs: Callable[[], None]) -> Swapper:
                made = Swapper(self.store, BufferPool(allocate, cap_bytes), **kwargs)
                cleanup.callback(made.close)
                return made

            updates = swapper(update_slot_bytes(planned, num_drives), before_write=self.make_room)
            self.state = StateSwapper(updates)
            weights = swapper(hop_slot_bytes(planned, num_drives), begin_thread=engine.use_in_this_thread)
            self._weights = WeightsOnSsd(weights, engine)
            self.store.check_found({each.name: each.nbytes for each in planned if each.is_state})
            # all planned inputs together: each image gets its place in this space when there is one
            nbytes = sum(round_up(each.nbytes, BLOCK_BYTES * num_drives) for each in planned if each.is_inputs)
            area = Area(self.store, "inputs of units", nbytes, num_drives)
            images = swapper(input_slot_bytes(planned, num_drives), begin_thread=engine.use_in_this_thread)
            self.inputs = InputsOnSsd(images, area, engine)
            """Gives places for inputs of units."""
            cleanup.callback(self.inputs.close)
            for each in planned:
                if each.is_inputs:
                    continue
                if each.is_weights:
                    home = self._homes[id(each.tensors[0].parameter)] = self._weights.reserve(each.name, each.nbytes)
                    self.state.include(home)
                    self._num_updated_weights += each.is_updated
                else:
                    record = self.state.reserve(each.name, each.nbytes)
                    self._record_of |= {id(tensor.parameter): record for tensor in each.tensors}
            self._cleanup = cleanup.pop_all()

    def flat(
        self, parameter: torch.Tensor, name: str, role: TensorRole, dtype: torch.dtype, numel: int
    ) -> torch.Tensor:
        """Return a 1-D tensor for state of a parameter of the model, contents undefined.

        What was not planned gets a record of its own: a parameter that came later, or whose state is made again.
        """
        given = self._given.setdefault(id(parameter), set())
        if id(parameter) not in self._record_of or (role, dtype) in given:
            self._num_added += 1
            most = local(parameter).numel() * _MOST_BYTES + _MOST_TENSORS * taken_nbytes(1)
            self._record_of[id(parameter)] = self.state.reserve(f"{name}, added as number {self._num_added}", most)
            given.clear()
        given.add((role, dtype))
        return self._record_of[id(parameter)].take(dtype, numel)

    def home(self, first: torch.Tensor) -> WeightRecord:
        """Return the home of weights that were planned, by the first parameter of their piece."""
        return self._homes[id(first)]

    @property
    def has_saved(self) -> bool:
        """Whether what checkpoints have lies here: state of optimizers, or weights."""
        return bool(self._record_of or self._homes)

    def check_weights(self) -> None:
        """Read weights and compare checksums, before a checkpoint copies what windows show."""
        for home in self._homes.values():
            self._weights.swapper.verify(home.record)

    def refuse_state_of_earlier_run(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse optimizers whose state this run would overwrite while it copies that state.

        It lies in the same files since an earlier run, and no generation protects what that run wrote last.
        """
        own = set(self.store.files)
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if not isinstance(value, torch.Tensor) or isinstance(value, OnSsd):
                        continue
                    if own.intersection(files_shown_at(value.data_ptr())):
                        raise UnsupportedError(
                            f"the optimizer has state of an earlier run in `{self.folders[0]}`, which this run would "
                            f"overwrite: make a new optimizer and resume from that run's checkpoint, use another "
                            f"folder, or set checkpoint='copy'"
                        )

    def restore(self, generation: int) -> None:
        """Make the state what it was in a generation of the store, and let go of the others."""
        self.state.drop_prefetched()
        self.store.restore(generation)
        self.settle(generation)
        self.state.take_records_as_they_are()
        self.owns_generations = True

    def settle(self, generation: int) -> None:
        """Let go of all generations of the store but one. What fails is done before the next write or commit."""
        self._to_settle = generation
        self.store.settle(generation)
        self._to_settle = None

    def make_room(self) -> None:
        """Let go of one of two generations before a write or a commit: together they leave no version to write.

        It was decided which one stays and could not be done then, or this run was not resumed from either. A run that
        was killed while it saved leaves two. The newer one stays if its checkpoint file refers to it: the
        file that is there may be an older one of the same name.
        """
        with self._settling:
            self._settle_rest()

    def _settle_rest(self) -> None:
        if self._to_settle is not None:
            self.settle(self._to_settle)
        kept = self.store.generations()
        if len(kept) > 1 and not self.owns_generations:
            older, newer = kept
            is_saved = saved_generation(newer.details["checkpoint"], self.folders) == newer.number
            stays = newer if is_saved else older
            log.warning(
                f"`{self.folders[0]}` held the state of two checkpoints, from which this run was not resumed. That of "
                f"`{stays.details['checkpoint']}` stays until this run saves a checkpoint, the other one is given up"
            )
            self.settle(stays.number)

    def report_row(self) -> SsdUse:
        """Return what a report says about the tier."""
        reserved = self.store.stats()["reserved_bytes"]
        return SsdUse(used_bytes=reserved, peak_bytes=reserved, held_bytes=reserved, **self._pace.of_steps())

    def note_pace(self, num_steps: int) -> None:
        """Measure what steps move, from one call to the next.

        Args:
            num_steps: of optimizers so far. Where they update something here, the uses of its records are counted.
        """
        num_records = len(set(self._record_of.values())) + self._num_updated_weights
        num_uses = self.state.swapper.num_uses if num_records else num_steps
        self._pace.note({**self.store.stats(), "num_uses": num_uses}, num_records or 1)

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
