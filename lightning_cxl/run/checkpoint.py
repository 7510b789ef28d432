"""Checkpoints: our entry beside the usual ones, and files that are written and read straight.

A checkpoint is an ordinary Lightning file: `state_dict` and `optimizer_states` are what plain Lightning writes, reads.
Under the key ``lightning_cxl`` lies what only we need: parameter names of the optimizers, so that state finds its
parameter when their order changed, and master weights where they are not the model's weights themselves.
"""

import contextlib
import fcntl
import logging
import os
import pickle
import re
import secrets
import shutil
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.optim import Optimizer

from lightning_cxl.errors import CheckpointError, ConfigError
from lightning_cxl.memory.resource import pages_of_file
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.optim.kernels import split
from lightning_cxl.optim.masters import MasterWeights
from lightning_cxl.optim.parameter_state import REMAINDER, decoded, joined, match_groups, without_remainder
from lightning_cxl.run import state_on_ssd as ssd_checkpoint
from lightning_cxl.run.state_on_ssd import KEY, SSD, StateOnSsd
from lightning_cxl.shards import local, shard_of, sharded_like
from lightning_cxl.storage.drive import exchange, sync_folder
from lightning_cxl.torch_private import mapping_files_with

log = logging.getLogger(__name__)


class LoadedCheckpoint(dict[str, Any]):
    """A checkpoint as plain Lightning reads it, for hooks that look at it; our entry is beside it.

    A copy or a pickle is without our entry, in a class that ``torch.load`` trusts.
    """

    def __init__(self, loaded: Mapping[str, Any], folder: Any = None) -> None:
        super().__init__(loaded)
        self.own: dict[str, Any] = self.pop(KEY, None) or {}
        self.folder = folder
        if folder is not None and folder.num_optimizers:
            self["optimizer_states"] = [None] * folder.num_optimizers  # Lightning asks whether there are some

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[dict[str, Any]]]:
        return OrderedDict, ({**self},)


