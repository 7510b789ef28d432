"""Checkpoints that several processes write together, and that any number of processes reads.

[Note: Sharded checkpoints]
A folder in the format of ``torch.distributed.checkpoint``, with names as Lightning's ``ModelParallelStrategy`` gives
them, so that it reads what we write::

    state_dict.NAME                         weights
    optimizer_0.state.NAME.exp_avg          optimizer state, by the parameter's name; of other optimizers alike
    optimizer_0.param_groups.0.lr           hyper-parameters
    lightning_cxl.master_weights.NAME       master weights that are not the model's weights themselves
    meta.pt                                 all that is no tensor: what Lightning keeps in a checkpoint, and our entry

Each process writes its own shards and reads what lies where its shards are now, straight into the memory that they have
already (`ShardedCheckpoint`). So nothing is gathered, and nothing has to be converted when the number of processes
changes, also from and to one. Scales of 8-bit state are per block of a shard: they are saved beside the number of the
shard's first element (``absmax1.4096``), and codes of other shards are decoded (`optim/parameter_state.py`).

The folder has its name only when everything is on the drive: [Note: Unfinished folders].
"""

import copy
import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path, PosixPath
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_each
from torch.distributed.checkpoint.state_dict_saver import save as save_together
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError
from lightning_cxl.memory.hook import ordinary_memory
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.optim.parameter_state import MOMENT_KEYS, REMAINDER, of_this_shard
from lightning_cxl.optim.swapped_state import read_states
from lightning_cxl.run import checkpoint as ckpt
from lightning_cxl.run.state_on_ssd import KEY
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import first_element, is_sharded, local, sharded_like
from lightning_cxl.storage.drive import sync_folder
from lightning_cxl.text import listed
from lightning_cxl.torch_private import tree_leaves

SCALES = tuple(keys.scales for keys in MOMENT_KEYS)  # keys of state that is per block of a shard


def save(path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
    """Write a checkpoint, on all processes together; it appears under its name only when it is complete."""
    write(path, tensors, lambda file: torch.save(dict(rest), file))


def write(path: Path, tensors: Mapping[str, Any], write_rest: Callable[[BinaryIO], Any], group: Any = None) -> None:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with ExitStack() as cleanup:

        def begin() -> Path | None:
            return cleanup.enter_context(ckpt.unfinished(path)) if is_first else None

        def finish() -> None:
            if is_first and folder is not None:
                with open(folder / ckpt.META, "wb") as file:
                    write_rest(file)
                    file.flush()
                    os.fsync(file.fileno())
                sync_folder(folder)
                ckpt.take_place(folder, path)

        try:
            folder = on_all_ranks(begin, group)[0]
            save_together(dict(tensors), checkpoint_id=folder, process_group=group)
            on_all_ranks(finish, group)
        except (Exception, CheckpointException) as error:  # the second is no Exception
            raise CheckpointError(
                f"could not write checkpoint `{path}`: {first_failure(error)}. The checkpoint before is as it was. "
                "Free space there, or save elsewhere; the folder must be one that all processes see"
            ) from error


def first_failure(error: BaseException) -> BaseException:
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def optimizer_tensors(optimizer: Optimizer, name_of: Callable[[torch.Tensor], str]) -> dict[str, Any]:
    """Return the state of an optimizer by names of parameters, as FSDP2's own tools do; tensors are not copied."""
    known = read_states(optimizer.state, compares_checksums=False)  # `check_together` does, on all processes
    states, groups = {}, []
    for group in optimizer.param_groups:
        names = [name_of(parameter) for parameter in group["params"]]
        for name, parameter in zip(names, group["params"], strict=True):
            if entry := dict(known.get(parameter) or {}):
                for key in [key for key in SCALES if key in entry and is_sharded(parameter)]:  # they are of one shard
                    entry[f"{key}.{first_element(parameter)}"] = entry.pop(key)
                states[name] = entry
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, "params": names})
    return {"state": states, "param_groups": groups}


def tensors_of_folder(
    weights: Mapping[str, Any] | None, states: Sequence[Mapping[str, Any]], own: dict[str, Any]
) -> dict[str, Any]:
    """Return what `save` gets, with the master weights that our entry has; they are taken out of it. `own`: INOUT."""
    tensors: dict[str, Any] = {f"optimizer_{index}": each for index, each in enumerate(states)}
    if weights is not None:
        tensors["state_dict"] = weights
    if masters := own.pop("master_weights", None):
        tensors[KEY] = {"master_weights": masters}
    return tensors


