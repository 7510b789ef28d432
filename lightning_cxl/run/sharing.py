"""Whether the ranks of a machine share the weights of a run, and where these lie then."""

import logging
from functools import partial
from typing import Any, Literal

from torch import nn

from lightning_cxl.devices.device_type import device_type_of
from lightning_cxl.errors import PinnedMemoryError, TierFullError, UnsupportedError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.memory.stacks import where_pages_move
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.run.placed_memory import PlacedMemory
from lightning_cxl.sharding.measured_gather import measure_gather
from lightning_cxl.sharding.segments import PageLock
from lightning_cxl.sharding.share_choice import GatherSeconds, choose_sharing
from lightning_cxl.sharding.shared_memory import SharedWeights, group_of, share_weights
from lightning_cxl.sharding.torch_private import fsdp_units
from lightning_cxl.transfer.engine import TransferEngine

log = logging.getLogger(__name__)


class Sharing:
    """Moves shards into shared memory where that is asked for or faster. All ranks make it."""

    def __init__(
        self, asked: bool | Literal["auto"], model: nn.Module, memory: PlacedMemory, engine: TransferEngine
    ) -> None:
        self._weights: SharedWeights | None = None
        self.reason = ""
        """Why weights are shared or not; empty where nothing is gathered, or nobody has asked."""
        if asked is False or not fsdp_units(model):
            return
        try:
            self._choose(asked, model, memory, engine)
        except (UnsupportedError, PinnedMemoryError, TierFullError) as error:  # on all ranks of the group, or on none
            if asked is True:
                raise
            self.reason = f"weights are gathered between ranks: {error}"
        log.info(self.reason)

    @property
    def shares(self) -> bool:
        """Whether weights are shared."""
        return self._weights is not None

    def close(self) -> None:
        """Let ranks gather again. Weights stay where they are. Idempotent."""
        if self._weights is not None:
            self._weights.close()

    def _choose(
        self, asked: bool | Literal["auto"], model: nn.Module, memory: PlacedMemory, engine: TransferEngine
    ) -> None:
        group = group_of(fsdp_units(model))
        locks = not engine.computes_on_host and memory.memory.pins
        page_lock = device_type_of(engine.device) if locks else None
        places = _Places(memory)
        choice = choose_sharing(asked, group, partial(_measure, memory, model, group, engine, page_lock))
        self.reason = choice.reason
        if choice.shares:
            where = where_pages_move(memory.memory.topology)
            self._weights = share_weights(model, places, engine, page_lock=page_lock, where=where)


class _Places:
    """Where the shards of a run lie, as the decision says."""

    def __init__(self, memory: PlacedMemory, role: TensorRole = TensorRole.COMPUTE_WEIGHTS) -> None:
        self._memory = memory
        self._role = role

    def place(self, parameter: nn.Parameter, nbytes: int) -> Placement:
        """Return the placement of a parameter's shard."""
        return self._memory.placements.place(parameter, TensorRole.COMPUTE_WEIGHTS, nbytes)

    def back(self, place: Placement, nbytes: int, fd: int) -> Buffer:
        """Give memory there, of the run's budgets."""
        return self._memory.memory.allocate(nbytes, place, self._role, fd=fd)


def _measure(
    memory: PlacedMemory, model: nn.Module, group: Any, engine: TransferEngine, page_lock: PageLock | None
) -> GatherSeconds:
    """Time both ways where the first shard lies; what is measured with counts as staging."""
    places, parameter = _Places(memory, TensorRole.STAGING), next(model.parameters())
    back = partial(places.back, places.place(parameter, parameter.nbytes))
    return measure_gather(back, group, engine, page_lock=page_lock)