def own_entry(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return checkpoint.own if isinstance(checkpoint, LoadedCheckpoint) else checkpoint.get(KEY) or {}


def entry_of(optimizers: Iterable[Optimizer], masters: MasterWeights, num_received: int) -> dict[str, Any]:
    masters.absorb_changes()
    usable: list[list[list[str]] | None] = []
    for optimizer in optimizers:
        groups = [[masters.name_of(p) for p in group["params"]] for group in optimizer.param_groups]
        names = [name for group in groups for name in group]
        usable.append(groups if len(names) == len(set(names)) else None)
    return {"optimizer_param_names": usable, "master_weights": masters.named_masters(), "num_gradients": num_received}


@contextmanager
def refer_to_ssd(
    checkpoint: dict[str, Any], own: dict[str, Any], on_ssd: StateOnSsd | None, path: str
) -> Iterator[dict[str, Any]]:
    """Return a region in which a checkpoint is written; yields what to write. See [Note: Referring checkpoints]."""
    if on_ssd is None or not on_ssd.refers:
        yield {**checkpoint, KEY: own}
        return
    states = ssd_checkpoint.refer(checkpoint["optimizer_states"])
    with ssd_checkpoint.commit_beside(on_ssd, path) as entry:
        yield {**checkpoint, "optimizer_states": states, KEY: {**own, SSD: entry}}


def load_optimizers(
    optimizers: Sequence[Optimizer],
    states: Collection[Mapping[str, Any]],
    own: Mapping[str, Any],
    name_of: Callable[[torch.Tensor], str],
    on_ssd: StateOnSsd | None,
) -> None:
    """Load states in torch's format into as many optimizers, by parameter name where names are known."""
    if not states:
        log.info("the checkpoint has no optimizer states: the optimizers go on with what they have")
        return
    if len(states) != len(optimizers):
        raise CheckpointError(f"the checkpoint has state of {len(states)} optimizers, this run has {len(optimizers)}")
    if SSD in own:
        ssd_checkpoint.restore(on_ssd, own[SSD])
    saved_names = own.get("optimizer_param_names") or [None] * len(states)
    for optimizer, state, names in zip(optimizers, states, saved_names, strict=True):
        current = [[name_of(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
        ordered = by_name(state, names, current)
        if isinstance(optimizer, CPUAdam):
            if on_ssd is not None:
                ordered = ssd_checkpoint.resolve(ordered, optimizer)
            type(optimizer).load_state_dict(optimizer, ordered)  # its own attribute may call this function
        else:
            load_plain(optimizer, ordered, current)


def by_name(state: Mapping[str, Any], saved: list[list[str]] | None, current: list[list[str]]) -> dict[str, Any]:
    """Return an optimizer's state dict with its groups and keys in the order that the parameters have now.

    `saved`: parameter names by group when saved; None where they were not known, so that the order is kept.
    """
    groups, own = state["param_groups"], [{"params": names} for names in current]
    if saved is not None:
        groups = [{**group, "param_names": names} for group, names in zip(groups, saved, strict=True)]
        own = [{"params": names, "param_names": names} for names in current]
    # names stay behind: from here on, the order says it
    return {
        **state,
        "param_groups": [
            {**{key: value for key, value in group.items() if key != "param_names"}, "params": keys}
            for group, keys in match_groups(own, groups)
        ],
    }


def load_plain(optimizer: Optimizer, state: Mapping[str, Any], names: list[list[str]]) -> None:
    entries: dict[Any, Any] = dict(state["state"])
    for group, saved, group_names in zip(optimizer.param_groups, state["param_groups"], names, strict=True):
        for parameter, key, name in zip(group["params"], saved["params"], group_names, strict=True):
            if key not in entries:
                continue
            entry, remainder = without_remainder(decoded(entries[key], f"`{name}`"))
            if remainder is not None:  # of split master weights
                with torch.no_grad():
                    own, lower = local(parameter).detach(), shard_of(remainder, parameter)
                    own.copy_(joined(own, lower))
            for each, value in entry.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    entry[each] = sharded_like(shard_of(value, parameter), parameter)
            entries[key] = entry
    type(optimizer).load_state_dict(optimizer, {**state, "state": entries})


def plain_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint that needs nothing of this package, for plain Lightning with torch's optimizers.

    Momentum and variance become float32, also where they were 8 bit, which torch's Adam cannot read; weights whose
    float32 master weights are in the file become those. Takes 8 more bytes of memory per parameter. State on SSD that
    the checkpoint refers to is read from there, and its checksums are compared.

    Example::

        plain = lightning_cxl.plain_checkpoint(torch.load("offloaded.ckpt"))
        torch.save(plain, "plain.ckpt")

    Args:
        checkpoint: as `torch.load` returns it; is left as it is.

    Raises:
        CheckpointError: 8-bit state of another format than bitsandbytes' dynamic one; or state on SSD, to which the
            checkpoint refers, that is not there any more; or what is given is not a checkpoint.
        StorageError: a drive cannot read that state, or has damaged it.
    """
    try:
        return _plain_checkpoint(checkpoint)
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"this cannot be converted ({type(error).__name__}: {error}): it is not what `torch.load` returns of a "
            "checkpoint of Lightning, with `state_dict` and `optimizer_states`, or there is a fault in this package"
        ) from error


def _plain_checkpoint(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    own, saved, states = own_entry(checkpoint), checkpoint["state_dict"], checkpoint.get("optimizer_states", [])
    if SSD in own:
        states = ssd_checkpoint.whole(states, own[SSD])
    weights = {
        name: joined(saved[name], value) if value.dtype is torch.int16 else value
        for name, value in masters_in(own, states).items()
        if name in saved
    }
    plain_states = []
    for state in states:
        entries = {}
        for key, entry in state["state"].items():
            plain, _ = without_remainder(decoded(entry, f"parameter {key}"))
            for name, value in plain.items():
                if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
                    plain[name] = value.float()
            entries[key] = plain
        plain_states.append({**state, "state": entries})
    rest = {key: value for key, value in checkpoint.items() if key != KEY}
    return {**rest, "state_dict": _with_tied(saved, weights), **({"optimizer_states": plain_states} if states else {})}


def masters_in(own: Mapping[str, Any], states: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return float32 master weights of a file by name; of split ones what the weights lack of them, int16."""
    found = dict(own.get("master_weights") or {})
    for state, names in zip(states, own.get("optimizer_param_names") or [None] * len(states), strict=True):
        for group, own_names in zip(state["param_groups"], names or [], strict=names is not None):
            for key, name in zip(group["params"], own_names, strict=True):
                remainder = state["state"].get(key, {}).get(REMAINDER)
                if ssd_checkpoint.is_reference(remainder):
                    raise ConfigError(
                        "the checkpoint refers to master weights on SSD: write a whole one with "
                        "`lightning_cxl.plain_checkpoint` and use that"
                    )
                if isinstance(remainder, torch.Tensor) and remainder.dtype is torch.int16:
                    found[name] = remainder
    return found


def _with_tied(saved: Mapping[str, Any], changed: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state dict with changed weights; what is tied to one changes with it."""

    def memory(value: Any) -> object:
        return (value.data_ptr(), value.shape, value.stride()) if isinstance(value, torch.Tensor) else id(value)

    by_memory = {memory(saved[name]): value for name, value in changed.items()}
    return {name: by_memory.get(memory(value), value) for name, value in saved.items()}


def restore_masters(
    saved: Mapping[str, torch.Tensor] | None, masters: MasterWeights, optimizers: Iterable[Optimizer]
) -> None:
    """Bring master weights back from a checkpoint, or take the loaded compute weights where it has none.

    Float32 masters of a checkpoint also become split ones; split ones are in the optimizer's state and load with it.
    """
    masters.absorb_changes()
    optimizers = list(optimizers)
    states = {id(p): (state, optimizer) for optimizer in optimizers for p, state in optimizer.state.items()}
    for pair in masters:
        value = (saved or {}).get(pair.name)
        if value is None:
            continue
        if value.shape != pair.master.shape:
            raise CheckpointError(
                f"the checkpoint's master weight `{pair.name}` has shape {tuple(value.shape)}, "
                f"the model's {tuple(pair.master.shape)}"
            )
        with torch.no_grad():
            state, owner = states.get(id(pair.master), (None, None))
            remainder = (state or {}).get(REMAINDER)
            value = shard_of(value, pair.master)
            if remainder is not None:
                upper, lower = split(value.float().contiguous())
                now = local(pair.master)  # the model's weights: of another time, if the optimizer's state loads alone
                is_other = (upper != now) & (value.to(now.dtype) != now)
                now.copy_(torch.where(is_other, now, upper))
                lower.masked_fill_(is_other, 0)
                if isinstance(owner, CPUAdam):
                    owner.load_remainder(pair.master, lower)
                else:
                    local(remainder).copy_(lower)
            elif not pair.is_shared:
                local(pair.master).copy_(value)
                pair.version = -1  # the next step compares: the model may have weights of another time


# The file of one process, or the folder of several: unfinished under a name of its own, then at once under its name.
#
# [Note: Unfinished folders]
# A folder is written as ``.NAME.TOKEN.partial``, a file as ``.NAME.TOKEN.checkpoint.partial`` (`unfinished`). It takes
# its name when it is complete (`take_place`), and a folder gets a name like that again before it is removed
# (`remove`). So a process that is killed leaves the last checkpoint whole.
#
# Files that killed processes have left are removed by the next `unfinished` in that place. It knows by a lock: a
# process locks what it writes, and the kernel lets go of the lock when the process is killed, whatever container or
# machine it is in. A new file or folder is there before it can be locked. A process that loses it to another one in
# between, finds the lock taken or the name gone, and makes another one.
#
# Some filesystems have no locks. Tokens would hide what the dead have left there: its name is ``.NAME.partial`` then,
# and the next one of the same name replaces it.
#
# Some, such as NFS, cannot let two names change places. There what had the name is ``NAME.being_replaced.ckpt`` for a
# moment, and a crash in this moment leaves it so. `lying_at` finds it; so does Lightning where it looks for "last".

_PARTIAL_FILE = re.compile(r"\..+\.[0-9a-f]{8}\.checkpoint\.partial").fullmatch
_MOST_CHARS = 48  # of the target's name: a character has up to 4 bytes, and filesystems take names of 255
META = "meta.pt"
"""The file with what is no tensor. It is the last one that is written."""
TIED = "tied_weights"
"""In our entry: lists of names that are one parameter. Files have these as one tensor, folders as several."""
_IS_OURS = re.compile(r"meta\.pt|\.metadata(\.tmp)?|__\d+_\d+\.distcp").fullmatch  # a name of a file in a checkpoint
_REPLACED = ".being_replaced"


def lying_at(path: Path) -> Path:
    """Return where the checkpoint of a name lies: there, or where a crash has left it while it was replaced."""
    if not path.name:  # of no checkpoint: it is `.` or `/`
        return path
    before = _before(path)
    return before if not os.path.lexists(path) and os.path.lexists(before) else path


def is_sharded_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder that several processes have written together."""
    return (lying_at(path) / META).is_file()


@contextmanager
def unfinished(target: Path, *, is_file: bool = False) -> Iterator[Path]:
    """Make and lock a new folder, or a file, beside `target`, and remove what killed processes left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_left(target.parent)
    ending = "checkpoint.partial" if is_file else "partial"
    with ExitStack() as cleanup:
        while True:
            path = target.with_name(f".{target.name[:_MOST_CHARS]}.{secrets.token_hex(4)}.{ending}")
            path.touch(exist_ok=False) if is_file else path.mkdir()
            try:
                cleanup.enter_context(_locked(path))
            except (BlockingIOError, FileNotFoundError):  # somebody takes it for left behind
                continue
            except OSError:  # no locks here
                path = path.rename(_cleared(target.with_name(f".{target.name}.partial")))
            break
        yield path


def take_place(finished: Path, path: Path) -> None:
    """Rename a finished file or folder to `path`, also over a folder. Remove the one before."""
    replaced = _before(path)
    if os.path.lexists(path):  # also a link that leads nowhere
        if exchange(finished, path):
            replaced = finished
        else:
            os.rename(path, _cleared(replaced))
    if replaced != finished:
        os.rename(finished, path)
    sync_folder(path.parent)
    try:
        _remove(replaced)
    except OSError as error:  # the new one is in place: no reason to call it not written
        log.warning(f"`{replaced}`, which checkpoint `{path}` has replaced, could not be removed: {error}")


def remove(path: Path) -> None:
    """Remove a checkpoint, so that a part of it is never found."""
    path = lying_at(path)
    with ExitStack() as cleanup:
        gone = path.with_name(f".{path.name[:_MOST_CHARS]}.{secrets.token_hex(4)}.partial")
        try:
            cleanup.enter_context(_locked(path))
        except OSError:  # no locks here
            gone = _cleared(path.with_name(f".{path.name}.partial"))
        _remove(path.rename(gone))


def _before(path: Path) -> Path:
    return path.with_name(f"{path.stem}{_REPLACED}{path.suffix}")


def remove_left(folder: Path) -> None:
    """Remove what killed processes have left; what cannot be removed, and what others have made, stay."""
    for left in folder.glob(".*.partial"):
        is_folder = left.is_dir()
        if not is_folder and not _PARTIAL_FILE(left.name):
            continue
        with contextlib.suppress(OSError), _locked(left):
            if not is_folder:
                left.unlink()
            elif all(_IS_OURS(name) for name in os.listdir(left)):
                shutil.rmtree(left)
            else:
                continue
            log.info(f"removed `{left}`, of a checkpoint that a killed run has left unfinished")
    for left in folder.glob(f"*{_REPLACED}*"):
        with contextlib.suppress(OSError, ValueError):  # one that has no other name is not ours
            path = left.with_name(left.name.replace(_REPLACED, ""))
            if path.is_dir() and left.is_dir() and all(_IS_OURS(name) for name in os.listdir(left)):
                _remove(left)  # the crash came after the other one had the name


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    how = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR  # NFS locks files that are open for writing
    fd = os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise FileNotFoundError(f"{path} is another one now")
        try:
            yield
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # also where a forked child still has the folder open
    finally:
        os.close(fd)


def _cleared(path: Path) -> Path:
    _remove(path)
    return path


def _remove(path: Path) -> None:
    """Remove what is there, if anything is; somebody else may be removing it, too."""
    with contextlib.suppress(FileNotFoundError):
        if not os.path.islink(path) and os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()


_STEP_BYTES = 4 * 2**20


def save_file(checkpoint: Mapping[str, Any], target: Path) -> None:
    """Write `checkpoint` straight to a local file, which appears under its name only when it is complete."""
    made = [folder for folder in (target.parent, *target.parent.parents) if not folder.exists()]
    partial = None
    try:
        with unfinished(target, is_file=True) as partial:
            with open(partial, "r+b") as file:
                _torch_save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # it would fill a node of tiers
            if (target / META).is_file():  # a folder of several processes has its name; the file is still locked
                take_place(partial, target)
            else:
                os.replace(partial, target)
        for folder in (target.parent, *(each.parent for each in made)):  # names, too: older state is let go of next
            sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"could not write checkpoint `{target}`: {error.strerror or error}. Free space there or save elsewhere."
        ) from error
    finally:
        if partial is not None:
            with contextlib.suppress(OSError):  # users need the first error; the next save here removes the file
                partial.unlink(missing_ok=True)


def _torch_save(checkpoint: Mapping[str, Any], file: BinaryIO) -> None:
    """Call ``torch.save``, and raise what the file has raised: torch then ends the file, with an error of its own."""
    try:
        torch.save(checkpoint, file)
        return
    except RuntimeError as error:
        first = error.__context__
        if not isinstance(first, (OSError, KeyboardInterrupt)):
            raise
    raise first.with_traceback(None)  # frames of torch would keep memory alive, as would its error as the context


def load_file(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a local checkpoint through a private memory map: its pages count as file cache, not as a second copy.

    It may be larger than memory, as that of state on SSD is. It is read once before, to compare its checksums.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: {path}")
    mmap = zipfile.is_zipfile(path)  # files of torch before 1.6 are not
    try:
        if mmap:
            _check(path)
        with mapping_files_with(_pages):
            loaded = torch.load(path, map_location=map_location, mmap=mmap, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if mmap and "weights_only" in str(error).lower():
            raise needs_code(path, error) from error  # a sound file with other types in it
        raise damaged(path, error) from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint `{path}`: {error.strerror or error}") from error
    except (EOFError, RuntimeError, LookupError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise damaged(path, error) from error
    if not isinstance(loaded, dict):
        raise damaged(path, TypeError(f"it holds a {type(loaded).__name__}, not a dict"))
    return loaded


def needs_code(path: Path, error: Exception) -> CheckpointError:
    # torch's own error advises to run whatever code a file asks for
    lines = [line.strip() for line in str(error).splitlines()]
    asked = next((line for line in lines if "GLOBAL" in line or "WeightsUnpickler" in line), type(error).__name__)
    return CheckpointError(
        f"checkpoint `{path}` was not read: {asked.partition(' Please use')[0]} Reading it could run code. If you "
        "trust whoever has written it, name the class of that value in `torch.serialization.add_safe_globals([...])`"
    )


def _check(path: Path) -> None:
    """Compare the checksums of a file, which torch does not; it writes 0 where it shall compute none."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.CRC:
                continue
            try:
                with archive.open(entry) as part:
                    while part.read(_STEP_BYTES):
                        pass
            except OSError as error:
                raise CheckpointError(f"cannot read checkpoint `{path}`: {error.strerror or error}") from error


def _pages(path: str, nbytes: int) -> torch.UntypedStorage:
    try:
        with open(path, "rb") as file:
            return pages_of_file(file.fileno(), nbytes).tensor((nbytes,), torch.uint8).untyped_storage()
    except OSError as error:
        raise CheckpointError(f"cannot map checkpoint `{path}`: {error.strerror or error}") from error


def damaged(path: Path, error: BaseException) -> CheckpointError:
    text = str(error).strip().splitlines()
    return CheckpointError(
        f"cannot read checkpoint `{path}`: {type(error).__name__}: {text[0] if text else 'it ends early'}. "
        "It is damaged or not a checkpoint: resume from another one."
    )
