"""Processes that tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import apart
from tests.distributed.ranks import Processes, Ranks


class Pool:
    """Ranks by their number and device."""

    def __init__(self, folder: Path) -> None:
        self._processes = {device: Processes(device, folder) for device in ("cpu", "apart")}

    def of(self, world: int, device: str = "cpu") -> Ranks:
        if device == "apart" and (why := apart.why_unavailable()):
            pytest.skip(why)
        return Ranks(self._processes[device], world)

    def part(self) -> None:
        for each in self._processes.values():
            each.part()

    def close(self) -> None:
        for each in self._processes.values():
            each.close()


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Give processes that last until the tests of the folder are done: each takes seconds to import torch."""
    pool = Pool(tmp_path_factory.mktemp("meetings"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> Iterator[Pool]:
    """Give the processes; the groups are those of one file."""
    yield pool
    pool.part()
