"""Machines of a job are counted by where its processes are."""

import pytest

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.processes import Machines


def machines(names):
    """Return the machines of ranks, a letter for each; a capital is a container on the machine."""
    return Machines.of([(name.lower(), name) for name in names])


def test_ranks_are_numbered_on_their_machine():
    found = machines("abba")
    assert found.of_rank == (0, 1, 1, 0)
    assert found.count == 2
    assert [found.local_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [found.num_ranks_beside(rank) for rank in range(4)] == [2, 2, 2, 2]


def test_containers_count_as_machines():
    assert machines("aA").count == 2


@pytest.mark.parametrize(("names", "each"), [("aaaa", 4), ("aabb", 2), ("abcd", 1)])
def test_a_mesh_of_machines_needs_as_many_ranks_on_each(names, each):
    assert machines(names).num_ranks_of_each() == each


@pytest.mark.parametrize("names", ["aaab", "abab", "aab"])
def test_other_orders_are_refused(names):
    with pytest.raises(UnsupportedError, match=r"numbered one after the other.*\[0, "):
        machines(names).num_ranks_of_each()
