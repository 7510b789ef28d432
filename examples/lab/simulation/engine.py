"""A device played by the CPU, whose copies take as long as links of given speeds would let them.

[Note: Simulated copies]
A copy exists twice: as a `Flow` of the `LinkClock`, which says when it begins and ends, and as a job of the worker of
its direction, which moves the bytes. The clock knows the order of each direction and `after`, and computes with exact
times. So a worker that wakes up late delays its own copy, but not the beginning of the next one: delays of a busy
machine do not add up.

* A worker sleeps until its flow begins, waits until the bytes of `after` have landed, moves all bytes but the last few,
  sleeps until the flow ends, and moves the rest. So who reads without waiting finds old bytes at the end.
* All threads tell the clock the time under one lock. Every sleeper wakes up at the next event of any flow; only a new
  flow can bring that forward, and notifies them.
* The CPU computes at once, so `wait` blocks like `wait_host`. The rest is as in [Note: Copies and streams]: jobs hold
  the memory of both sides until the bytes have landed. The version of a destination goes up when its copy is asked
  for, not when it lands, so that versions do not depend on time.
* What the device has been given it has computed, so a `mark` is done at once, and a copy begins when it is asked for,
  behind its lane and `after`. It is late by as much as it was asked for late, say behind an update that took long.
* Work of the host's CPUs on the tiers (`host_work`) is a flow on a lane of its own. Whoever does it moves the bytes,
  and is held until the flow has ended.
"""

import ctypes
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from lightning_cxl.devices import After, Copy, FinishedTransfer, Transfer, TransferEngine, check_copy
from simulation.clock import Flow, LinkClock
from simulation.links import Direction, HostTraffic, Links
from simulation.trace import Trace

TiersOf = Callable[[int, int], str | Mapping[str, float]]
"""Address and size of host memory to the name of its tier, or to tier names and fractions where it is striped."""

HOST_LANE = "host step"
"""Lane of the trace, and of the clock, for work of the host's CPUs."""

_LAST_BYTES = 1 << 18
"""Moved when the time is up: enough to be missed, and soon done."""


class SimulatedTransfer:
    """One copy: its flow, and both sides until the bytes have landed. See [Note: Simulated copies]."""

    def __init__(
        self,
        source: torch.Tensor,
        destination: torch.Tensor,
        name: str,
        flow: Flow,
        after: "Sequence[SimulatedTransfer]",
    ) -> None:
        self.flow = flow
        self.name = name
        self.nbytes = nbytes_of(source)
        self._sides: tuple[torch.Tensor, torch.Tensor] | None = (source.detach(), destination.data)
        self._after = after
        self._landed = threading.Event()
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until the copy is done: the device that the CPU plays computes at once."""
        self.wait_host()

    def wait_host(self) -> None:
        """Block until the copy is done."""
        self._landed.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Return whether the copy is done, without waiting."""
        return self._landed.is_set()

    def move(self, *, last: bool) -> None:
        """Move all bytes but the last ones, or those; strided tensors go at the end (on the worker)."""
        assert self._sides is not None
        source, destination = self._sides
        for transfer in self._after:
            transfer.wait_host()
        self._after = ()
        if not (_is_plain(source) and _is_plain(destination)):
            if last:
                destination.copy_(source)
            return
        split = max(0, self.nbytes - _LAST_BYTES)
        begin, end = (split, self.nbytes) if last else (0, split)
        # one thread, without the GIL, and no pool of threads that spins beside the computation as with copy_
        ctypes.memmove(destination.data_ptr() + begin, source.data_ptr() + begin, end - begin)

    def land(self, error: Exception | None = None) -> None:
        """Let go of both sides, then of those who wait (on the worker)."""
        self._sides = None
        self._after = ()
        self._error = error
        self._landed.set()


