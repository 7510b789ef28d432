"""Which ranks of a group run on one machine and can map each other's memory, as far as names can tell.

A process opens the memory of another one through ``/proc``, so both must run under one kernel and in one namespace of
process ids. The last word has the opening itself, see `memory/shared.py`: clones of a virtual machine may have one
boot id, and containers may hide processes from each other.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


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
    """Return where this process runs.

    Raises:
        OSError: there is no ``/proc``, or it hides what is asked for.
    """
    boot_id = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    return Place(boot_id, os.readlink(root / "proc/self/ns/pid"), os.uname().nodename)


def gather_objects(mine: _T, group: Any) -> list[_T]:
    """Return what all ranks of a group give, in the order of the ranks. All ranks must call it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def why_apart(places: Sequence[Place]) -> str | None:
    """Return why these ranks do not share one machine's memory, naming one rank that is elsewhere; None if they do."""
    for rank, place in enumerate(places):
        if not places[0].reaches(place):
            what = "another machine" if place.boot_id != places[0].boot_id else "another namespace of process ids"
            return f"rank {rank} of the group runs in {what} (`{place.host}`) than rank 0 (`{places[0].host}`)"
    return None
