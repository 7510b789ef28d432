"""`Recorder`: what host memory held in the last minute, in a file that outlives a process that is killed.

The kernel kills a process for memory without a word. So a thread writes ten samples a second to a file in the cache
folder, a ring of a minute. A run that ends removes its file; the next one that begins finds the files of those that
were killed, and says what grew. Nothing waits for a disk: only a crash of the machine loses the pages of the file.
"""

import fcntl
import itertools
import json
import logging
import os
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from lightning_cxl.config import private_folder
from lightning_cxl.machine.topology import Topology, read_text
from lightning_cxl.text import format_bytes

log = logging.getLogger(__name__)

NAMES = ("tiers", "rest", "children", "available")
"""Bytes on tiers; of the process besides; that its children (workers of a DataLoader) took; that may still be used."""
WORDS = {"tiers": "tensors on tiers", "rest": "the rest of the process", "children": "its child processes"}
_PERIOD_S = 0.1
_NUM_SAMPLES, _END_SAMPLES = 600, 50
_HEADER_BYTES = 4096
_SAMPLE = struct.Struct(f"d{len(NAMES)}q")
_BY_KERNEL = "was killed by the kernel, as memory was full"
_SHOWN_BYTES = 64 << 20  # less is no reason
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


_open: set[int] = set()  # files of this process; a forked child would keep their locks


def _close_in_child() -> None:
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)


class Recorder:
    """Writes samples until `close`, which removes the file, or until the object is gone whose method `stats` is.

    ``stats()["tiers"]`` has ``used_bytes`` of each tier. The file is locked as long as its process lives, on whichever
    machine, and in whichever container, that shares the folder.
    """

    def __init__(
        self, topology: Topology, stats: Callable[[], dict[str, Any]], begin_thread: Callable[[], None]
    ) -> None:
        self._topology = topology
        self._begin_thread = begin_thread  # pinned memory that is collected there belongs to a device
        self._stats = weakref.WeakMethod(stats)  # a thread must not keep memory that nobody uses any more
        self._pid = os.getpid()
        self._ends = threading.Event()
        self._at_first: dict[int, int] = {}  # bytes of children when they were seen first: those of a fork are ours
        header = {"pid": self._pid, "began": time.time(), "began_s": time.monotonic(), "boot": _boot()}
        self._oom_kills = _oom_kills()
        header |= {"oom_kills": self._oom_kills, "command": " ".join(sys.argv)[:300], "node": os.uname().nodename}
        self._file, made = tempfile.mkstemp(prefix="new-", dir=_folder())
        _open.add(self._file)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            # not by a mapping: a full disk or a file server that is gone would be a signal, which ends the training
            os.pwrite(self._file, json.dumps(header).encode().ljust(_HEADER_BYTES), 0)
            self._path = Path(made).rename(made.replace("new-", "run-"))
        except OSError:
            self._close_file()
            os.unlink(made)
            raise
        self._thread = threading.Thread(target=self._run, name="lightning_cxl recorder", daemon=True)
        self._thread.start()
        # a process that ends without `close` was not killed; `atexit` does not know children of multiprocessing
        self._finalizer = Finalize(None, self.close, exitpriority=0)

    def _run(self) -> None:
        self._begin_thread()
        del self._begin_thread
        for number in itertools.count():
            if (stats := self._stats()) is None:
                break
            tiers = sum(tier["used_bytes"] for tier in stats()["tiers"].values())
            del stats
            sample = _SAMPLE.pack(time.monotonic(), *self._sample(tiers))
            with suppress(OSError):
                os.pwrite(self._file, sample, _HEADER_BYTES + number % _NUM_SAMPLES * _SAMPLE.size)
            if self._ends.wait(_PERIOD_S):
                return
        self._finalizer.cancel()
        self._remove()
        self._close_file()

    def _sample(self, tiers: int) -> tuple[int, int, int, int]:
        resident = {pid: _resident(pid) for pid in _children(self._pid)}
        self._at_first = {pid: self._at_first.get(pid, nbytes) for pid, nbytes in resident.items()}
        children = sum(max(0, nbytes - self._at_first[pid]) for pid, nbytes in resident.items())
        return tiers, max(0, _resident(self._pid) - tiers), children, self._topology.host_available_bytes()

    def samples(self) -> list[tuple[float, dict[str, int]]]:
        """Return bytes by what holds them, by the time of day, of the last minute; every tenth sample."""
        with suppress(OSError, ValueError):
            return _read(self._path)[1][::10]
        return []

    def _remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._file in _open:
            _open.remove(self._file)
            os.close(self._file)

    def close(self, *, after_error: bool = False) -> None:
        """Stop, and remove the file. After an error, say so if the kernel has killed a process. Idempotent."""
        if os.getpid() != self._pid or self._ends.is_set():  # forked: file and thread are the parent's
            return
        self._ends.set()
        said = _said(self._path, "ended") if after_error and _oom_kills() > self._oom_kills else None
        self._remove()
        self._finalizer.cancel()
        self._thread.join()
        self._close_file()
        if said is not None:
            log.warning(f"the kernel has killed a process for memory: {said[1]}")


