"""`Machines`: which ranks run on one machine, as they find themselves: launchers say it in different words, or not."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.agreement import on_all_ranks


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job.

    Args:
        of_rank: the number of the machine of each rank; machines are numbered in the order of their first ranks.
    """

    of_rank: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[tuple[str, str]]) -> "Machines":
        """Return the machines of ranks that know them under these names."""
        numbers: dict[tuple[str, str], int] = {}
        return cls(tuple(numbers.setdefault(each, len(numbers)) for each in names))

    @property
    def count(self) -> int:
        """How many there are."""
        return max(self.of_rank) + 1

    def num_ranks_beside(self, rank: int) -> int:
        """Return how many ranks run on the machine of a rank, that one too."""
        return self.of_rank.count(self.of_rank[rank])

    def local_rank(self, rank: int) -> int:
        """Return the number of a rank among those of its machine."""
        return self.of_rank[:rank].count(self.of_rank[rank])

    def num_ranks_of_each(self) -> int:
        """Return how many ranks each machine has, where a mesh is to have a copy of the state on each."""
        num, rest = divmod(len(self.of_rank), self.count)
        if rest or self.of_rank != tuple(rank // num for rank in range(len(self.of_rank))):
            raise UnsupportedError(
                "`replicate_machines` needs as many processes on each machine, numbered one after the other there, and "
                f"the machines of the ranks are {list(self.of_rank)}: start them so (`srun --distribution=block`), or "
                "leave the option out"
            )
        return num


def find_machines() -> Machines:
    """Return the machines of all ranks, as these find themselves. Every rank calls this, with the process group up."""
    return Machines.of(on_all_ranks(_own_names))


def _own_names(root: Path = Path("/")) -> tuple[str, str]:
    """Return the boot id and the host name. Containers of a machine count as machines: each has limits of its own."""
    try:
        return (root / "proc/sys/kernel/random/boot_id").read_text().strip(), os.uname().nodename
    except OSError as error:
        raise UnsupportedError(
            f"the kernel does not say on which machine this process runs: {error}. Show the process its /proc"
        ) from error
