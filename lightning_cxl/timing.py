"""Seconds of a step by what they are spent on, bytes that are copied, and the names of both in torch's profilers.

Totals are those of this process since it began. `Session.metrics` reports what each step has added.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, NamedTuple

from torch.profiler import record_function

from lightning_cxl.torch_private import is_profiling

Total = Literal[
    "update_s",  # updates of weights and state, in any thread
    "stall_update_s",  # the training waits for an update, or makes it itself
    "stall_gradients_s",  # the training waits until gradients are on the host, and added up
    "stall_ssd_s",  # the training waits for reads from drives
    "save_s",  # checkpoints are written
    "h2d_bytes",
    "d2h_bytes",
    "pinned_bytes",  # are page-locked now
    "spilled_bytes",  # went to another tier than the one asked for
]

_of_threads: list[dict[str, float]] = []


class _OfThread(threading.local):
    # no lock: garbage collection may call `add` inside of `add`, and Ctrl-C may end it anywhere
    def __init__(self) -> None:
        self.totals: defaultdict[str, float] = defaultdict(float)
        _of_threads.append(self.totals)


_of_thread = _OfThread()


def add(total: Total, amount: float) -> None:
    _of_thread.totals[total] += amount


def totals() -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for each in tuple(_of_threads):
        for name, amount in each.copy().items():
            found[name] += amount
    return dict(found)


class Span(NamedTuple):
    """What a thread did, or the device, in seconds since a moment of this process."""

    name: str
    thread: str  # or what of the device: its computing, or its copies one way
    begin: float
    end: float


_spans: deque[Span] = deque(maxlen=8192)  # of about one step of 80 blocks with 8 micro-batches


note = _spans.append


def named(name: str) -> AbstractContextManager[None]:
    """Return a region that torch's profilers, NVTX under ``emit_nvtx``, and `last_step` show by name."""
    return timed(None, name)


def last_step(since: float) -> list[Span]:
    """Return what was done between the ends of the last two steps of an optimizer, from a moment on."""
    spans = [each for each in tuple(_spans) if each.begin >= since]
    ends = [each.end for each in spans if each.name == "step"]
    begin, end = (ends[-2] if len(ends) > 1 else 0.0, ends[-1]) if ends else (0.0, 0.0)
    return [each._replace(begin=max(begin, each.begin)) for each in spans if begin < each.end and each.begin < end]


@contextmanager
def timed(total: Total | None, name: str) -> Iterator[None]:
    """Return a region as `named`, whose seconds are added to a total."""
    begin = time.perf_counter()
    try:
        with record_function(f"cxl::{name}") if is_profiling() else nullcontext():  # without a profiler it costs 10 us
            yield
    finally:
        end = time.perf_counter()
        note(Span(name, threading.current_thread().name.replace("Dummy", "autograd"), begin, end))  # a thread of torch
        if total is not None:
            add(total, end - begin)
