"""`AskedTiers`: the tiers that decorators and rules ask for, for the parameters and units of one model."""

from collections.abc import Iterable

from torch import Tensor, nn

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.rules import ModuleTiers
from lightning_cxl.shards import is_sharded
from lightning_cxl.ssd_options import SSD

_PARAMETER_ROLES = (
    TensorRole.COMPUTE_WEIGHTS,
    TensorRole.COMPUTE_GRADS,
    TensorRole.MASTER_WEIGHTS,
    TensorRole.MASTER_GRADS,
    TensorRole.MOMENTUM,
    TensorRole.VARIANCE,
)


class AskedTiers:
    """Knows which modules own a parameter, and what is asked for them."""

    def __init__(self, model: nn.Module, tiers: ModuleTiers) -> None:
        self._tiers = tiers
        self._owners: dict[int, list[str]] = {}
        # by name: `read` may find new parameters
        self._state: dict[str, tuple[str | None, str]] = {}
        self._weights: dict[str, tuple[str | None, str]] = {}
        self._inputs: dict[str, tuple[str | None, str]] = {}  # by unit
        self._may_leave: set[str] = set()
        self._why_not = ""
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

    def may_leave_memory(self, parameters: Iterable[Tensor], why_not: str = "") -> None:
        """Learn which weights may lie on the tier `ssd`: those that stream, and that only `CPUAdam` writes.

        Args:
            why_not: why none of those that are cut over processes may; empty if they may.
        """
        self._why_not = why_not
        self._may_leave = {self.names[id(parameter)] for parameter in parameters}

    def weights_may_leave(self, owner: Tensor | str, role: TensorRole) -> bool:
        """Return whether what plays a role for its owner are weights that may lie on the tier `ssd`."""
        of_parameter = role is TensorRole.COMPUTE_WEIGHTS and not isinstance(owner, str)
        return of_parameter and self.names.get(id(owner), "") in self._may_leave

    def place_weights(self, parameters: Iterable[Tensor], tier: str | None, source: str) -> None:
        """Ask for a tier for weights, instead of decorators and rules; as `place_state`."""
        self._weights.update((self.names[id(parameter)], (tier, source)) for parameter in parameters)

    def place_inputs(self, units: Iterable[str], tier: str | None, source: str) -> None:
        """Ask for a tier for inputs of units, instead of decorators and rules; as `place_state`."""
        self._inputs.update((unit, (tier, source)) for unit in units)

    def place_state(self, parameters: Iterable[Tensor], tier: str | None, source: str) -> None:
        """Ask for a tier for the state of parameters, instead of decorators and rules."""
        self._state.update((self.names[id(parameter)], (tier, source)) for parameter in parameters)

    def lookup(self, owner: Tensor | str, role: TensorRole, *, in_state: bool = False) -> tuple[str | None, str]:
        """Return the tier that is asked for, and who asks; None and an empty text where nobody does.

        Master weights that are not part of the state, and weights that may not leave memory, stay there where the tier
        `ssd` is asked for: then this is None and the reason.
        """
        for tier, source in self._asked(owner, role, in_state):
            may_leave = in_state or role is TensorRole.ACTIVATIONS or self.weights_may_leave(owner, role)
            if tier == SSD and not may_leave:
                return None, self._why_in_memory(owner, role, source)
            if tier is not None or source:
                return tier, source
        return None, ""

    def tier(self, owner: Tensor | str, role: TensorRole, *, in_state: bool = False) -> str | None:
        """Return the tier alone; see `lookup`."""
        return self.lookup(owner, role, in_state=in_state)[0]

    def _asked(self, owner: Tensor | str, role: TensorRole, in_state: bool) -> Iterable[tuple[str | None, str]]:
        if isinstance(owner, str) and role is TensorRole.ACTIVATIONS and owner in self._inputs:
            return [self._inputs[owner]]
        chosen = self._state if in_state else self._weights if role is TensorRole.COMPUTE_WEIGHTS else {}
        if not isinstance(owner, str) and (own := chosen.get(self.names.get(id(owner), ""))):
            return [own]
        return [self._tiers.lookup(module, role) for module in self._modules_of(owner)]

    def _why_in_memory(self, owner: Tensor | str, role: TensorRole, source: str) -> str:
        if role is TensorRole.COMPUTE_WEIGHTS:
            if self._why_not and not isinstance(owner, str) and is_sharded(owner):
                name = self.names.get(id(owner), "")
                raise UnsupportedError(f"{source} asks for weights of `{name}` on tier {SSD!r}, and {self._why_not}")
            return (
                f"{source} asks for {SSD}, and only weights of units that stream can lie there, if no other optimizer "
                f"than `CPUAdam` writes them"
            )
        if role is not TensorRole.MASTER_WEIGHTS:
            name = owner if isinstance(owner, str) else self.names.get(id(owner), "")
            raise UnsupportedError(
                f"{source} asks for {role.value} of `{name}` on tier {SSD!r}, and its optimizer keeps that itself. "
                f"Only state of `CPUAdam` can lie there: use torch's Adam or AdamW with cpu_adam=True, or another tier"
            )
        return (
            f"{source} asks for {SSD}, and copies of weights stay in memory: of bfloat16 weights, master='split' puts "
            f"what masters have beyond them there"
        )

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
