"""`PlacedMemory`: host memory for the tensors of one model, each where the decision says."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import SSD
from lightning_cxl.errors import SpillWarning, TierFullError
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.inventory.tensors import SLOTS_OWNER
from lightning_cxl.memory.host_memory import HeapTrimmer, HostMemory, is_dense, is_ordinary, laid_out_as, mirror
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.cpu_adam import CPUAdam
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.planning.decide import Plan
from lightning_cxl.run.state_on_ssd import StateOnSsd
from lightning_cxl.shards import local, sharded_like
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.streaming.on_ssd import InputOnSsd, WeightRecord
from lightning_cxl.streaming.unit_weights import HostCopy, InMemory

_TRIM_BYTES = 64 * 2**20  # of state that has moved
_ALIGNMENT = 64  # bytes: a cache line, and what vectors of every element type start at


class PlacedMemory:
    """Gives memory for parameters and units by role.

    Args:
        placements: of the model; gets the bytes of `count_planned`, and of inputs of units.
        heap: trimmed before memory for a gradient is given; None: the heap is never trimmed.
    """

    def __init__(
        self,
        memory: HostMemory,
        placements: Plan,
        heap: HeapTrimmer | None,
        units: Sequence[str] = (),
    ) -> None:
        self.memory = memory
        self.placements = placements
        self._heap = heap
        self._units = units
        self.on_ssd: StateOnSsd | None = None
        """Optimizer state, weights and inputs of units that lie on SSD."""
        self._warned_of_ssd = False
        self._seen_units: list[str] | None = []  # at most two, in the order they ask; None when they are planned

    def like(self, parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor shaped and laid out as what this process holds of a parameter of the model.

        Master weights that a device copies as they are, after every step, are page-locked.
        """
        self._trim_for(role)
        shard = local(parameter)
        placement = self.placements.place(parameter, role, shard.numel() * dtype.itemsize)
        if role is TensorRole.MASTER_WEIGHTS and parameter.device.type != "cpu" and dtype is parameter.dtype:
            placement = replace(placement, pinned=True)
        return mirror(shard, dtype, lambda count, dt: self.memory.tensor((count,), dt, placement, role))

    def like_all(self, wanted: Sequence[tuple[nn.Parameter, torch.dtype]], role: TensorRole) -> list[torch.Tensor]:
        """Return what `like` would for each parameter, those of one placement in one piece of memory."""
        self._trim_for(role)
        by_placement: dict[Placement, list[int]] = {}
        for index, (parameter, dtype) in enumerate(wanted):
            placement = self.placements.place(parameter, role, local(parameter).numel() * dtype.itemsize)
            by_placement.setdefault(placement, []).append(index)
        tensors: dict[int, torch.Tensor] = {}
        for placement, indices in by_placement.items():
            parts = [(local(wanted[index][0]), wanted[index][1]) for index in indices]
            sizes = [shard.numel() * dtype.itemsize for shard, dtype in parts]
            starts = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes[:-1])]
            piece = self.memory.allocate(starts[-1] + sizes[-1], placement, role)
            for index, (shard, dtype), start, size in zip(indices, parts, starts, sizes, strict=True):
                flat = piece.slice(start, size).tensor((shard.numel(),), dtype)
                tensors[index] = laid_out_as(flat, shard)
        return [tensors[index] for index in range(len(wanted))]

    def _trim_for(self, role: TensorRole) -> None:
        if self._heap is not None and role in (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS):
            self._heap.trim()  # in backward, where the C library's heap grows most

    def flat(self, parameter: torch.Tensor, role: TensorRole, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return an uninitialised 1-D tensor for the state that `CPUAdam` keeps of a parameter."""
        placement = self.placements.place(parameter, role, numel * dtype.itemsize, in_state=True)
        if placement.tiers[0] == SSD and numel == 0:  # other processes have all of it
            return torch.empty(0, dtype=dtype)
        if placement.tiers[0] == SSD:
            assert self.on_ssd is not None, "what belongs on the tier `ssd` is in the inventory"
            name = self.placements.asked.names.get(id(parameter), "unnamed")
            return self.on_ssd.flat(parameter, name, role, dtype, numel)
        return self.memory.tensor((numel,), dtype, placement, role)

    def slots(self, nbytes: int) -> Buffer:
        """Return page-aligned memory for the buffers of records."""
        placement = self.placements.place(SLOTS_OWNER, TensorRole.STAGING, nbytes)
        return self.memory.allocate(nbytes, placement, TensorRole.STAGING, alignment=BLOCK_BYTES)

    def activation(self, nbytes: int, unit: str) -> Buffer:
        placement = self.placements.place(unit, TensorRole.ACTIVATIONS, nbytes)
        if placement.tiers[0] == SSD:  # which is full
            placement = self.placements.in_memory(unit, nbytes)
        self._plan_activation(nbytes, unit, placement)
        return self.memory.allocate(nbytes, placement, TensorRole.ACTIVATIONS)

    def activation_on_ssd(self, nbytes: int, unit: str) -> InputOnSsd | None:
        """Return a place on the tier `ssd` for an input of a unit; None where it belongs in memory, or has no room."""
        placement = self.placements.place(unit, TensorRole.ACTIVATIONS, nbytes)
        if placement.tiers[0] != SSD or self.on_ssd is None:  # no drives: nothing is trained
            return None
        try:
            place = self.on_ssd.inputs.place(nbytes)
        except TierFullError as error:
            if self.memory.on_tier_full == "error":
                raise
            if not self._warned_of_ssd:
                self._warned_of_ssd = True
                text = f"an input of `{unit}` stays in memory, and others may: tier `ssd` is full ({error})"
                warnings.warn(text, SpillWarning, stacklevel=2)
            return None
        self._plan_activation(nbytes, unit, placement)
        return place

    def forward_is_over(self) -> None:
        """Note that the first forward is over: no more inputs are added to the planned bytes."""
        if self._seen_units:
            self._seen_units = None

    def _plan_activation(self, nbytes: int, unit: str, placement: Placement) -> None:
        """Plan the inputs of all units from those of the first two: a batch's size is not known before its forward.

        The first may keep what all of them share, such as a mask. The others are taken to be like the second.
        """
        if self._seen_units is None:
            return
        if unit not in self._seen_units:
            self._seen_units.append(unit)
        if len(self._seen_units) > 2:
            self._seen_units = None
        elif unit == self._seen_units[0]:
            self.placements.count(TensorRole.ACTIVATIONS, nbytes, placement)
        else:
            for other in self._units:
                if other != self._seen_units[0]:
                    where = self.placements.place(other, TensorRole.ACTIVATIONS, nbytes)
                    self.placements.count(TensorRole.ACTIVATIONS, nbytes, where)

    def piece(self, nbytes: int, parameters: Sequence[nn.Parameter]) -> HostCopy:
        """Return a home for the weights of several parameters that belong on the same tier.

        Memory that earlier moves of weights have left is given back first: its stack is no longer in use.
        """
        self.memory.trim()
        placement = self.placements.place(parameters[0], TensorRole.COMPUTE_WEIGHTS, nbytes)
        if placement.tiers[0] == SSD:
            assert self.on_ssd is not None, "what belongs on the tier `ssd` is in the inventory"
            return self.on_ssd.home(parameters[0])
        buffer = self.memory.allocate(nbytes, placement, TensorRole.COMPUTE_WEIGHTS)
        return InMemory(buffer, is_inherited=not (placement.pinned and self.memory.pins))

    def on_drives(self, parameters: Sequence[nn.Parameter]) -> WeightRecord | None:
        """Return the home of the shards of several parameters that belong on the same tier; None if that is memory."""
        placement = self.placements.place(parameters[0], TensorRole.COMPUTE_WEIGHTS, 0)
        if placement.tiers[0] != SSD or self.on_ssd is None:
            return None
        return self.on_ssd.home(parameters[0])

    def weights(self, parameter: nn.Parameter, tensor: torch.Tensor) -> torch.Tensor | None:
        role = TensorRole.COMPUTE_WEIGHTS
        placement = self.placements.place(parameter, role, tensor.nbytes)
        if self._is_placed(tensor, placement):
            return None
        return mirror(tensor, tensor.dtype, lambda count, dtype: self.memory.tensor((count,), dtype, placement, role))

    def shard(self, parameter: nn.Parameter, shard: torch.Tensor, numel: int) -> torch.Tensor | None:
        """Return 1-D memory for the shard of a parameter's weights; None if it is where it belongs, or goes to SSD."""
        role = TensorRole.COMPUTE_WEIGHTS
        placement = self.placements.place(parameter, role, numel * shard.element_size())
        if numel == 0 or placement.tiers[0] == SSD or self._is_placed(shard, placement):
            return None
        return self.memory.tensor((numel,), shard.dtype, placement, role)

    def place_state(self, optimizer: Optimizer, compute_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move an optimizer's state in ordinary memory to where the policy wants it.

        What it leaves goes back to the OS piece by piece: the C library would keep most of it. Views of a
        larger buffer stay: an optimizer may count on it.
        """
        if isinstance(optimizer, CPUAdam):
            return  # keeps to the memory it was given
        heap, left_bytes = None, 0
        for parameter, state in optimizer.state.items():
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                shard = local(value)
                if not _is_movable(shard) or self.memory.tier_at(shard.data_ptr()) is not None:
                    continue
                state[key] = sharded_like(self._like_state(shard, compute_of(parameter)).copy_(shard), value)
                left_bytes += shard.nbytes
                del value, shard
                if left_bytes >= _TRIM_BYTES:
                    heap = heap or HeapTrimmer()
                    heap.trim_now()
                    left_bytes = 0
        if left_bytes:
            (heap or HeapTrimmer()).trim_now()

    def _like_state(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return memory for a tensor of an optimizer's state, with its strides: fused kernels go through it flat."""
        role = TensorRole.MOMENTUM
        placement = self.placements.place(parameter, role, value.nbytes)
        return mirror(value, value.dtype, lambda count, dtype: self.memory.tensor((count,), dtype, placement, role))

    def count_planned(self, inventory: Inventory) -> None:
        """Add the inventory to the planned bytes.

        Inputs of units are added when the first forward shows their sizes.
        """
        for each in inventory.tensors:
            if each.role is not TensorRole.ACTIVATIONS:
                self.placements.count(each.role, each.nbytes, self.placements.of(each))

    def _is_placed(self, tensor: torch.Tensor, placement: Placement) -> bool:
        return is_ordinary(tensor) and self.memory.is_placed(tensor.data_ptr(), placement)


def _is_movable(value: torch.Tensor) -> bool:
    """Whether a tensor of an optimizer's state may get other memory: it has its storage for itself, without gaps."""
    if value.dim() == 0 or not is_ordinary(value):
        return False
    return is_dense(value) and value.untyped_storage().nbytes() == value.nbytes
