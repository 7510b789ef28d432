"""`AskedTiers`: the tiers that decorators and rules ask for, for the parameters and units of one model."""

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_cxl.errors import ConfigError
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.rules import ModuleTiers

_PARAMETER_ROLES = (
    TensorRole.COMPUTE_WEIGHTS,
    TensorRole.COMPUTE_GRADS,
    TensorRole.MASTER_WEIGHTS,
    TensorRole.MASTER_GRADS,
    TensorRole.MOMENTUM,
    TensorRole.VARIANCE,
)


class AskedTiers:
    """Knows which modules own a parameter, and what is asked for them.

    Args:
        model: see `read`.
        tiers: what decorators and rules ask for, by module name.

    Raises:
        ConfigError: a tensor is shared between modules that ask for different tiers.
    """

    def __init__(self, model: nn.Module, tiers: ModuleTiers) -> None:
        self._tiers = tiers
        self._owners: dict[int, list[str]] = {}
        self.names: dict[int, str] = {}
        """First name of every parameter, by the parameter's id."""
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

    def lookup(self, owner: Tensor | str, role: TensorRole) -> tuple[str | None, str]:
        """Return the tier that is asked for, and who asks; None and an empty text where nobody does.

        Args:
            owner: a parameter, or the name of a unit.
            role: of the tensor that is placed for the owner.
        """
        for module in self._modules_of(owner):
            tier, source = self._tiers.lookup(module, role)
            if tier is not None:
                return tier, source
        return None, ""

    def tier(self, owner: Tensor | str, role: TensorRole) -> str | None:
        """Return the tier alone; see `lookup`."""
        return self.lookup(owner, role)[0]

    def _modules_of(self, owner: Tensor | str) -> Iterable[str]:
        return [owner] if isinstance(owner, str) else self._owners.get(id(owner), [""])

    def _check_shared(self, name: str, owners: list[str]) -> None:
        for role in _PARAMETER_ROLES:
            wishes = {owner: self._tiers.lookup(owner, role) for owner in owners}
            asked = {owner: wish for owner, wish in wishes.items() if wish[0] is not None}
            if len({tier for tier, _ in asked.values()}) > 1:
                text = " and ".join(f"`{owner}` on tier {tier!r} ({source})" for owner, (tier, source) in asked.items())
                raise ConfigError(
                    f"parameter `{name}` is shared between modules that ask for different tiers for {role.name}: "
                    f"{text}. Give both the same tier."
                )
