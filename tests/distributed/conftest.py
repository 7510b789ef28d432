"""Processes that tests of one file share."""

from collections.abc import Iterator

import pytest

from tests.distributed.ranks import Ranks


class Pool:
    """Ranks by their number, started when they are asked for, and anew after an error."""

    def __init__(self) -> None:
        self._ranks: dict[int, Ranks] = {}

    def of(self, world: int) -> Ranks:
        """Return `world` ranks."""
        found = self._ranks.get(world)
        if found is None or not found.is_alive:
            found = self._ranks[world] = Ranks(world)
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
