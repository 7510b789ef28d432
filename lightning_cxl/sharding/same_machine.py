"""Which ranks of a group run on one machine and can map each other's memory, as far as names can tell.

A process opens the memory of another one through ``/proc``, so both must run under one kernel and in one namespace of
process ids. The last word has the opening itself, see `memory/shared.py`: clones of a virtual machine may have one
boot id, and containers may hide processes from each other.
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning_cxl.errors import UnsupportedError

_ORDERED_STORES = ("x86_64", "AMD64")  # [Note: Turns at shared weights]


class Place(NamedTuple):
    """Where a process runs; equal where two can see each other."""

    boot_id: str
    namespace: str
    """Of process ids."""
    host: str
    """The name of the machine, or of the container."""

    def reaches(self, other: "Place") -> bool:
        """Return whether a process there can open what a process here has open."""
        return (self.boot_id, self.namespace) == (other.boot_id, other.namespace)


def own_place(root: Path = Path("/")) -> Place:
    """Return where this process runs."""
    try:
        boot_id = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        return Place(boot_id, os.readlink(root / "proc/self/ns/pid"), os.uname().nodename)
    except OSError as error:
        raise UnsupportedError(
            f"the kernel does not say where this process runs, so nobody knows which ranks share a machine: {error}. "
            "Show the process its /proc."
        ) from error


def why_apart(places: Sequence[Place]) -> str | None:
    """Return why these ranks have no use for one machine's memory, naming one that is elsewhere; None if they have."""
    if len(places) == 1:
        return "one rank has the whole weights, so nothing is gathered"
    for rank, place in enumerate(places):
        if not places[0].reaches(place):
            what = "another machine" if place.boot_id != places[0].boot_id else "another namespace of process ids"
            return f"rank {rank} of the group runs in {what} (`{place.host}`) than rank 0 (`{places[0].host}`)"
    if platform.machine() not in _ORDERED_STORES:
        return f"a CPU of the kind {platform.machine()} may show another process a counter before what it counts"
    return None
