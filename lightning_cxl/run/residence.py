"""`Residence`: where a model's compute weights live.

[Note: Homes of compute weights]
* The CPU computes: in host memory that the policy placed.
* A device apart: on the device, except those that stream.
* Cut over several processes: the shards in host memory that the policy placed, or on SSD, for a device apart
  ([Note: Shards on SSD]). Quantised layers are whole, and stream as with one.
* Streamed (`stream_weights`): the parameters of units, each unit in one piece of host memory per tier, and on the
  device only while the unit computes ([Note: Residency of a unit]). What units share with others, and what lies outside
  of them (embedding, final norm, head), does not stream.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_cxl.inventory.tensors import StreamedUnit
from lightning_cxl.memory.host_memory import large_blocks_apart
from lightning_cxl.run.placed_memory import PlacedMemory
from lightning_cxl.sharding.fsdp import place_shards, pooled_exchanges
from lightning_cxl.shards import is_sharded
from lightning_cxl.streaming.activations import Phase
from lightning_cxl.streaming.on_ssd import ShardsOnSsd
from lightning_cxl.streaming.quantised import (
    has_quantised,
    numel,
    prepare_layers,
    show,
    tensors_of,
    warn_of_wide_experts,
)
from lightning_cxl.streaming.unit_weights import ParamStreamer, UnitWeights, peek
from lightning_cxl.streaming.units import owners_in
from lightning_cxl.transfer.engine import TransferEngine

# ----------------------------------------------------------------------------------------------------
# Compute weights on the host: move a model's parameters into memory that the policy placed.
#
# Only where host memory is what the device computes on (the CPU as accelerator). A parameter keeps its identity, shape,
# strides and values; its memory is its own (nothing else lies in its storage, so saving one parameter saves just that).

PlaceLike = Callable[[nn.Parameter, torch.Tensor], torch.Tensor | None]
"""Returns an uninitialised host tensor like a parameter or one that belongs to it, placed for its weights; None if it
is in place already."""


@torch.no_grad()
def place_weights(model: nn.Module, place: PlaceLike) -> tuple[str, ...]:
    """Move every parameter of `model` to the memory that `place` gives; returns the names of those that stay put.

    What belongs to a quantised parameter goes with it ([Note: Quantised parameters]).

    Shards have moved before. Stay put: parameters whose storage is shared with another tensor of the model (moving one
    would cut the tie), parameters not materialised yet, and tensor subclasses with storage of their own kind.
    """
    named = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    plain = {name: p for name, p in named.items() if not is_lazy(p) and type(p.data) is torch.Tensor}
    uses = Counter(_storage_id(t) for t in [*plain.values(), *buffers.values()] if type(t.data) is torch.Tensor)
    kept = [name for name in named if name not in plain and not is_sharded(named[name])]
    module_of = owners_in(model)
    for name, parameter in plain.items():
        if parameter.numel() == 0 or parameter.device.type != "cpu":
            continue
        if parameter.layout is not torch.strided or uses[_storage_id(parameter)] > 1:
            kept.append(name)
            continue
        module = module_of[id(parameter)]
        tensors = tensors_of(module, parameter)
        homes = {key: place(parameter, tensor) for key, tensor in tensors.items()}
        moved = {k: t.detach() if (home := homes[k]) is None else home.copy_(t.detach()) for k, t in tensors.items()}
        if any(home is not None for home in homes.values()):
            show(module, parameter, moved)
    return tuple(kept)


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else id(tensor)


log = logging.getLogger(__name__)


class Residence:
    """Moves a model's weights to their homes, and brings those that stream to the device when their unit computes."""

    def __init__(
        self,
        model: nn.Module,
        memory: PlacedMemory,
        engine: TransferEngine,
        streamed: Sequence[StreamedUnit],
        gathered: Sequence[StreamedUnit] = (),
    ) -> None:
        self._engine = engine
        self.streamed_ids = frozenset(id(p) for unit in streamed for group in unit.groups for p in group)
        """Ids of the parameters that stream."""
        on_host = engine.device.type == "cpu"
        warn_of_wide_experts(model)
        self.unplaced: tuple[str, ...] = ()
        """Names of parameters that stay in ordinary host memory."""
        self._streamer: ParamStreamer | None = None
        with ExitStack() as undo:  # nothing of it is left after an error
            undo.callback(prepare_layers(model, self.streamed_ids))
            if on_host and has_quantised(model):
                undo.enter_context(large_blocks_apart())
            self.units = [UnitWeights(name, module, groups, memory.piece) for name, module, groups in streamed]
            if on_host:
                undo.enter_context(pooled_exchanges(model))
            groups = [group for unit in gathered for group in unit.groups]
            on_drives = [(home, group) for group in groups if (home := memory.on_drives(group)) is not None]
            place_shards(model, memory.shard)
            for home, group in on_drives:
                undo.callback(ShardsOnSsd(home, engine, model, group).close)
            if on_host:
                self.unplaced = place_weights(
                    model, lambda p, tensor: None if id(p) in self.streamed_ids else memory.weights(p, tensor)
                )
            else:
                self._move_rest(model, engine.device)
            self._undo = undo.pop_all()

    def stream(self, phase: Callable[[], Phase | None]) -> ParamStreamer | None:
        """Get ready to stream the weights of units.

        Args:
            phase: as of `ActivationOffload`, which must be attached after what this returns.

        Returns:
            What brings them; None if nothing streams.
        """
        if self.units:
            self._streamer = ParamStreamer(self._engine, self.units, phase)
        return self._streamer

    def stats(self) -> dict[str, int]:
        """Return what streams, see `ParamStreamer.stats`; nothing if nothing does."""
        return {} if self._streamer is None else self._streamer.stats()

    def notes(self) -> list[str]:
        """Return what a user should know about where weights are."""
        kept = self.unplaced
        return [f"{len(kept)} parameters stay in ordinary memory, e.g. `{kept[0]}` (shared storage)"] if kept else []

    def forget_copies(self) -> None:
        """Let weights be copied to the device again when they are needed next."""
        if self._streamer is not None:
            self._streamer.forget()

    def close(self) -> None:
        """Stop streaming. The weights stay where they are. Idempotent."""
        self._undo.close()
        if self._streamer is not None:
            self._streamer.detach()

    def _move_rest(self, model: nn.Module, device: torch.device) -> None:
        """Move what does not stream, through the model's own `to`: modules may do more there than move tensors."""
        own = [module.__dict__ for module in model.modules()]  # what is set on a compiled module, the one inside gets
        before = [(attributes, attributes["_parameters"]) for attributes in own]
        for attributes, parameters in before:
            rest = {n: p for n, p in parameters.items() if p is None or id(p) not in self.streamed_ids}
            attributes["_parameters"] = rest
        try:
            model.to(device)
        finally:
            for attributes, parameters in before:
                moved = attributes["_parameters"]
                kept = {n: moved.get(n, p) for n, p in parameters.items() if n in moved or id(p) in self.streamed_ids}
                attributes["_parameters"] = kept | moved  # in the old order; the move may also drop some and add others


def bring_to_host(model: nn.Module, device: torch.device) -> None:
    """Move a model from the device that has trained it to the host. Where an error is on its way, that one is shown."""
    if device.type == "cpu":
        return
    error = sys.exc_info()[1]
    try:
        model.cpu()
    except Exception:  # torch replaces no parameter that an error's traceback still leads to
        if error is None:
            raise
        log.warning("after an error, weights stay on `%s`", device, exc_info=True)


def count_parameters(model: nn.Module | None) -> dict[str, int]:
    """Return the elements of a model's parameters, of all and of those that are trained."""
    # without a look: updates may be running, or may have failed
    parameters = [] if model is None else [p for p in {id(p): p for p in peek(model)}.values() if not is_lazy(p)]
    return {
        "num_parameters": sum(numel(p) for p in parameters),
        "num_trainable": sum(p.numel() for p in parameters if p.requires_grad),
    }
