"""What the ranks of a run exchange in one optimizer step: `step_volume`.

[Note: Communication volume]
Parameters are cut over N shards (`Mesh.num_shards`), and R replicas of the whole are kept (`Mesh.num_replicas`). What
is gathered or reduced together is a group: one unit, or the root, which has the parameters outside of units. With s the
bytes of one rank's shard of a group as it is gathered, and t those of the trained ones as they are reduced, both padded
to the longest shard, every rank receives, and sends as much::

    all-gather, forward     micro-batches * (N - 1) * s
    all-gather, backward    micro-batches * (N - 1) * s     units only: the root stays whole until its backward ends
    reduce-scatter          reductions * (N - 1) * t
    all-reduce              reductions * 2 * (R - 1) / R * t     of shards, between machines that replicate

Without padding, (N - 1) * s is (N - 1) / N * P * b for P parameters of b bytes. These are the volumes of rings, and the
least that any algorithm needs which lets every rank send as much as it receives. Reductions are as many as
micro-batches; with `no_sync` gradients are added up on the devices and there is one. Ranks that read weights from one
copy in host memory gather nothing.

Not counted: two numbers of 8 bytes, on which all ranks agree once a step: the norm of gradients where they are clipped,
and which gradient is not finite.

Between machines, a ring over all ranks brings every machine what it brings one rank, however many rings the adapters of
a machine have. Where machines replicate, shards of their devices are reduced in so many rings side by side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_cxl.inventory.activations import known_parameters
from lightning_cxl.inventory.mesh import Mesh
from lightning_cxl.streaming.units import NamedUnits


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Parameters that are gathered and reduced together."""

    name: str
    """Of the unit; empty for the root."""
    shard_bytes: int
    """What one rank puts into a gather, with padding."""
    reduced_bytes: int
    """What one rank gets from a reduction, with padding."""

    @property
    def is_root(self) -> bool:
        """Whether it has the parameters outside of units."""
        return not self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """Bytes that every rank receives in one step, and sends, by collective. See [Note: Communication volume]."""

    forward_gather: float = 0.0
    backward_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.forward_gather + self.backward_gather + self.reduce_scatter + self.all_reduce


def step_volume(groups: Iterable[Group], mesh: Mesh, num_micro_batches: int = 1, *, no_sync: bool = False) -> Volume:
    """Return what every rank receives in one step. See [Note: Communication volume].

    Args:
        groups: what is gathered and reduced together, see `groups_of`.
        mesh: the ranks.
        num_micro_batches: of the step.
        no_sync: only gradients of the last micro-batch are reduced.
    """
    found = list(groups)
    others = mesh.num_shards - 1
    gathers = 0 if mesh.shares_weights else num_micro_batches * others
    reductions = 1 if no_sync else num_micro_batches
    reduced = sum(group.reduced_bytes for group in found)
    return Volume(
        forward_gather=float(gathers * sum(group.shard_bytes for group in found)),
        backward_gather=float(gathers * sum(group.shard_bytes for group in found if not group.is_root)),
        reduce_scatter=float(reductions * others * reduced),
        all_reduce=reductions * 2 * (mesh.num_replicas - 1) / mesh.num_replicas * reduced,
    )


def groups_of(model: nn.Module, units: NamedUnits, mesh: Mesh, *, reduce_itemsize: int | None = None) -> list[Group]:
    """Return the groups of a model: its units in their order, then the root where anything is left for it.

    Args:
        model: on any device. A parameter that several modules share belongs to the first of them.
        units: blocks, as they are cut.
        mesh: the ranks.
        reduce_itemsize: bytes of a number as gradients are reduced; None: as the parameter has.
    """
    left = {id(parameter): parameter for parameter in known_parameters(model)}
    groups = []
    for name, parameters in [(name, [*unit.parameters()]) for name, unit in units] + [("", list(left.values()))]:
        own = [parameter for each in parameters if (parameter := left.pop(id(each), None)) is not None]
        if own:
            groups.append(_group(name, own, mesh, reduce_itemsize))
    return groups


def _group(name: str, parameters: Sequence[Tensor], mesh: Mesh, reduce_itemsize: int | None) -> Group:
    trained = [each for each in parameters if each.requires_grad]
    return Group(
        name=name,
        shard_bytes=sum(mesh.shard_numel(each) * each.element_size() for each in parameters),
        reduced_bytes=sum(mesh.shard_numel(each) * (reduce_itemsize or each.element_size()) for each in trained),
    )
