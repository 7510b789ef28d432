"""`Recorder`: what host memory held in the last minute, in a file that outlives a process that is killed.

The kernel kills a process for memory without a word, and what it held is gone with it. So a thread writes ten samples a
second to a file in the cache folder, a ring of a minute. A run that ends removes its file; the next one that begins
finds the files of those that were killed, and says what grew. Nothing waits for a disk: after a SIGKILL the pages of
the file are still in memory, only a crash of the machine loses them.
"""

import atexit
import json
import logging
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_cxl.config import private_folder
from lightning_cxl.machine.topology import Topology, read_text
from lightning_cxl.text import format_bytes

log = logging.getLogger(__name__)

NAMES = ("tiers", "rest", "children", "available")
"""Bytes on tiers; of the process besides; that its children (workers of a DataLoader) took; that may still be used."""
_WORDS = {"tiers": "tensors on tiers", "rest": "the rest of the process", "children": "its child processes"}
_PERIOD_S = 0.1
_NUM_SAMPLES, _END_SAMPLES = 600, 50
_HEADER_BYTES = 4096
_SAMPLE = struct.Struct(f"d{len(NAMES)}q")
_BY_KERNEL = "was killed by the kernel, as memory was full"
_SHOWN_BYTES = 64 << 20  # less is no reason
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Recorder:
    """Writes samples until `close`, which removes the file, or until the object is gone whose method `stats` is.

    ``stats()["tiers"]`` has ``used_bytes`` of each tier.
    """

    def __init__(self, topology: Topology, stats: Callable[[], dict[str, Any]]) -> None:
        self._topology = topology
        self._stats = weakref.WeakMethod(stats)  # a thread must not keep memory that nobody uses any more
        self._path = _folder() / f"{os.getpid()}-{id(self):x}"
        self._pid = os.getpid()
        self._ends = threading.Event()
        self._at_first: dict[int, int] = {}  # bytes of children when they were seen first: those of a fork are ours
        size = _HEADER_BYTES + _NUM_SAMPLES * _SAMPLE.size
        header = {"pid": self._pid, "started": _start_of(self._pid), "began": time.time()}
        header |= {"command": " ".join(sys.argv)[:1000], "boot": _boot(), "oom_kills": _oom_kills()}
        with self._path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a write to a page without a place on the disk would kill us
            self._memory = mmap.mmap(file.fileno(), size)
        self._memory[:_HEADER_BYTES] = json.dumps(header).encode().ljust(_HEADER_BYTES)
        self._thread = threading.Thread(target=self._run, name="lightning_cxl recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a process that ends without `close` was not killed

    def _run(self) -> None:
        number = 0
        while (stats := self._stats()) is not None:
            tiers = sum(tier["used_bytes"] for tier in stats()["tiers"].values())
            del stats
            offset = _HEADER_BYTES + number % _NUM_SAMPLES * _SAMPLE.size
            self._memory[offset : offset + _SAMPLE.size] = _SAMPLE.pack(time.time(), *self._sample(tiers))
            number += 1
            if self._ends.wait(_PERIOD_S):
                return
        atexit.unregister(self.close)
        self._path.unlink(missing_ok=True)

    def _sample(self, tiers: int) -> tuple[int, int, int, int]:
        resident = {pid: _resident(pid) for pid in _children(self._pid)}
        self._at_first = {pid: self._at_first.get(pid, nbytes) for pid, nbytes in resident.items()}
        children = sum(max(0, nbytes - self._at_first[pid]) for pid, nbytes in resident.items())
        return tiers, max(0, _resident(self._pid) - tiers), children, self._topology.host_available_bytes()

    def close(self, *, after_error: bool = False) -> None:
        """Stop, and remove the file. After an error, say so if the kernel has killed a process. Idempotent."""
        if os.getpid() != self._pid:  # forked: file and thread are the parent's
            return
        if self._ends.is_set():
            return
        atexit.unregister(self.close)
        self._ends.set()
        self._thread.join()
        self._memory.close()
        header, samples = _read(self._path)
        self._path.unlink(missing_ok=True)
        if after_error and header is not None and samples and _oom_kills() > header["oom_kills"]:
            log.warning(f"the kernel has killed a process for memory: {describe(header, samples, 'ended')}")


def start(topology: Topology, stats: Callable[[], dict[str, Any]]) -> Recorder | None:
    """Say which trainings the kernel has killed for memory, and record this one; None where that cannot be.

    Others that were killed, such as ranks beside one that failed, are for whoever asks (`last`).
    """
    try:
        for text in killed():
            if _BY_KERNEL in text:
                log.warning(text)
        return Recorder(topology, stats) if topology.root == Path("/") else None
    except OSError as error:
        log.info(f"memory is not recorded for the case that the kernel kills this process: {error}")
        return None


def killed() -> list[str]:
    """Return what happened to trainings that were killed since this was asked last; one is kept for `last`."""
    found = []
    for path in _folder().glob("*-*"):
        header, samples = _read(path)
        if header is None or not samples or _start_of(header["pid"]) == header["started"]:
            continue  # it is being written, or goes on
        with suppress(FileNotFoundError):  # another process has said so
            path.replace(path.parent / "last")
            found.append((samples[-1][0], describe(header, samples)))
    return [text for _, text in sorted(found)]


def last() -> str:
    """Return what happened to the training that was killed last."""
    newer = killed()
    header, samples = _read(_folder() / "last")
    if header is None:
        return "no training of this user on this machine was killed"
    return newer[-1] if newer else describe(header, samples)


def describe(header: Mapping[str, Any], samples: list[tuple[float, dict[str, int]]], who: str = "was killed") -> str:
    (first_s, first), stop_s = samples[0], samples[-1][0]
    # the fullest moment of the last seconds: the kernel may have killed a child before
    last_s, end = max(samples[-_END_SAMPLES:], key=lambda sample: sum(sample[1][name] for name in _WORDS))
    begin, stop = (time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each)) for each in (header["began"], stop_s))
    kills = _oom_kills() - header["oom_kills"]
    if header["boot"] != _boot():
        who = "was ended by the machine, which has started anew"
    elif who != "ended" and kills > 0 and end["available"] < sum(end[name] for name in _WORDS) // 10:
        who = _BY_KERNEL
    grown = {name: end[name] - first[name] for name in _WORDS}
    most = max(grown, key=lambda name: grown[name])
    growth = ""
    if grown[most] > _SHOWN_BYTES:
        growth = f" Within {last_s - first_s:.0f} s {_WORDS[most]} grew by {format_bytes(grown[most])}."
    held = ", ".join(f"{text} had {format_bytes(end[name])}" for name, text in _WORDS.items())
    return (
        f"a training ({header['command']}, process {header['pid']}, begun {begin}) {who} at {stop}: {held}, and "
        f"{format_bytes(end['available'])} could still be used.{growth}"
    )


def _read(path: Path) -> tuple[dict[str, Any] | None, list[tuple[float, dict[str, int]]]]:
    try:
        data = path.read_bytes()
        header = json.loads(data[:_HEADER_BYTES])
    except (OSError, ValueError):
        return None, []
    found = [_SAMPLE.unpack_from(data, at) for at in range(_HEADER_BYTES, len(data) - _SAMPLE.size + 1, _SAMPLE.size)]
    return header, sorted((when, dict(zip(NAMES, values, strict=True))) for when, *values in found if when)


def _folder() -> Path:
    return private_folder("recorder")


def _boot() -> str:
    return read_text(Path("/proc/sys/kernel/random/boot_id")) or ""


def _start_of(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; empty where there is none."""
    fields = (read_text(Path(f"/proc/{pid}/stat")) or "").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


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
