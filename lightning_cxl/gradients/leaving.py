"""`LeavingGradients`: gradients of one unit leave the device together, and are folded into the sums together.

[Note: Leaving gradients]
A *group* is the gradients of one unit, or a single one of a parameter that belongs to none. It leaves when it is
complete, when the gradient of another group comes, or when its unit or the backward is over; what comes later makes a
group of its own. A group takes one piece of host memory per placement, copies with one event behind them, and one fold
(`GradientSums.fold`) that waits for them: on the worker, if there is one, else by whoever asks for it. Folds are done
in the order in which groups left, so that what is added to what does not depend on time.

* Where it lands. The first gradient of a step lands where it stays. Others, and those of another type than the one that
  is kept, land in staging memory; at most `MAX_STAGED` groups do, and who would need more waits for the oldest.
* On the device a gradient is held from its arrival until its copy is done: autograd would add to it in place else. The
  host may be far ahead, so "done" is what the device knows, not the host: its computing stream waits for the oldest
  group while more than the bytes of the largest one are leaving ([Note: Copies and streams]). So the device holds what
  leaves, no more than the largest group, and the group that is being computed.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from lightning_cxl.gradients.sums import AllocateAll, GradientSums, Landed
from lightning_cxl.optim.masters import WeightPair
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.shards import is_replicated, local
from lightning_cxl.transfer.engine import Transfer, TransferEngine

MAX_STAGED = 3
"""Groups in staging memory at most: one lands, one is folded, one is slack."""


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient that autograd has delivered: strided, and not changed by anyone from now on."""

    pair: WeightPair
    grad: torch.Tensor
    key: int
    """Random key of stochastic rounding."""
    is_first: bool
    """Whether it is the first gradient of its parameter in a step."""


class _Fold(Protocol):
    def done(self) -> bool: ...
    def result(self) -> None: ...


@dataclass(slots=True, eq=False)
class Group:
    """Gradients that have left together."""

    pair_ids: frozenset[int]
    is_staged: bool
    """Some are in staging memory until they are folded."""
    fold: _Fold


class LeavingGradients:
    """Sends gradients to the host. See [Note: Leaving gradients].

    Args:
        engine: copies.
        allocate_all: gives staging memory.
        sums: gives the memory where gradients stay, and adds up.
        worker: folds, one group after the other; None leaves it to whoever asks.
    """

    def __init__(
        self,
        engine: TransferEngine,
        allocate_all: AllocateAll,
        sums: GradientSums,
        worker: Executor | None,
    ) -> None:
        self._engine = engine
        self._allocate_all = allocate_all
        self._sums = sums
        self._worker = worker
        self._unit: object = None  # whose group is not complete
        self._size = 1  # of that group when it is
        self._waiting: dict[int, Gradient] = {}  # what there is of it, by id of the pair
        self._left: deque[Group] = deque()  # not known to be folded
        self._on_device: deque[tuple[Transfer, int]] = deque()  # that the device has not waited for, and their bytes
        self._device_bytes = self._largest_bytes = 0

    def add(self, gradient: Gradient, unit: object, unit_size: int) -> None:
        """Let a gradient leave, with the others of its unit.

        Args:
            gradient: of a parameter of `unit`.
            unit: None for a parameter that belongs to none.
            unit_size: how many gradients make the group of this unit complete.
        """
        key = id(gradient.pair)
        if unit is not self._unit or key in self._waiting:
            self.leave()
        if not self._waiting:
            self._unit, self._size = unit, unit_size
        self._waiting[key] = gradient
        if len(self._waiting) >= self._size:
            self.leave()

    def leave(self) -> None:
        """Let gradients leave that still wait for other gradients of their unit."""
        group, self._waiting = list(self._waiting.values()), {}
        if not group:
            return
        staying: list[Gradient] = []
        staged: list[Gradient] = []
        for each in group:
            (staying if each.is_first and each.grad.dtype is each.pair.grad_dtype else staged).append(each)
        while staged and sum(each.is_staged for each in self._left) >= MAX_STAGED:
            self._left.popleft().fold.result()
        memory = self._sums.new([each.pair for each in staying], [each.grad.dtype for each in staying])
        if staged:
            memory += self._allocate_all([(each.pair.compute, each.grad.dtype) for each in staged], TensorRole.STAGING)
        leaving = staying + staged
        landed = [
            Landed(each.pair, there, each.key, stays=index < len(staying))
            for index, (each, there) in enumerate(zip(leaving, memory, strict=True))
        ]
        copies = [(each.grad, local(there)) for each, there in zip(leaving, memory, strict=True)]
        # FSDP2 allocates on the stream that scatters, and calls hooks on the one that reduces over machines
        transfer = self._start(copies, from_here=not any(is_replicated(each.pair.compute) for each in leaving))
        fold = partial(self._fold, transfer, landed)
        started = _OwnFold(transfer, fold) if self._worker is None else self._worker.submit(fold)
        self._left.append(Group(frozenset(id(each.pair) for each in group), bool(staged), started))
        while self._left and self._left[0].fold.done():
            self._left.popleft().fold.result()

    def _start(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], from_here: bool) -> Transfer:
        transfer = self._engine.d2h_all(copies, from_here=from_here)
        nbytes = sum(source.nbytes for source, _ in copies)
        self._on_device.append((transfer, nbytes))
        self._device_bytes += nbytes
        self._largest_bytes = max(self._largest_bytes, nbytes)
        while self._device_bytes > self._largest_bytes:
            oldest, nbytes = self._on_device.popleft()
            oldest.wait()
            self._device_bytes -= nbytes
        return transfer

    def _fold(self, transfer: Transfer, landed: Sequence[Landed]) -> None:
        transfer.wait_host()
        self._sums.fold(landed)

    def claim(self, pair_ids: Collection[int]) -> list[Group]:
        """Return the groups that hold gradients of these; those that hold no others are the caller's to wait for.

        Args:
            pair_ids: `id` of each pair.
        """
        self.leave()
        claimed = [group for group in self._left if not group.pair_ids.isdisjoint(pair_ids)]
        self._left = deque(group for group in self._left if not group.pair_ids.issubset(pair_ids))
        return claimed

    def settle(self) -> None:
        """Return when all are folded; raises what went wrong first."""
        self.leave()
        while self._left:
            self._left.popleft().fold.result()

    def forget(self) -> None:
        """Let go of those that wait for others of their unit, which will not come: the backward has failed."""
        self._waiting = {}

    def close(self) -> None:
        """Let go of everything; nothing that still runs is waited for."""
        self._waiting = {}
        self._left.clear()
        self._on_device.clear()


class _OwnFold:
    """Done by whoever asks for the result first."""

    def __init__(self, transfer: Transfer, fold: Callable[[], None]) -> None:
        self._transfer = transfer
        self._fold: Callable[[], None] | None = fold

    def done(self) -> bool:
        return self._transfer.done()

    def result(self) -> None:
        fold, self._fold = self._fold, None
        if fold is not None:
            fold()
