"""Threads, teams and CPUs of the Adam kernel: they change where work is done and never what comes out."""

import contextlib
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.numerics.adam_case import COMBINATIONS, ISAS, Case, examples, scalars_at, seeds, step_scalars, update

CPUS = sorted(os.sched_getaffinity(0))
SIZES = st.integers(0, 70_000) | st.integers(0, 70) | st.sampled_from([255, 256, 257, 65535, 65536, 65537, 131_072])
TEAMS = st.integers(0, 3) | st.just(1023)


@examples(60)
@given(
    spans=st.lists(st.tuples(SIZES, st.sampled_from(COMBINATIONS), TEAMS), min_size=1, max_size=12),
    seed=seeds,
    num_threads=st.integers(1, 9),
    rows=st.lists(step_scalars, min_size=1, max_size=3),
    cpus=st.none() | st.lists(st.tuples(TEAMS, st.sampled_from([*CPUS, 1023])), max_size=6),
)
def test_many_spans_of_mixed_formats_equal_one_call_each(spans, seed, num_threads, rows, cpus):
    """For any division into teams, with or without spans or CPUs, and CPUs that may not be there."""
    ours = [Case.random(size, combination, seed + index) for index, (size, combination, _) in enumerate(spans)]
    expected = [case.clone().run(rows[index % len(rows)]) for index, case in enumerate(ours)]
    table = [case.span(index % len(rows), spans[index][2]) for index, case in enumerate(ours)]
    before = affinities()
    update(table, rows, ISAS[-1], num_threads, None if cpus is None else [number for pair in cpus for number in pair])
    assert_moved_back(before)
    for case, other in zip(ours, expected, strict=True):
        case.assert_same(other, (num_threads, spans, cpus))


def test_a_thousand_small_spans():
    ours = [Case.random(index % 23, COMBINATIONS[index % 36], index) for index in range(1000)]
    expected = [case.defined(scalars_at()) if index % 50 == 0 else None for index, case in enumerate(ours)]
    singly = [case.clone().run(scalars_at()) for case in ours]
    update([case.span(team=index % 3) for index, case in enumerate(ours)], [scalars_at()], num_threads=4)
    for case, other, defined in zip(ours, singly, expected, strict=True):
        case.assert_same(other)
        if defined:
            case.assert_same(defined)


@pytest.fixture(params=[1, 8], ids=["own threads", "threads of torch"])
def _which_threads(request):
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_which_threads")
@pytest.mark.parametrize("number", range(len(COMBINATIONS)))
def test_the_number_of_threads_does_not_matter(number):
    """A chunk that is left out keeps its values, one that has two turns gets another momentum."""
    num_chunks = (1, 2, 3, 4, 5, 8)[number % 6] if number else 33
    start = Case.random((num_chunks - 1) * 65536 + 77, COMBINATIONS[number], number)
    expected = start.clone().run(scalars_at())
    for num_threads in (2, 3, 5, 64):
        start.clone().run(scalars_at(), num_threads=num_threads).assert_same(expected, num_threads)


def test_several_updates_at_once():
    """From Python threads of their own, on disjoint spans; each also with threads of its own."""
    starts = [Case.random(200_000, COMBINATIONS[index * 5 % 36], index) for index in range(8)]
    expected = [case.clone().run(scalars_at()) for case in starts]
    barrier = threading.Barrier(len(starts))

    def work(case: Case) -> list[Case]:
        results = []
        for num_threads in (1, 2, 3):
            own = case.clone()
            barrier.wait()
            results.append(own.run(scalars_at(), num_threads=num_threads))
        return results

    with ThreadPoolExecutor(len(starts)) as pool:
        for results, other in zip(pool.map(work, starts), expected, strict=True):
            for case in results:
                case.assert_same(other)


@pytest.mark.usefixtures("_which_threads")
def test_flushing_denormals_is_the_callers_choice_on_every_thread():
    results = []
    for flush in (False, True, False):  # threads sleep between calls, and keep nothing of the call before
        case = Case.random(400_000)
        case["variance"].fill_(0)
        case["grads"].fill_(1e-20)  # its square is denormal
        assert torch.set_flush_denormal(flush)
        try:
            case.run(scalars_at(), num_threads=4)
        finally:
            torch.set_flush_denormal(False)
        results.append(case["variance"])
    assert (results[0] > 0).all()
    assert (results[1].view(torch.int32) == 0).all()
    assert torch.equal(results[2], results[0])


