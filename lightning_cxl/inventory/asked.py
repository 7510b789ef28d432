"""`AskedTiers`: the tiers that decorators and rules ask for, for the parameters and units of one model."""

from collections.abc import Sequence

from torch import Tensor, nn

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.rules import ModuleTiers
from lightning_cxl.shards import is_sharded
from lightning_cxl.ssd_options import SSD

_PARAMETER_ROLES = [role for role in TensorRole if role not in (TensorRole.ACTIVATIONS, TensorRole.STAGING)]


class AskedTiers:
    """The names of parameters, which modules own them, and what is asked for those modules."""

    def __init__(self, model: nn.Module, tiers: ModuleTiers) -> None:
        self._tiers = tiers
        self._owners: dict[int, list[str]] = {}
        self.names: dict[int, str] = {}
        """First name of every parameter, by the parameter's id."""
        self.read(model)

    def read(self, model: nn.Module) -> None:
        """Learn names and owners of the parameters that a model has now."""
        self._owners.clear()
        self.names.clear()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._owners.setdefault(id(parameter), []).append(name.rpartition(".")[0])
            self.names.setdefault(id(parameter), name)
        for parameter_id, owners in self._owners.items():
            if len(owners) > 1:
                self._check_shared(self.names[parameter_id], owners)

    def lookup(
        self, owner: Tensor | str, role: TensorRole, *, may_leave: bool = False, why_not: str = ""
    ) -> tuple[str | None, str]:
        """Return the tier that is asked for, and who asks; None and an empty text where nobody does.

        Args:
            owner: a parameter, or the name of a unit for its inputs.
            may_leave: whether the tier `ssd` can hold it. If not, and that is asked for, the tier is None, with the
                reason.
            why_not: why weights that are cut over processes cannot lie there.
        """
        owners = [owner] if isinstance(owner, str) else self._owners.get(id(owner), [""])
        for tier, source in (self._tiers.lookup(module, role) for module in owners):
            if tier == SSD and not may_leave:
                return None, self._why_in_memory(owner, role, source, why_not)
            if tier is not None or source:
                return tier, source
        return None, ""

    def _why_in_memory(self, owner: Tensor | str, role: TensorRole, source: str, why_not: str) -> str:
        name = owner if isinstance(owner, str) else self.names.get(id(owner), "")
        if role is TensorRole.COMPUTE_WEIGHTS:
            if why_not and not isinstance(owner, str) and is_sharded(owner):
                raise UnsupportedError(f"{source} asks for weights of `{name}` on tier {SSD!r}, and {why_not}")
            return (
                f"{source} asks for {SSD}, and only weights of units that stream can lie there, if no other optimizer "
                f"than `CPUAdam` writes them"
            )
        if role is not TensorRole.MASTER_WEIGHTS:
            raise UnsupportedError(
                f"{source} asks for {role.value} of `{name}` on tier {SSD!r}, and its optimizer keeps that itself. "
                f"Only state of `CPUAdam` can lie there: use torch's Adam or AdamW with cpu_adam=True, or another tier"
            )
        return (
            f"{source} asks for {SSD}, and copies of weights stay in memory: of bfloat16 weights, master='split' puts "
            f"what masters have beyond them there"
        )

    def _check_shared(self, name: str, owners: Sequence[str]) -> None:
        for role in _PARAMETER_ROLES:
            asked = {owner: wish for owner in owners if (wish := self._tiers.lookup(owner, role))[0] is not None}
            if len({tier for tier, _ in asked.values()}) > 1:
                text = " and ".join(f"`{owner}` on tier {tier!r} ({source})" for owner, (tier, source) in asked.items())
                raise ConfigError(
                    f"parameter `{name}` is shared between modules that ask for different tiers for {role.name}: "
                    f"{text}. Give both the same tier."
                )
