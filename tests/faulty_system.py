"""System calls of storage that fail on purpose, and a log of them from which a power loss can be replayed."""

import errno
import fcntl
import itertools
import mmap
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from lightning_cxl.storage.drive import System

BLOCK = 4096
FAULTS = ("EIO", "ENOSPC", "EROFS", "short", "none moved", "flip", "late", "behind the next", "vanish", "EIO for good")
_LATE_S = 0.01


class FaultySystem(System):
    """Does what `System` does, and one of `FAULTS` at the call with a number, from 0."""

    def __init__(self, fault: str | None = None, at: int = -1) -> None:
        self.fault = fault
        self.at = at
        self.calls: list[str] = []
        self.open_files: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._next = threading.Event()

    def _call(self, name, function, *args):
        with self._lock:
            number = len(self.calls)
            self.calls.append(name)
        if number > self.at >= 0:
            self._next.set()
        if number == self.at or (self.fault == "EIO for good" and number > self.at >= 0 and name not in HARMLESS):
            return self._fail(name, function, *args)
        return function(*args)

    def _fail(self, name, function, *args):
        moves = name in ("preadv", "pwritev")
        match self.fault:
            case "EIO for good" | "EIO" | "ENOSPC" | "EROFS":
                if name == "close":
                    function(*args)  # the kernel gives a descriptor back, also with an error
                code = getattr(errno, self.fault.split()[0])
                raise OSError(code, os.strerror(code))
            case "late":
                time.sleep(_LATE_S)
            case "behind the next":
                self._next.wait(_LATE_S)
            case "none moved" if moves:
                return 0
            case "short" if moves:
                fd, views, offset = args
                unit = 1 if views[0].nbytes % BLOCK else BLOCK  # direct transfers are of whole blocks
                return function(fd, [views[0][: -(-views[0].nbytes // (2 * unit)) * unit]], offset)
            case "flip" if name == "preadv":
                count = function(*args)
                if count:
                    args[1][0][0] ^= 4
                return count
            case "flip" if name == "pwritev":
                fd, views, offset = args
                with mmap.mmap(-1, views[0].nbytes) as other, memoryview(other) as flipped:
                    flipped[:] = views[0]
                    flipped[0] ^= 4
                    return function(fd, [flipped, *views[1:]], offset)
            case "vanish":
                path = self.open_files.get(args[0], args[0])
                if isinstance(path, Path) and path.is_file():
                    path.unlink()
        return function(*args)

    def open(self, path, flags):
        fd = self._call("open", super().open, path, flags)
        self.open_files[fd] = path
        return fd

    def close(self, fd):
        self._call("close", super().close, fd)
        self.open_files.pop(fd, None)

    def datasync(self, fd):
        self._call("datasync", lambda fd: None, fd)  # tests lose no power, but time

    def sync(self, fd):
        self._call("sync", lambda fd: None, fd)

    def lock(self, fd, operation):
        self._call("unlock" if operation == fcntl.LOCK_UN else "lock", super().lock, fd, operation)


def _failing(name):
    return lambda self, *args: self._call(name, getattr(super(FaultySystem, self), name), *args)


for _each in ("preadv", "pwritev", "allocate", "stat", "make_folder", "names", "rename", "unlink"):
    setattr(FaultySystem, _each, _failing(_each))
HARMLESS = ("close", "unlock")


@dataclass
class Entry:
    """One change of files, and when it began and ended: numbers that count up."""

    kind: str
    file: int
    """Number of the file or folder."""
    begin: int
    end: float = float("inf")
    offset: int = 0
    contents: bytes = b""
    names: tuple[Path, ...] = ()


class LoggingSystem(System):
    """Notes every change of a file or folder, so that `lose_power` can make what a disk may hold afterwards."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.now = 0
        """The time now, for `lose_power`."""
        self._files: dict[Path, int] = {}
        self._open: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def _file(self, path):
        if path not in self._files:
            self._files[path] = next(self._numbers)
        return self._files[path]

    def _begun(self, kind, file, **fields):
        with self._lock:
            self.now += 1
            self.log.append(Entry(kind, file, self.now, **fields))
            return self.log[-1]

    def _ended(self, entry):
        with self._lock:
            self.now += 1
            entry.end = self.now

    def _note(self, *entry, **fields):
        self._ended(self._begun(*entry, **fields))

    def open(self, path, flags):
        new = bool(flags & os.O_CREAT) and not path.exists()
        fd = super().open(path, flags)
        if new:
            self._files.pop(path, None)
            self._note("create", self._file(path), names=(path,))
        elif flags & os.O_TRUNC:
            self._note("truncate", self._file(path))
        self._open[fd] = self._file(path)
        return fd

    def pwritev(self, fd, views, offset):
        entry = self._begun("write", self._open[fd], offset=offset, contents=b"".join(bytes(view) for view in views))
        count = super().pwritev(fd, views, offset)
        self._ended(entry)
        return count

    def allocate(self, fd, offset, nbytes):
        super().allocate(fd, offset, nbytes)
        self._note("allocate", self._open[fd], offset=offset + nbytes)

    def datasync(self, fd):
        self._note("sync", self._open[fd])

    sync = datasync

    def rename(self, old, new):
        super().rename(old, new)
        file = self._files[new] = self._files.pop(old)
        self._note("rename", file, names=(old, new))

    def unlink(self, path):
        super().unlink(path)
        self._note("unlink", self._files.pop(path, 0), names=(path,))

    def lose_power(self, now, random, share):
        """Write to empty folders what disks may hold if power was lost at time `now`: any part of what was not synced.

        Each such block, or change of a name, is there with probability `share`. Changes of names keep their order.
        """
        begun = [entry for entry in self.log if entry.begin <= now]
        folder_of = {path: self._files.get(path.parent) for entry in begun for path in entry.names}

        syncs = [entry for entry in begun if entry.kind == "sync" and entry.end <= now]

        def lies_there(entry, file):
            synced = any(sync.file == file and sync.begin > entry.end for sync in syncs)
            return synced or random.random() < share

        contents: dict[int, bytearray] = {}
        names: dict[Path, int] = {}
        for entry in begun:
            data = contents.setdefault(entry.file, bytearray())
            if entry.kind == "write":
                for start in range(0, len(entry.contents), BLOCK):
                    if lies_there(entry, entry.file):
                        block, at = entry.contents[start : start + BLOCK], entry.offset + start
                        data.extend(bytes(max(0, at + len(block) - len(data))))
                        data[at : at + len(block)] = block
            elif entry.kind == "allocate" and lies_there(entry, entry.file):
                data.extend(bytes(max(0, entry.offset - len(data))))
            elif entry.kind == "truncate" and lies_there(entry, entry.file):
                data.clear()
            elif entry.kind in ("create", "rename", "unlink") and lies_there(entry, folder_of[entry.names[-1]]):
                for path in entry.names:
                    names.pop(path, None)
                if entry.kind != "unlink":
                    names[entry.names[-1]] = entry.file
        for path, file in names.items():
            path.write_bytes(contents[file])
