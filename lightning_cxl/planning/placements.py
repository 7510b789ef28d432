"""`Placements`: where each tensor of one model goes, decided once."""

from dataclasses import replace

from torch import Tensor

from lightning_cxl.inventory.asked import AskedTiers
from lightning_cxl.inventory.tensors import HostTensor
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.placement.placer import Placer
from lightning_cxl.ssd_options import SSD


class Placements:
    """Answers "where does this go?" for one model: decorators and rules first, then the policy.

    Args:
        asked: what decorators and rules ask for.
        placer: the policy with the machine's free bytes.
        pin: page-lock what a device copies, whatever the policy says about it.
    """

    def __init__(self, asked: AskedTiers, placer: Placer, *, pin: bool = False) -> None:
        self.asked = asked
        self.placer = placer
        self._pin = pin
        self._decided: dict[tuple[int | str, TensorRole, bool], Placement] = {}

    def of(self, tensor: HostTensor) -> Placement:
        """Return the placement of a tensor of the inventory."""
        return self.place(tensor.owner, tensor.role, tensor.nbytes, in_state=tensor.in_state)

    def place(self, owner: Tensor | str, role: TensorRole, nbytes: int, *, in_state: bool = False) -> Placement:
        """Return the placement of the tensor that plays `role` for its owner; decided at the first call.

        Args:
            owner: a parameter of the model; for inputs of a unit, the name of the unit.
            role: of the tensor.
            nbytes: its size.
            in_state: see `HostTensor`; only such a tensor, weights, or inputs of units may be placed on the tier `ssd`.
        """
        key = (owner if isinstance(owner, str) else id(owner), role, in_state)
        if key not in self._decided:
            self._decided[key] = self._decide(owner, role, nbytes, in_state)
        return self._decided[key]

    def _decide(self, owner: Tensor | str, role: TensorRole, nbytes: int, in_state: bool) -> Placement:
        tier, source = self.asked.lookup(owner, role, in_state=in_state)
        if tier == SSD and role in (TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS):
            return Placement((tier,), reason=source)
        return self._in_memory(owner, role, nbytes, tier, source)

    def in_memory(self, unit: str, nbytes: int) -> Placement:
        """Return where an input of a unit goes that belongs on the tier `ssd` and has no room there."""
        return self._in_memory(unit, TensorRole.ACTIVATIONS, nbytes, None, "tier ssd is full")

    def _in_memory(
        self, owner: Tensor | str, role: TensorRole, nbytes: int, tier: str | None, source: str
    ) -> Placement:
        name = owner if isinstance(owner, str) else self.asked.names.get(id(owner), "")
        placement = self.placer.place(role, nbytes, tier=tier, source=source, module=name)
        if tier is None and source:
            placement = replace(placement, reason=f"{placement.reason}; {source}")
        return replace(placement, pinned=True) if self._pin and role.is_copied else placement
