"""`Turns`: ranks of one machine read each other's shards at a gather, and at no other time.

[Note: Turns at shared weights]
Anybody may write a rank's shards, at any moment between two gathers: an optimizer, a checkpoint that is loaded, a user
who swaps averaged weights in. With gathers that are sent, others get what a shard holds when its rank comes to the
gather. With shared weights it must be the same values, so a gather is where all ranks meet. Two orders must hold:

1. *Come, then read.* A rank reads another's shards of a unit for its n-th gather only when the other one has come to
   its n-th gather of this unit, too: what was written before it is there.
2. *Read, then write.* A rank's shards of a unit change only when all others have read what they came for.

So each rank has two counters for each unit, in its segment, where all can see them and only it writes: `come`, how
many gathers it has come to, and `left`, how many it has read to the end. All ranks gather the same units in the same
order, as they must when gathers are sent, so numbers of one rank can be compared with those of another:

- `come`: adds one to its own `come`, and waits until `come` of all others is as large. Then this rank reads.
- `leave`: its `left` becomes its `come`. Where the CPU computes, it then waits until `left` of all others is as large:
  nobody reads outside of a gather, so nobody who writes has to ask. This adds no meeting that a sent gather would not
  have: a rank waits there for the others, too, as it needs their parts.
- On a device, copies run behind the program, so `leave` does not wait. The device itself writes `left`, behind the
  copies, in their stream. Who writes a shard there calls `settle` before ([Note: Shards on the host]), for this rank's
  own copies; that waits for those of the others, too: `wait_read`.

No wait is for something that waits for this rank. Who has come to a gather lets the others pass; what a device does
before its copies, it does without more from the program of this rank, which has come to the same gather.

A counter is one aligned word. x86 makes stores visible in program order, and loads are not done before older ones; the
threads that read and write weights are joined before the counter is written. So who sees the counter sees the weights.
Other CPUs (ARM) promise neither, and Python has no barriers: there weights are not shared (`why_apart`). Counters and
segments belong to the process that made them: a forked child does not have that memory, and a gather in it is refused.
Nothing sleeps in the kernel for the others: who waits looks again after a pause, and looks whether the process it waits
for is alive. Wherever a rank is killed, the others say so within a second.
"""

import os
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from lightning_cxl.errors import LostRankError, UnsupportedError
from lightning_cxl.memory.resource import Buffer

_WORD_BYTES = 8
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
_LOOK_S = 0.1  # between two looks whether a process is alive
_CLOSE_S = 10.0  # for which the end of a run waits for copies of others; most likely an error has ended the run


def counters_bytes(num_units: int) -> int:
    """Return what the counters of one rank take."""
    return 2 * num_units * _WORD_BYTES


class Counters:
    """The counters of one rank, in its segment."""

    def __init__(self, buffer: Buffer, num_units: int) -> None:
        self.buffer = buffer
        numbers = buffer.tensor((2 * num_units,), torch.int64)
        self.left_words = numbers[num_units:]
        """`left`, as a tensor that a device can be copied to."""
        # a view of plain numbers: one look at it costs a tenth of one at a tensor
        plain: Any = numbers.numpy()
        words = memoryview(plain)
        self.come = words[:num_units]
        self.left = words[num_units:]


class Peer:
    """Another rank of this machine, and whether it is alive."""

    def __init__(self, rank: int, pid: int, counters: Counters) -> None:
        self.rank = rank
        self.pid = pid
        self.counters = counters
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid)  # stands for this process, also when its number is given to another one
        except OSError as error:
            raise UnsupportedError(
                f"cannot watch rank {rank} (process {pid}): {error}. Ranks that share weights must see when one ends: "
                "in a container allow the system call pidfd_open."
            ) from error

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
        timeout_s: a rank that is alive, but does not come that long, is given up.
        device: that reads; its copies run behind the program, unless it is the CPU.
    """

    def __init__(
        self,
        own: Counters,
        peers: Sequence[Peer],
        num_units: int,
        *,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self._own = own
        self._peers = list(peers)
        self._num_units = num_units
        self._timeout_s = timeout_s
        self._device = None if device is None or device.type == "cpu" else device
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child, where the counters are not."""
        return os.getpid() != self._pid

    def come(self, unit: int) -> None:
        """Return when all ranks have come to this gather of a unit: their shards may be read."""
        self._own.come[unit] += 1
        for peer in self._peers:
            self._wait(peer, peer.counters.come, unit, "come to a gather of")

    def leave(self, unit: int) -> None:
        """Say that this rank has read a unit, or that its device will have when it comes to what is queued now."""
        self.give_up(unit)
        if self._device is None:
            self.wait_read(unit)

    def give_up(self, unit: int) -> None:
        """Say as `leave`, and wait for nobody: an error has ended the gather of this rank."""
        if self._device is None:
            self._own.left[unit] = self._own.come[unit]
            return
        number = torch.full((1,), self._own.come[unit], dtype=torch.int64, device=self._device)
        self._own.left_words[unit : unit + 1].copy_(number, non_blocking=True)

    def wait_read(self, unit: int) -> None:
        """Return when no other rank reads the shards of a unit any more: this rank may write its own."""
        for peer in self._peers:
            self._wait(peer, peer.counters.left, unit, "finish reading")

    def close(self) -> None:
        """Wait until no device reads any more, and let go of the other processes. Idempotent."""
        peers, self._peers = self._peers, []
        self._timeout_s = min(self._timeout_s, _CLOSE_S)
        end = time.monotonic() + self._timeout_s
        with suppress(LostRankError):  # its run is over, too; what it was about to read does not matter any more
            for unit in range(self._num_units) if self._device is not None else ():
                self._wait_own(unit, end)
                for peer in peers:
                    self._wait(peer, peer.counters.left, unit, "finish reading")
        for peer in peers:
            peer.close()

    def _wait_own(self, unit: int, end: float) -> None:
        while self._own.left[unit] < self._own.come[unit] and time.monotonic() < end:
            time.sleep(_LONGEST_PAUSE_S)

    def _wait(self, peer: Peer, counters: Mapping[int, int] | memoryview, unit: int, what: str) -> None:
        goal = self._own.come[unit]
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
                    f"weights within {self._timeout_s:.0f} s: it has come to {counters[unit]} gathers, this rank to "
                    f"{goal}. All ranks must gather the same units in the same order."
                )