def start(topology: Topology, stats: Callable[[], dict[str, Any]], begin_thread: Callable[[], None]) -> Recorder | None:
    """Say which trainings the kernel has killed for memory, and record this one; None where that cannot be.

    Others that were killed, such as ranks beside one that failed, are for whoever asks (`last`).
    """
    if topology.root != Path("/"):
        return None
    try:
        for text in killed():
            if _BY_KERNEL in text:
                log.warning(text)
        return Recorder(topology, stats, begin_thread)
    except Exception as error:  # whatever it is, the training goes on without
        log.info(f"memory is not recorded for the case that the kernel kills this process: {error!r}")
        return None


def killed() -> list[str]:
    """Return what happened to trainings that were killed since this was asked last; the latest is kept for `last`."""
    found = []
    for path in _folder().glob("run-*"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # fails while its process lives; NFS locks as it is open
            if (said := _said(path)) is None:
                path.unlink()
            elif said[2]:
                found.append((*said, path))
    texts = []
    for _, text, _, path in sorted(found):
        with suppress(OSError):  # another process has said so
            path.replace(path.parent / "last")
            texts.append(text)
    return texts


def last() -> str:
    killed()
    said = _said(_folder() / "last")
    return "no training of this user on this machine was killed" if said is None else said[1]


def _said(path: Path, who: str = "was killed") -> tuple[float, str, bool] | None:
    """Return when a training was seen last, what happened to it, and whether here; None if its file does not say."""
    try:
        header, samples = _read(path)
        is_here = header["boot"] == _boot() or header["node"] == os.uname().nodename
        return samples[-1][0], _describe(header, samples, who), is_here
    except (OSError, LookupError, TypeError, ValueError, OverflowError):  # of another version, or damaged
        return None


def _describe(header: Mapping[str, Any], samples: list[tuple[float, dict[str, int]]], who: str) -> str:
    (first_s, first), stop_s = samples[0], samples[-1][0]
    # the fullest moment of the last seconds: the kernel may have killed a child before
    last_s, end = max(samples[-_END_SAMPLES:], key=lambda sample: sum(sample[1][name] for name in WORDS))
    begin, stop = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each)) for each in (header["began"], stop_s))
    kills = _oom_kills() - header["oom_kills"]
    if header["boot"] != _boot():
        who = "was ended by the machine, which has started anew"
    elif who != "ended" and kills > 0 and end["available"] < sum(end[name] for name in WORDS) // 10:
        who = _BY_KERNEL
    grown = {name: end[name] - first[name] for name in WORDS}
    most = max(grown, key=lambda name: grown[name])
    growth = ""
    if grown[most] > _SHOWN_BYTES:
        growth = f" Within {last_s - first_s:.0f} s {WORDS[most]} grew by {format_bytes(grown[most])}."
    held = ", ".join(f"{text} had {format_bytes(end[name])}" for name, text in WORDS.items())
    return (
        f"a training ({header['command']}, process {header['pid']}, begun {begin}) {who} at {stop}: {held}, and "
        f"{format_bytes(end['available'])} could still be used.{growth}"
    )


def _read(path: Path) -> tuple[dict[str, Any], list[tuple[float, dict[str, int]]]]:
    """Return what a file says of its process, and samples by the time of day, in order."""
    data = path.read_bytes()
    header = json.loads(data[:_HEADER_BYTES])
    offset = header["began"] - header["began_s"]
    found = [_SAMPLE.unpack_from(data, at) for at in range(_HEADER_BYTES, len(data) - _SAMPLE.size + 1, _SAMPLE.size)]
    samples = [(offset + when, dict(zip(NAMES, values, strict=True))) for when, *values in found if when]
    return header, sorted(samples, key=lambda sample: sample[0])


def _folder() -> Path:
    return private_folder("recorder")


def _boot() -> str:
    return read_text(Path("/proc/sys/kernel/random/boot_id")) or ""


def _resident(pid: int) -> int:
    fields = (read_text(Path(f"/proc/{pid}/statm")) or "").split()
    return int(fields[1]) * _PAGE_BYTES if len(fields) > 1 else 0


def _children(pid: int) -> Iterator[int]:
    """Yield the processes that the main thread of a process has started, and theirs."""
    for each in (read_text(Path(f"/proc/{pid}/task/{pid}/children")) or "").split():
        yield int(each)
        yield from _children(int(each))


def _oom_kills() -> int:
    for line in (read_text(Path("/proc/vmstat")) or "").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
