"""Threads of a process move to its CPUs. In a process of its own: those of a test run stay where they are."""

import multiprocessing
import os
import threading

import pytest

from lightning_cxl.machine.binding import move_threads


def _affinities(end, first, second):
    stop, pinned = threading.Event(), threading.Event()

    def elsewhere():
        os.sched_setaffinity(0, {second})
        pinned.set()
        stop.wait()

    threads = [threading.Thread(target=work, daemon=True) for work in (stop.wait, elsewhere)]
    for thread in threads:
        thread.start()
    pinned.wait()
    move_threads((first,))
    threads.append(threading.Thread(target=stop.wait, daemon=True))
    threads[-1].start()
    end.send([os.sched_getaffinity(number) for number in (0, *(thread.native_id for thread in threads))])
    stop.set()


def test_threads_that_are_there_move_and_those_on_other_cpus_stay():
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    first, second = cpus[:2]
    ours, end = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_affinities, args=(end, first, second))
    process.start()
    end.close()
    assert ours.recv() == [{first}, {first}, {second}, {first}]
    process.join()
