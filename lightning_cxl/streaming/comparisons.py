"""`Comparisons`: whether tensors still have the values of their copies, without holding up the host or the device."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from lightning_cxl.streaming.saved_inputs import Allocate
from lightning_cxl.transfer.engine import Copy, Transfer, TransferEngine

MAX_PENDING = 2
"""Answers on their way: they bound the copies that wait for one, and are enough for the device not to run dry."""


class Asks(Protocol):
    """Gets an answer, unless it has died before."""

    def take_answer(self, is_same: Sequence[bool]) -> None:
        """Take the answers: for each pair that was asked about, whether both tensors have the same values."""


class _Pending(NamedTuple):
    asker: Callable[[], Asks | None]
    answer: torch.Tensor  # on the host
    transfer: Transfer


class Comparisons:
    """Compares tensors on the device there, and hands the answers on when they have come to the host.

    ``torch.equal`` would block the host until the device has done all its work, at every unit. Here the host waits for
    an answer only when `MAX_PENDING` younger ones are on their way: the device has work then.

    Args:
        engine: brings answers to the host.
        allocate: gives the host memory that they land in.
    """

    def __init__(self, engine: TransferEngine, allocate: Allocate) -> None:
        self._engine = engine
        self._allocate = allocate
        self._pending: deque[_Pending] = deque()

    def ask(self, asker: Asks, pairs: Sequence[Copy], unit: str) -> None:
        """Compare each pair as it is now; NaN differs from NaN.

        Args:
            asker: gets the answer, now or at a later call of this method; held weakly, with what it holds.
            pairs: two tensors each, of one shape.
            unit: the name of the unit whose tensors these are.
        """
        on_device = not self._engine.computes_on_host and all(one.device == self._engine.device for one, _ in pairs)
        if not on_device or self._engine.device.type == "meta":  # nothing there has values, or changes
            asker.take_answer([one.is_meta or torch.equal(one, other) for one, other in pairs])
            return
        flags = torch.stack([torch.eq(one, other).all() for one, other in pairs])
        answer = self._allocate(flags.nbytes, unit).tensor((len(pairs),), torch.bool)
        self._pending.append(_Pending(weakref.ref(asker), answer, self._engine.d2h(flags, answer)))
        while self._pending and (len(self._pending) > MAX_PENDING or self._pending[0].transfer.done()):
            self._hand_on(self._pending.popleft())

    def _hand_on(self, pending: _Pending) -> None:
        asker = pending.asker()
        if asker is not None:
            pending.transfer.wait_host()
            values: Any = pending.answer.tolist()
            asker.take_answer(values)