def affinities(*, of_kernels: bool = False) -> dict[int, set[int]]:
    """Return the CPUs of every thread of this process that still runs: the kernels' own threads, or all others."""
    result = {}
    for path in Path("/proc/self/task").iterdir():
        try:
            if ((path / "comm").read_text() == "cxl-kernel\n") == of_kernels:
                result[int(path.name)] = os.sched_getaffinity(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return result


def assert_moved_back(before: dict[int, set[int]]) -> None:
    """Every thread that was there before and still is may run where it could."""
    assert all(cpus == before.get(thread, cpus) for thread, cpus in affinities().items())


def running_on(thread: int) -> int | None:
    """Return the CPU that a thread runs on, None where it does not run, or has ended."""
    try:
        fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it ended before its file was opened, or before it was read
        return None
    return int(fields[36]) if fields[0] == "R" else None


@contextlib.contextmanager
def repeated(function):
    """Call a function again and again in a thread; the block begins when it was called once."""
    ready, finished = threading.Event(), threading.Event()

    def work():
        while not finished.is_set():
            function()
            ready.set()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert ready.wait(20)
        yield
    finally:
        finished.set()
        worker.join()


def watch(table: list[list[int]], cpus: list[int], wanted: set[int]) -> Counter[tuple[int, int]]:
    """Repeat an update until its threads were seen 30 times on every CPU that is `wanted`.

    Returns:
        How often a running thread that may use one CPU only was seen, by that CPU and the one it was on.
    """
    deadline, seen = time.monotonic() + 60, Counter()
    with repeated(lambda: update(table, [scalars_at()], num_threads=2, cpus=cpus)):
        while time.monotonic() < deadline and any(seen[cpu, cpu] < 30 for cpu in wanted):
            for thread, allowed in (affinities() | affinities(of_kernels=True)).items():
                if len(allowed) == 1 and (cpu := running_on(thread)) is not None:
                    seen[min(allowed), cpu] += 1
    return seen


@pytest.mark.alone
@pytest.mark.skipif(len(CPUS) < 2, reason="this process may use one CPU only")
@pytest.mark.parametrize(
    ("sizes", "cpu_of_team", "wanted"),
    [
        ((4_000_000, 4_000_000), (CPUS[0], CPUS[-1]), {CPUS[0], CPUS[-1]}),
        ((4_000_000, 4_000_000), (CPUS[-1], CPUS[-1]), {CPUS[-1]}),
        ((256, 8_000_000), (CPUS[0], CPUS[-1]), {CPUS[-1]}),  # team 0 has less work than one thread's share
    ],
    ids=["a CPU each", "one CPU for both", "all work in one team"],
)
def test_threads_run_on_the_cpus_of_their_team_and_move_back(sizes, cpu_of_team, wanted):
    """Seen from outside while updates run: the kernel's threads are pinned to these CPUs and are on them."""
    cases = [Case.random(size) for size in sizes]
    table = [case.span(team=team) for team, case in enumerate(cases)]
    cpus = [number for pair in enumerate(cpu_of_team) for number in pair]
    before = affinities()
    update(table, [scalars_at()], num_threads=2, cpus=cpus)
    assert_moved_back(before)
    seen = watch(table, cpus, wanted)
    assert {allowed for allowed, _ in seen} == wanted
    # between two looks at a thread, it may have finished an update, moved away and begun another
    misplaced = sum(count for (allowed, cpu), count in seen.items() if allowed != cpu)
    assert misplaced <= 0.05 * sum(seen.values()), seen
    assert_moved_back(before)


@pytest.mark.alone
@pytest.mark.skipif(len(CPUS) < 2, reason="this process may use one CPU only")
@pytest.mark.parametrize("team_cpus", [CPUS[-1:], CPUS], ids=["none in common", "one in common"])
def test_threads_stay_within_the_cpus_of_whoever_calls(team_cpus):
    """A caller confined to one CPU: its threads never get others, whatever the CPUs of their team."""
    mine, case = {CPUS[0]}, Case.random(4_000_000)
    table = [case.span()]
    cpus = [number for cpu in team_cpus for number in (0, cpu)]
    before, confine = affinities(), iter([mine])

    def confined() -> None:
        for cpus_of_caller in confine:  # once: nobody moves it back by an update
            os.sched_setaffinity(0, cpus_of_caller)
        update(table, [scalars_at()], num_threads=2, cpus=cpus)

    with repeated(confined):
        deadline, seen = time.monotonic() + 30, Counter()
        while seen.total() < 100 and time.monotonic() < deadline:
            seen.update(cpu for thread in affinities(of_kernels=True) if (cpu := running_on(thread)) is not None)
        assert seen.total() >= 100
        assert seen[CPUS[0]] >= 0.95 * seen.total()  # it wakes where it was, and moves before it works
    assert_moved_back(before)


@pytest.mark.alone
def test_other_python_threads_go_on_during_an_update():
    """The interpreter lock is released: a counter in another thread moves within one call."""
    case = Case.random(4_000_000)
    counter = [0]

    def count() -> None:
        counter[0] += 1
        time.sleep(0)  # gives the lock up: were it held throughout a call, one count could slip in at its end

    most, deadline = 0, time.monotonic() + 60
    with repeated(count):
        while most < 10 and time.monotonic() < deadline:
            before = counter[0]
            case.run(scalars_at())
            most = max(most, counter[0] - before)
    assert most >= 10
