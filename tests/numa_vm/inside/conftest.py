"""What the tests in a guest share: the machine as the launcher made it, and as the package sees it."""

import os
from pathlib import Path

import pytest

from lightning_cxl import Topology
from lightning_cxl.memory.host_memory import HostMemory
from tests.numa_vm.inside.located import Recorder
from tests.numa_vm.machine import MACHINES, Machine

_MACHINE = MACHINES[os.environ["NUMA_VM"]]
_SEVERAL_SOCKETS = len(_MACHINE.sockets) > 1
collect_ignore = [
    path.name for path in Path(__file__).parent.glob("test_*.py") if (path.name == "test_ranks.py") != _SEVERAL_SOCKETS
]


@pytest.fixture(scope="session")
def machine() -> Machine:
    return _MACHINE


@pytest.fixture(scope="session")
def cards(machine) -> tuple[int, ...]:
    """Return the ids of the memory-only nodes."""
    return tuple(node_id for node_id, node in enumerate(machine.nodes) if not node.cpus)


@pytest.fixture(scope="session")
def topology() -> Topology:
    return Topology.detect(on_missing_tier="error")


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    """Note every buffer that any host memory hands out during the test."""
    recorder = Recorder()
    allocate = HostMemory.allocate

    def noting(memory, nbytes, placement, role, **options):
        return recorder.add(allocate(memory, nbytes, placement, role, **options), placement, role)

    monkeypatch.setattr(HostMemory, "allocate", noting)
    return recorder
