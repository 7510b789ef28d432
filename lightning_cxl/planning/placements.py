"""Where each tensor of one model goes: decorators, rules and the policy, asked per parameter, role and unit."""

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn
from torch.nn import Parameter

from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.wanted import grouped
from lightning_cxl.placement.decorators import TierSpec
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.placement.placer import Placer
from lightning_cxl.placement.rules import ModuleTiers

PARAMETER_ROLES = (
    TensorRole.COMPUTE_WEIGHTS,
    TensorRole.COMPUTE_GRADS,
    TensorRole.MASTER_WEIGHTS,
    TensorRole.MASTER_GRADS,
    TensorRole.MOMENTUM,
    TensorRole.VARIANCE,
)


class ModelPlacements:
    """Answers "where does this go?" for one model.

    Args:
        model: its parameters and their owners are read once.
        tiers: what decorators and rules ask for, by module name.
        placer: the policy with the machine's free bytes.
        pin: page-lock what a device copies, whatever the policy says about it.

    Raises:
        ConfigError: a tensor is shared between modules that ask for different tiers.
    """

    def __init__(self, model: nn.Module, tiers: ModuleTiers, placer: Placer, *, pin: bool = False) -> None:
        self._tiers = tiers
        self._placer = placer
        self._pin = pin
        self._decided: dict[tuple[int | str, TensorRole], Placement] = {}
        self._owners: dict[int, list[str]] = {}
        self.names: dict[int, str] = {}  # first name of every parameter, by id
        self.read(model)

    def read(self, model: nn.Module) -> None:
        """Learn names and owners of the parameters that a model has now.

        Raises:
            ConfigError: a tensor is shared between modules that ask for different tiers.
        """
        self._owners.clear()
        self.names.clear()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
            self.names.setdefault(id(parameter), name)
        for parameter_id, owners in self._owners.items():
            if len(owners) > 1:
                self._check_shared(self.names[parameter_id], owners)

    def for_parameter(self, parameter: Tensor, role: TensorRole, nbytes: int) -> Placement:
        """Return the placement of the tensor that plays `role` for a parameter; decided at the first call."""
        key = (id(parameter), role)
        if key not in self._decided:
            name = self.names.get(id(parameter), "")
            self._decided[key] = self._decide(self._owners.get(id(parameter), [""]), role, nbytes, name)
        return self._decided[key]

    def grouped(self, parameters: Iterable[Parameter], role: TensorRole) -> list[list[Parameter]]:
        """Return parameters in groups that the same tier, or none, is asked for."""
        return grouped(parameters, lambda parameter: self.asked(parameter, role))

    def spec_of(self, parameter: object) -> TierSpec | None:
        """Return what was asked for the module that owns a parameter; None for anything that is not one."""
        owners = self._owners.get(id(parameter))
        return None if owners is None else self._tiers.spec(owners[0])

    def for_unit(self, unit: str, role: TensorRole, nbytes: int) -> Placement:
        """Return the placement of something a unit owns, e.g. its activations; decided at the first call."""
        key = (unit, role)
        if key not in self._decided:
            self._decided[key] = self._decide([unit], role, nbytes, unit)
        return self._decided[key]

    def asked(self, owner: Tensor | str, role: TensorRole) -> str | None:
        """Return the tier that decorators or rules ask for, for a role of a parameter or of a unit, by name."""
        owners = [owner] if isinstance(owner, str) else self._owners.get(id(owner), [""])
        return self._asked(owners, role)[0]

    def _decide(self, owners: list[str], role: TensorRole, nbytes: int, name: str) -> Placement:
        tier, source = self._asked(owners, role)
        placement = self._placer.place(role, nbytes, tier=tier, source=source, module=name)
        return replace(placement, pinned=True) if self._pin and role.is_copied else placement

    def _asked(self, owners: Iterable[str], role: TensorRole) -> tuple[str | None, str]:
        """Return the tier the first owner with a wish asks for, and who said so."""
        for owner in owners:
            tier, source = self._tiers.lookup(owner, role)
            if tier is not None:
                return tier, source
        return None, ""

    def _check_shared(self, name: str, owners: list[str]) -> None:
        for role in PARAMETER_ROLES:
            wishes = {owner: self._tiers.lookup(owner, role) for owner in owners}
            asked = {owner: wish for owner, wish in wishes.items() if wish[0] is not None}
            if len({tier for tier, _ in asked.values()}) > 1:
                text = " and ".join(f"`{owner}` on tier {tier!r} ({source})" for owner, (tier, source) in asked.items())
                raise ConfigError(
                    f"parameter `{name}` is shared between modules that ask for different tiers for {role.name}: "
                    f"{text}. Give both the same tier."
                )
