"""What the one thread beside the device takes first: groups that have landed, then the update that is needed first."""

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Event
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_cxl.gradients.offload import GradientGroup, HostWorker


def copy_to_host(landed):
    """A copy that has landed, or does so when somebody waits for it."""
    event = Event()
    if landed:
        event.set()
    return SimpleNamespace(done=event.is_set, wait_host=event.set)


class ByHand:
    """An executor whose thread runs when the test lets it."""

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, job):
        self.jobs.append(job)

    def run(self, count=None) -> None:
        for job in self.jobs[:count]:
            job()
        del self.jobs[:count]


def group(ran, name, landed=True) -> GradientGroup:
    def accumulate(each: GradientGroup) -> None:
        each.transfer.wait_host()
        ran.append(name)

    return GradientGroup(frozenset(), False, copy_to_host(landed), [], accumulate)


def test_behind_a_backward_that_is_faster_the_unit_that_is_needed_first_is_updated_first():
    """The last of four units comes first in a backward; while it is updated, the gradients of all others land."""
    ran, by_hand = [], ByHand()
    worker = HostWorker(by_hand)
    for unit in (3, 2, 1, 0):
        worker.accumulate(group(ran, f"g{unit}"))
        worker.update(unit, partial(ran.append, unit), Future())
        if unit == 3:
            by_hand.run()
    by_hand.run()
    assert ran == ["g3", 3, "g2", "g1", "g0", 0, 1, 2]


def test_an_update_runs_while_the_next_gradients_are_copied():
    ran, by_hand = [], ByHand()
    worker = HostWorker(by_hand)
    worker.accumulate(group(ran, "g1"))
    worker.update(1, partial(ran.append, 1), Future())
    worker.accumulate(group(ran, "g0", landed=False))
    worker.update(0, partial(ran.append, 0), Future())
    by_hand.run()
    assert ran == ["g1", 1, "g0", 0]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(-1, 9), st.integers(0, 3)), max_size=40))
def test_every_update_finds_all_gradients_that_were_copied_before_it(events):
    ran, by_hand, expected = [], ByHand(), {}
    worker = HostWorker(by_hand)
    groups = 0
    for number, (is_group, landed, order, count) in enumerate(events):
        if is_group:
            worker.accumulate(group(ran, ("group", groups), landed))
            groups += 1
        else:
            expected[number] = groups
            worker.update(order, partial(ran.append, ("update", number)), Future())
        by_hand.run(count)
    by_hand.run()
    assert [name for kind, name in ran if kind == "group"] == list(range(groups))
    assert sorted(name for kind, name in ran if kind == "update") == sorted(expected)
    for number, before in expected.items():
        assert ran[: ran.index(("update", number))].count(("group", before - 1)) == (before > 0)


def test_errors_are_raised_where_the_results_are_waited_for_and_the_thread_goes_on():
    def fails(*_: object) -> None:
        raise MemoryError("full")

    with ThreadPoolExecutor(1) as executor:
        worker = HostWorker(executor)
        bad = GradientGroup(frozenset(), False, copy_to_host(True), [], fails)
        worker.accumulate(bad)
        updates = [Future() for _ in range(2)]
        worker.update(0, fails, updates[0])
        worker.update(1, list, updates[1])
        with pytest.raises(MemoryError):
            bad.wait()
        with pytest.raises(MemoryError):
            updates[0].result()
        assert updates[1].result() is None
