"""`GradientSums`: what gradients of a step come to so far, in host memory that the policy placed."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn import Parameter

from lightning_cxl.gradients.meter import Addition, GradientMeter
from lightning_cxl.memory.host_tensors import has_own_memory
from lightning_cxl.optim.masters import WeightPair
from lightning_cxl.optim.tensor_checks import is_flat_like
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.shards import is_sharded, sharded_like
from lightning_cxl.torch_private import is_only_holder

AllocateAll = Callable[[Sequence[tuple[Parameter, torch.dtype]], TensorRole], list[torch.Tensor]]
"""Returns uninitialised host tensors like compute parameters, those of one placement in one piece of memory."""
_HALF = (torch.bfloat16, torch.float16)


class InPlace(Protocol):
    """Knows which gradients of the host need not move: autograd has made them on their tier."""

    def gradient_stays(self, parameter: torch.Tensor, role: TensorRole) -> bool:
        """Whether a gradient like a compute parameter stays."""

    def gradient_in_place(self, parameter: torch.Tensor, grad: torch.Tensor, role: TensorRole) -> object | None:
        """Count a gradient that stays, until what is returned dies; None if it has to move."""


class Landed(NamedTuple):
    """A gradient that is on the host now."""

    pair: WeightPair
    grad: torch.Tensor
    key: int
    """Of stochastic rounding."""
    stays: bool
    """It is the first of a step and lies in memory of ours already."""


class GradientSums:
    """Adds gradients up: the first of a step is kept or moved into memory of ours, others are added to it.

    Args:
        allocate_all: gives the memory.
        meter: copies, adds and measures.
        in_place: tells which gradients are kept in the memory that autograd took; None: all are moved.
        half_sums: whether bfloat16 gradients are added up in bfloat16 instead of float32.
    """

    def __init__(
        self,
        allocate_all: AllocateAll,
        meter: GradientMeter,
        in_place: InPlace | None = None,
        *,
        half_sums: bool = False,
    ) -> None:
        self._allocate_all = allocate_all
        self._in_place = in_place
        self._meter = meter
        self._half_sums = half_sums
        self.so_far: dict[int, torch.Tensor] = {}
        """By id of the pair, while its ``master.grad`` is None because more is on its way."""
        self._own: dict[int, weakref.ref[torch.Tensor]] = {}  # by id of the pair

    def is_ours(self, pair: WeightPair, grad: torch.Tensor) -> bool:
        """Return whether `grad` is the very tensor that was given out, or kept, last for the gradient of `pair`."""
        own = self._own.get(id(pair))
        return own is not None and own() is grad

    def stays(self, pair: WeightPair) -> bool:
        """Return whether the first gradient of a step, where autograd makes it on the host, needs no other memory."""
        same_type = pair.is_shared or pair.grad_dtype is pair.compute.dtype
        if self._in_place is None or not same_type or is_sharded(pair.compute):
            return False
        return self._in_place.gradient_stays(pair.compute, _role_of(pair))

    def new(self, pairs: Sequence[WeightPair], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Return memory where gradients stay."""
        memory: dict[int, torch.Tensor] = {}
        for role in (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS):
            wanted = [(pair, dtype) for pair, dtype in zip(pairs, dtypes, strict=True) if _role_of(pair) is role]
            if wanted:
                given = self._allocate_all([(pair.compute, dtype) for pair, dtype in wanted], role)
                memory.update(
                    {id(pair): sharded_like(own, pair.compute) for (pair, _), own in zip(wanted, given, strict=True)}
                )
        self._own.update({key: weakref.ref(tensor) for key, tensor in memory.items()})
        return [memory[id(pair)] for pair in pairs]

    def first(self, pair: WeightPair, grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the first gradient of a step, which autograd has made on the host: kept, or moved into our memory."""
        counted = None
        if self._in_place is not None and grad.dtype is dtype and _is_alone(grad) and is_flat_like(grad, pair.compute):
            counted = self._in_place.gradient_in_place(pair.compute, grad, _role_of(pair))
        if counted is None:
            return self._moved([pair], [grad], [dtype])[0]
        self._own[id(pair)] = weakref.ref(grad, partial(_let_go, counted))  # until it dies, or another one comes
        self._meter.sums([grad])
        return grad

    def add(self, pair: WeightPair, before: torch.Tensor, grad: torch.Tensor, key: int) -> torch.Tensor:
        """Return `before` plus `grad`, in the memory of `before` or in wider memory."""
        return self._added([Landed(pair, grad, key, stays=False)], [before])[0]

    @torch.no_grad()
    def fold(self, landed: Sequence[Landed]) -> None:
        """Take gradients of different parameters in: `so_far` is complete then."""
        news: list[Landed] = []
        later: list[Landed] = []
        for each in landed:
            (later if id(each.pair) in self.so_far else news).append(each)
        staying = [each for each in news if each.stays]
        self._meter.sums([each.grad for each in staying])
        self.so_far.update({id(each.pair): each.grad for each in staying})
        moving = [each for each in news if not each.stays]
        if moving:
            pairs = [each.pair for each in moving]
            moved = self._moved(pairs, [each.grad for each in moving], [pair.grad_dtype for pair in pairs])
            self.so_far.update({id(pair): grad for pair, grad in zip(pairs, moved, strict=True)})
        if later:
            sums = self._added(later, [self.so_far[id(each.pair)] for each in later])
            self.so_far.update({id(each.pair): total for each, total in zip(later, sums, strict=True)})

    def _moved(
        self, pairs: Sequence[WeightPair], grads: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        memory = self.new(pairs, dtypes)
        self._meter.copy_all(list(zip(grads, memory, strict=True)))
        return memory

    def _added(self, landed: Sequence[Landed], before: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sums = dict(enumerate(before))
        widened = [index for index, grad in sums.items() if grad.dtype in _HALF and not self._keeps_half(grad)]
        if widened:
            pairs, grads = [landed[index].pair for index in widened], [before[index] for index in widened]
            sums.update(zip(widened, self._moved(pairs, grads, [torch.float32] * len(widened)), strict=True))
        totals = [sums[index] for index in range(len(landed))]
        self._meter.accumulate_all(
            [Addition(each.grad, total, each.key) for each, total in zip(landed, totals, strict=True)]
        )
        return totals

    def _keeps_half(self, grad: torch.Tensor) -> bool:
        return self._half_sums and grad.dtype is torch.bfloat16


def _let_go(_counted: object, _reference: object) -> None:
    """Drop what a weak reference has kept: its tensor is gone."""


def _is_alone(grad: torch.Tensor) -> bool:
    """Return whether torch's allocator gave the gradient its memory, and nothing else is there or can reach it.

    Two parameters that are viewed and added get one gradient: in float32 torch itself would then add to both at once.
    What FSDP2 delivers are views of the gradients of a whole unit.
    """
    return not is_sharded(grad) and has_own_memory(grad) and is_only_holder(grad)


def _role_of(pair: WeightPair) -> TensorRole:
    return TensorRole.COMPUTE_GRADS if pair.is_same_memory else TensorRole.MASTER_GRADS