# `AsyncSaves`: several processes write a checkpoint together while they train on.
#
# [Note: Saves behind the training]
# `save` copies what this process has of the checkpoint to host memory, and returns; a thread writes the copy, as [Note:
# Sharded checkpoints] says. Values other than tensors are pickled at once. So a checkpoint has the values of the moment
# of the call, whatever is updated after it.
#
# * The threads of all processes agree in a process group of their own. A group serves one collective after the other,
#   in the same order everywhere, and nobody knows when a thread comes to its next one. So none of the training's is
#   used. A main thread uses theirs where nothing is being written.
# * One checkpoint is written at a time, and there is one copy: the next `save` waits.
# * An error of one process is one of all, as in every save. All raise it when they wait: at the next `save` or `wait`,
#   or at the end (`close`). A step after it (`then`) is of one process alone, and so is its error.
# * Who removes an older checkpoint right after a save does so when the new one has its name (`then`), and not at all
#   where that has failed. So a run that is killed at any moment leaves a whole checkpoint.


class AsyncSaves:
    """Writes checkpoints of all processes in a thread. See [Note: Saves behind the training].

    All processes make it, and call `save`, `wait` and `close`, in the same order. Its thread calls `prepare` first.
    """

    def __init__(self, timeout: timedelta | None = None, prepare: Callable[[], None] | None = None) -> None:
        self._group = dist.new_group(backend=dist.Backend.GLOO, timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint", prepare)
        self._last: Future[None] | None = None  # the last job of the thread, if it has not been waited for

    def save(self, path: Path, tensors: Mapping[str, Any], rest: Mapping[str, Any]) -> None:
        self.wait()
        copies: dict[str, Any] = {}
        pickled = io.BytesIO()

        def take() -> None:
            copies.update(_copied(tensors))
            if dist.get_rank() == 0:
                torch.save(dict(rest), pickled)

        on_all_ranks(take, self._group)
        self._last = self._thread.submit(
            write, path, copies, lambda file: file.write(pickled.getbuffer()), group=self._group
        )

    def then(self, step: Callable[[], None]) -> None:
        """Do a step without collectives when what is being written is complete; it is left out where that failed."""
        before = self._last
        if before is None:
            step()
            return

        def after() -> None:
            before.result()
            step()

        self._last = self._thread.submit(after)

    def wait(self) -> None:
        if self._last is not None:
            wait([self._last])
            done, self._last = self._last, None
            done.result()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            dist.destroy_process_group(self._group)


def _copied(tensors: Mapping[str, Any]) -> Any:
    """Return a copy in host memory, of tensors what this process has of them; one copy of what several names show."""
    taken: dict[Any, torch.Tensor] = {}
    known: dict[int, Any] = {}  # what `deepcopy` takes in the place of objects, by their id
    with ordinary_memory(), torch.no_grad():
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                own = local(tensor).detach()
                key: Any = (own.device, own.data_ptr(), own.dtype, own.shape, own.stride())
                if type(own) is not torch.Tensor:  # it may have no memory, and so no address
                    key = id(tensor)
                if key not in taken:
                    taken[key] = own.to("cpu", copy=True)
                known[id(tensor)] = sharded_like(taken[key], tensor)
        return copy.deepcopy(tensors, known)


# Pickles in a checkpoint folder of DCP: what they hold is read, and nothing that they ask for is run.
#
# torch reads both kinds with an unpickler that does whatever a file says: the list of tensors (``.metadata``), and each
# value that is no tensor. A folder may come from somebody else, so here only classes that such a list needs are known,
# and values are read as ``torch.load(..., weights_only=True)`` reads them.

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Bytes", "Chunk")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}
_IS_DATA = re.compile(r"__\d+_\d+\.distcp").fullmatch
_PATHS = {("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), ("pathlib", "WindowsPath")}


class RefusedError(pickle.UnpicklingError):
    """A list of tensors asks for what no such list needs."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return PosixPath  # of where it was written, which nobody needs: also from another system
        if (module, name) in _KNOWN or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise RefusedError(f"its list of tensors asks for {module}.{name}, which no such list needs")


class PlainReader(FileSystemReader):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with open(path / ".metadata", "rb") as file:
            found = _MetadataUnpickler(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"its list of tensors is a {type(found).__name__}")
        for each in (found.storage_data or {}).values():
            if not _IS_DATA(each.relative_path):
                raise pickle.UnpicklingError(f"its list of tensors names {each.relative_path!r}, no checkpoint file")
        self.metadata: Metadata = found  # read once, not for every parameter

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


class PlainValues(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # refuses what is not plain, so that the planner may read it
        value.seek(0)
        super().load_bytes(read_item, value)


_OF_CODES = tuple(key for keys in MOMENT_KEYS for key in (keys.scales, keys.map))
_MASTERS = f"{KEY}.master_weights"
_Path = tuple[str | int, ...]
_IS_OPTIMIZER = re.compile(r"optimizer_\d+\.").match


class ShardedCheckpoint:
    """A checkpoint folder. Each process reads by itself what it needs."""

    def __init__(self, path: Path) -> None:
        self._path = ckpt.lying_at(path)
        try:
            self._reader = PlainReader(self._path)
        except Exception as error:
            raise self._damaged(error) from error
        self._metadata = self._reader.metadata
        self._paths: Mapping[str, _Path] = self._metadata.planner_data or {}
        """The path of each name: keys, which may have dots, and places in lists."""

    def tensor(self, name: str) -> torch.Tensor:
        return self.read({name: None})[name]

    def is_tensor(self, name: str) -> bool:
        return isinstance(self._metadata.state_dict_metadata.get(name), TensorStorageMetadata)

    def empty(self, name: str, device: str = "meta") -> torch.Tensor:
        known = self._metadata.state_dict_metadata[name]
        assert isinstance(known, TensorStorageMetadata)
        return torch.empty(known.size, dtype=known.properties.dtype, device=device)

    @property
    def num_optimizers(self) -> int:
        return len({name.partition(".")[0] for name in self._metadata.state_dict_metadata if _IS_OPTIMIZER(name)})

    def restore_masters(self, masters: MasterWeights, optimizers: Sequence[Optimizer]) -> None:
        wanted, saved = {pair.name: pair.master for pair in masters}, {}
        for name in self.names(_MASTERS):
            if name in wanted:
                own = torch.empty_like(local(wanted[name].detach()), dtype=torch.float32, device="cpu")
                saved[name] = sharded_like(own, wanted[name])
        self.read({f"{_MASTERS}.{name}": value for name, value in saved.items()})
        ckpt.restore_masters(saved, masters, optimizers)

    def master_names(self) -> dict[str, str]:
        """Return full names of float32 master weights by the name of the weight; of int16 remainders of split ones."""
        found = {name: f"{_MASTERS}.{name}" for name in self.names(_MASTERS)}
        for name, path in self._paths.items():
            if path[1::2] == ("state", REMAINDER) and self.is_tensor(name) and self.empty(name).dtype is torch.int16:
                found[str(path[2])] = name
        return found

    def rest(self, *, weights_only: bool | None = None) -> dict[str, Any]:
        try:
            loaded: dict[str, Any] = torch.load(self._path / ckpt.META, map_location="cpu", weights_only=weights_only)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise self._damaged(error) from error
        return loaded

    def names(self, prefix: str) -> list[str]:
        start = f"{prefix}."
        return [name[len(start) :] for name in self._metadata.state_dict_metadata if name.startswith(start)]

    def read(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Read into tensors, of any cut and floating point type; None stands for whole new ones and other values."""
        wanted = dict(tensors)
        for name, value in tensors.items():
            known = self._metadata.state_dict_metadata.get(name)
            if known is None:
                raise CheckpointError(f"checkpoint `{self._path}` has no `{name}`; it has {self._some()}")
            if value is None and isinstance(known, TensorStorageMetadata):
                wanted[name] = self.empty(name, device="cpu")
            shape = tuple(known.size) if isinstance(known, TensorStorageMetadata) else None
            if shape is not None and isinstance(value, torch.Tensor) and shape != tuple(value.shape):
                raise CheckpointError(
                    f"`{name}` in checkpoint `{self._path}` has shape {shape}, and {tuple(value.shape)} here"
                )
        if wanted:
            try:
                with warnings.catch_warnings():  # each process reads by itself, also where there is one
                    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                    load_each(wanted, storage_reader=self._reader, planner=PlainValues(), no_dist=True)
            except (Exception, CheckpointException) as error:  # the second is no Exception
                raise self._damaged(error) from error
        return wanted

    def read_weights(self, model: nn.Module, *, strict: bool) -> list[str]:
        """Read the weights and buffers of a model into the memory they have; return what the checkpoint lacks."""
        paths = self._below("state_dict")
        own, saved = model.state_dict(), {str(path[1]) for path in paths.values()}
        missing, unknown = sorted(own.keys() - saved), sorted(saved - own.keys())
        if strict and (missing or unknown):
            raise CheckpointError(
                f"checkpoint `{self._path}` is of another model: it lacks {missing[:3] or 'nothing'} ({len(missing)}), "
                f"and the model lacks {unknown[:3] or 'nothing'} ({len(unknown)})"
            )
        tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        self.read({f"state_dict.{name}": value for name, value in tensors.items() if name in saved})
        torch.autograd.graph.increment_version([p for p in model.parameters() if is_sharded(p)])
        others = {name: path[1:] for name, path in paths.items() if path[1] in own.keys() - tensors.keys()}
        if others:  # what modules keep beside tensors
            model.load_state_dict(self._read(others), strict=False)
        return missing

    def load_optimizers(
        self, optimizers: Sequence[Optimizer], masters: MasterWeights | None, name_of: Callable[[torch.Tensor], str]
    ) -> None:
        if self.num_optimizers not in (0, len(optimizers)):
            raise CheckpointError(
                f"the checkpoint has state of {self.num_optimizers} optimizers, this run has {len(optimizers)}"
            )
        for index, optimizer in enumerate(optimizers if self.num_optimizers else []):
            self.optimizer(index, optimizer, name_of)
        if masters is not None:
            self.restore_masters(masters, optimizers)

    def optimizer(self, index: int, optimizer: Optimizer, name_of: Callable[[torch.Tensor], str]) -> None:
        prefix = f"optimizer_{index}"
        if not self.names(prefix):
            raise CheckpointError(f"checkpoint `{self._path}` has no state of optimizer {index}; it has {self._some()}")
        paths_of: dict[str, dict[str, _Path]] = {}
        for full_name, path in self._below(prefix, "state").items():
            paths_of.setdefault(str(path[2]), {})[full_name] = path[3:]
        entries: dict[str, dict[str, Any]] = {}
        names = [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        groups = self._groups(prefix, names)
        for group, own in zip(optimizer.param_groups, names, strict=True):
            for parameter, name in zip(group["params"], own, strict=True):
                entry = self._entry(paths_of.pop(name, {}), parameter)
                if isinstance(optimizer, CPUAdam):
                    optimizer.load_parameter(parameter, name, entry)
                elif entry:
                    entries[name] = entry
        if paths_of:
            raise CheckpointError(
                f"checkpoint `{self._path}` has optimizer state of {next(iter(paths_of))!r} ({len(paths_of)} in all), "
                "which this optimizer does not have: configure it as it was when the checkpoint was saved"
            )
        if isinstance(optimizer, CPUAdam):
            optimizer.load_options(groups)
        else:
            type(optimizer).load_state_dict(optimizer, {"state": entries, "param_groups": groups})

    def _groups(self, prefix: str, names: list[list[str]]) -> list[dict[str, Any]]:
        found = [
            {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
            for group in self._read({name: path[2:] for name, path in self._below(prefix, "param_groups").items()})
        ]
        for group, own in zip(found, names, strict=False):  # DCP has no entry for an empty list
            group.setdefault("params", own)
        saved = [list(group.get("params", ())) for group in found]
        return ckpt.by_name({"param_groups": found}, saved, names)["param_groups"]

    def _entry(self, paths: Mapping[str, _Path], parameter: torch.Tensor) -> dict[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        for name, path in paths.items():
            if not self.is_tensor(name):
                continue
            whole = self.empty(name)
            if whole.shape == parameter.shape and parameter.shape:
                shard = torch.empty_like(local(parameter.detach()), dtype=whole.dtype, device="cpu")
                tensors[name] = sharded_like(shard, parameter)
            elif not str(path[0]).startswith(_OF_CODES):
                tensors[name] = torch.empty_like(whole, device="cpu")
                if isinstance(parameter, DTensor) and whole.shape:  # such as means of rows: every process has all
                    mesh = parameter.device_mesh
                    everywhere = [Replicate()] * mesh.ndim
                    tensors[name] = DTensor.from_local(tensors[name], mesh, everywhere, run_check=False)
        entry: dict[str, Any] = self._read(paths, tensors)
        return of_this_shard(entry, parameter) if MOMENT_KEYS[0].codes in entry else entry

    def _below(self, *start: str) -> dict[str, _Path]:
        return {name: path for name, path in self._paths.items() if path[: len(start)] == start}

    def _read(self, paths: Mapping[str, _Path], tensors: Mapping[str, Any] | None = None) -> Any:
        """Return values by their paths in dicts and lists; `tensors` are those that have memory already."""
        found = self.read({**dict.fromkeys(paths), **(tensors or {})})
        return _nested({path: found[name] for name, path in paths.items()})

    def _damaged(self, error: BaseException) -> CheckpointError:
        error = first_failure(error)
        if isinstance(error, RefusedError):
            return CheckpointError(f"checkpoint `{self._path}` was not read: {error}. Reading it could run code")
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            return ckpt.needs_code(self._path, error)
        return ckpt.damaged(self._path, error)

    def _some(self) -> str:
        return listed(list(self._metadata.state_dict_metadata), most=3)


def _nested(values: Mapping[_Path, Any]) -> Any:
    if () in values:
        return values[()]
    inside: dict[str | int, dict[_Path, Any]] = {}
    for path, value in values.items():
        inside.setdefault(path[0], {})[path[1:]] = value
    if inside and all(isinstance(key, int) for key in inside):
        return [_nested(inside[key]) for key in sorted(inside)]
    return {key: _nested(each) for key, each in inside.items()}