class SimulatedEngine(TransferEngine):
    """Copies between two kinds of CPU memory at the speed of simulated links. See [Note: Simulated copies].

    Args:
        links: how fast the device's link and the tiers are.
        tiers_of: says on which tier host memory lies; called once per copy, by the thread that asks for it.
        name_of: names copies in the trace by address and size of their host memory; by its tiers when None.
    """

    device = torch.device("cpu")
    computes_on_host = False

    def __init__(self, links: Links, tiers_of: TiersOf, name_of: Callable[[int, int], str] | None = None) -> None:
        self.trace = Trace()
        """Every copy that is done, on the lanes ``h2d`` and ``d2h``, and `host_work`; others may add lanes."""
        self._links = links
        self._tiers_of = tiers_of
        self._name_of = name_of
        self._clock = LinkClock()
        self._changed = threading.Condition()  # guards the clock, the workers and what is handed to them
        self._workers: dict[Direction, _Worker] = {}
        self._latest: dict[Direction, SimulatedTransfer] = {}

    def d2h(
        self, source: torch.Tensor, destination: torch.Tensor, *, after: After = None, from_here: bool = False
    ) -> Transfer:
        """Start copying to the host; see `TransferEngine.d2h`."""
        return self._start("d2h", source, destination, destination, after)

    def d2h_all(self, copies: Sequence[Copy], *, after: After = None, from_here: bool = False) -> Transfer:
        """Start copying to the host; see `TransferEngine.d2h_all`. One direction is in order: the last ends all."""
        transfer: Transfer = FinishedTransfer()
        for source, destination in copies:
            transfer = self.d2h(source, destination, after=after)
        return transfer

    def h2d(self, source: torch.Tensor, destination: torch.Tensor, *, after: After = None) -> Transfer:
        """Start copying to the device; see `TransferEngine.h2d`."""
        return self._start("h2d", source, destination, source, after)

    def _start(
        self,
        direction: Direction,
        source: torch.Tensor,
        destination: torch.Tensor,
        on_host: torch.Tensor,
        after: After,
    ) -> Transfer:
        check_copy(source, destination, self.device, self.device)
        nbytes = nbytes_of(on_host)
        shares = self._tiers_of(on_host.data_ptr(), nbytes) if nbytes else {}
        if isinstance(shares, str):
            shares = {shares: 1.0}
        route = self._links.route(direction, shares)
        name = " + ".join(shares) if self._name_of is None else self._name_of(on_host.data_ptr(), nbytes)
        copies = [each for each in after or () if isinstance(each, SimulatedTransfer)]
        for each in after or ():
            if each not in copies:
                each.wait_host()  # the clock does not know it
        torch.autograd.graph.increment_version(destination)
        with self._changed:
            behind = [each.flow for each in copies]
            flow = self._clock.submit(direction, nbytes, route, now_s=time.perf_counter(), after=behind)
            transfer = SimulatedTransfer(source, destination, name, flow, copies)
            if direction not in self._workers:
                self._workers[direction] = _Worker(self, direction)
            self._workers[direction].jobs.put(transfer)
            self._latest[direction] = transfer
            self._changed.notify_all()
        return transfer

    @contextmanager
    def host_work(self, name: str, traffic: Mapping[str, HostTraffic]) -> Iterator[None]:
        """Do the body as work of the host's CPUs, which streams tiers and so competes with copies for them.

        It begins when work that began earlier, on any thread, is over, and ends (this returns) when the tiers have let
        `traffic` through, or with the body where that takes longer.

        Args:
            name: for the trace, on the lane ``host step``.
            traffic: bytes read and written by tier name; all tiers are worked on at once.

        Raises:
            TierNotFoundError: a tier without a link.
        """
        route = self._links.host_route(traffic)
        nbytes = round(sum(each.nbytes for each in traffic.values()))
        with self._changed:
            flow = self._clock.submit(HOST_LANE, nbytes, route, now_s=time.perf_counter())
            self._changed.notify_all()
        self.sleep_until(flow.has_started)
        try:
            yield
        finally:  # also what raises has taken the bandwidth
            self.sleep_until(flow.has_ended)
            assert flow.start_s is not None
            self.trace.add(HOST_LANE, name, flow.start_s, time.perf_counter(), nbytes)

    def sleep_until(self, has_come: Callable[[], bool]) -> None:
        """Keep the clock going until it has made something true (on a worker, or in host work)."""
        with self._changed:
            while True:
                now_s = time.perf_counter()
                self._clock.advance(now_s)
                if has_come():
                    return
                event_s = self._clock.next_event_s()
                assert event_s < math.inf, "every flow waits for one that runs"
                self._changed.wait(event_s - now_s)

    def synchronize(self) -> None:
        """Block until every copy started so far is done."""
        with self._changed:
            latest = list(self._latest.values())
        for transfer in latest:
            transfer.wait_host()  # each direction is in order

    def close(self) -> None:
        """Finish all copies, let go of their buffers, and end the workers; another copy would start them again."""
        with self._changed:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.jobs.put(None)
        for worker in workers:
            worker.join()
        self._latest.clear()


class _Worker(threading.Thread):
    """Moves the bytes of one direction, in order."""

    def __init__(self, engine: SimulatedEngine, direction: Direction) -> None:
        super().__init__(name=f"simulated {direction}", daemon=True)
        self.jobs: queue.SimpleQueue[SimulatedTransfer | None] = queue.SimpleQueue()
        self._engine = engine
        self._lane = direction
        self._free_s = -math.inf  # since when this worker has had nothing to do
        self.start()

    def run(self) -> None:
        """Carry out jobs until there is a None."""
        while (transfer := self.jobs.get()) is not None:
            try:
                self._carry_out(transfer)
            except Exception as error:  # raised where the copy is waited for
                transfer.land(error)
            del transfer

    def _carry_out(self, transfer: SimulatedTransfer) -> None:
        engine, flow = self._engine, transfer.flow
        engine.sleep_until(flow.has_started)
        transfer.move(last=False)
        engine.sleep_until(flow.has_ended)
        transfer.move(last=True)
        assert flow.start_s is not None
        start_s, self._free_s = max(flow.start_s, self._free_s), time.perf_counter()
        engine.trace.add(self._lane, transfer.name, start_s, self._free_s, transfer.nbytes)
        transfer.land()


def nbytes_of(tensor: torch.Tensor) -> int:
    """Return how many bytes the elements of a tensor take."""
    return tensor.numel() * tensor.element_size()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values of a tensor are its bytes in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
