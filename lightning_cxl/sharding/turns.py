"""`Turns`: ranks of one machine write their own shards and read each other's, never at the same time.

[Note: Turns at shared weights]
Each rank writes only its own segment, and reads those of the others. Two orders must hold, unit by unit:

1. *Written, then read.* A rank reads a shard of update n only when its owner has finished update n.
2. *Read, then written.* An owner begins update n + 1 only when nobody reads what update n has left.

So each rank has two counters for each unit, at the beginning of its segment, where all can see them and only it
writes: `arrived`, how many updates it is ready for, and `written`, how many it has finished. All ranks make the same
updates, so numbers of one rank can be compared with those of another:

- `writing`: this rank has finished its reads, so it adds one to its `arrived`, and waits until `arrived` of all others
  is as large. Then it writes. In the end, also after an error, its `written` becomes its `arrived`: it does not write
  any more.
- `wait_written`, before a read: waits until `written` of all others is as large as this rank's own `arrived`.

The second wait is not implied by anything: between an update and the next forward ranks do not meet. The all-reduce of
the gradients' norm comes before the update, and the reduce-scatters are over. The first wait is implied where a
backward has just reduced the gradients of the unit: a rank adds to the sum after it has read the unit for the last
time, and no rank has the sum before all have added. But nothing implies it for weights that are written after a
validation, after a backward that does not reduce (accumulation), or when a checkpoint is loaded. It is kept in all
cases: where it is implied all counters have arrived, and looking at those of 34 units and 8 ranks took 46 us for each
update (1.6 us for each read), on one core of an AMD EPYC (Zen 4).

On a device, copies out of shared memory run behind the program, so `finish_reads` must wait for them before `arrived`
is raised.

A counter is one aligned word. x86 makes stores visible in program order, and the threads that write weights are joined
before the counter is, so who sees the counter sees the weights. Nothing sleeps in the kernel for the others: who waits
looks again after a pause, and looks whether the process it waits for is alive. Wherever a rank is killed, the others
say so within a second.
"""

import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_cxl.errors import LostRankError
from lightning_cxl.memory.resource import Buffer

_WORD_BYTES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
_LOOK_S = 0.1  # between two looks whether a process is alive


def counters_bytes(num_units: int) -> int:
    """Return what the counters of one rank take."""
    return 2 * num_units * _WORD_BYTES


class Counters:
    """The counters of one rank, in its segment.

    Args:
        buffer: `counters_bytes` of shared memory; zeros when the segment is new.
        num_units: of the model.
    """

    def __init__(self, buffer: Buffer, num_units: int) -> None:
        self.buffer = buffer
        # a view of plain numbers: one look at it costs a tenth of one at a tensor
        numbers: Any = buffer.tensor((2 * num_units,), torch.int64).numpy()
        words = memoryview(numbers)
        self.arrived = words[:num_units]
        self.written = words[num_units:]


class Peer:
    """Another rank of this machine, and whether it is alive.

    Args:
        rank: in the group.
        pid: of its process.
        counters: its.
    """

    def __init__(self, rank: int, pid: int, counters: Counters) -> None:
        self.rank = rank
        self.pid = pid
        self.counters = counters
        self._fd = os.pidfd_open(pid)  # stands for this process, also when its number is given to another one

    @property
    def has_ended(self) -> bool:
        """Whether its process is gone."""
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Let go of the process. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class Turns:
    """See [Note: Turns at shared weights].

    Args:
        own: counters of this rank.
        peers: the other ranks.
        num_units: of the model.
        timeout_s: a rank that is alive, but does not come that long, is given up.
        finish_reads: waits until the device has read what it was told to read.
    """

    def __init__(
        self,
        own: Counters,
        peers: Sequence[Peer],
        num_units: int,
        *,
        timeout_s: float,
        finish_reads: Callable[[], None] = lambda: None,
    ) -> None:
        self._own = own
        self._peers = peers
        self._num_units = num_units
        self._timeout_s = timeout_s
        self._finish_reads = finish_reads

    @contextmanager
    def writing(self, units: Sequence[int] | None = None) -> Iterator[None]:
        """Return a region in which this rank writes its shards of some units. All ranks must enter it alike.

        Args:
            units: their numbers; None for all.

        Raises:
            LostRankError: another rank has ended, or does not come.
            ValueError: such a region of one of these units is open already.
        """
        numbers = range(self._num_units) if units is None else units
        own = self._own
        for unit in numbers:
            self._check_not_writing(unit, "written again")
        self._finish_reads()
        for unit in numbers:
            own.arrived[unit] += 1
        try:
            for peer in self._peers:
                for unit in numbers:
                    self._wait(peer, peer.counters.arrived, unit, "stop reading")
            yield
        finally:
            for unit in numbers:
                own.written[unit] = own.arrived[unit]

    def wait_written(self, unit: int) -> None:
        """Wait until the shards of a unit may be read, those of all ranks.

        Raises:
            LostRankError: another rank has ended, or does not come.
            ValueError: this rank itself is writing the unit.
        """
        self._check_not_writing(unit, "read")
        for peer in self._peers:
            self._wait(peer, peer.counters.written, unit, "finish its update of")

    def close(self) -> None:
        """Wait until nothing is read any more, and let go of the other processes. Idempotent."""
        self._finish_reads()
        for peer in self._peers:
            peer.close()

    def _check_not_writing(self, unit: int, use: str) -> None:
        if self._own.written[unit] != self._own.arrived[unit]:
            raise ValueError(
                f"unit {unit} is {use} while this rank writes it: forwards and backwards must be over before `writing` "
                "begins, so an optimizer must not get a closure that runs the model"
            )

    def _wait(self, peer: Peer, counters: Mapping[int, int] | memoryview, unit: int, what: str) -> None:
        goal = self._own.arrived[unit]
        if counters[unit] >= goal:
            return
        begin = looked = time.monotonic()
        pause = _FIRST_PAUSE_S
        while counters[unit] < goal:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked < _LOOK_S:
                continue
            looked = now
            # it may have done its part just before it ended
            if peer.has_ended and counters[unit] < goal:
                raise LostRankError(
                    f"rank {peer.rank} (process {peer.pid}) has ended; this rank was waiting for it to {what} unit "
                    f"{unit} of the shared weights. What that rank has printed last says why; start again from the "
                    "last checkpoint."
                )
            if now - begin > self._timeout_s:
                raise LostRankError(
                    f"rank {peer.rank} (process {peer.pid}) is alive, but did not {what} unit {unit} of the shared "
                    f"weights within {self._timeout_s:.0f} s: it has come to update {counters[unit]}, this rank to "
                    f"{goal}. All ranks must gather and update the same units in the same order."
                )
