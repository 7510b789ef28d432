"""Processes that tests of one file share."""

from collections.abc import Iterator

import pytest

from tests import apart
from tests.distributed.ranks import Ranks


class Pool:
    """Ranks by their number, started when they are asked for, and anew after an error."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], Ranks] = {}

    def of(self, world: int, device: str = "cpu") -> Ranks:
        """Return `world` ranks, each with a device of this kind."""
        found = self._ranks.get((world, device))
        if found is None or not found.is_alive:
            if device == "apart" and (why := apart.why_unavailable()):
                pytest.skip(why)
            found = self._ranks[world, device] = Ranks(world, device)
        return found

    def close(self) -> None:
        """End all processes."""
        while self._ranks:
            self._ranks.popitem()[1].close()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Give the processes of this file."""
    pool = Pool()
    yield pool
    pool.close()
