"""What may lie on the tier `ssd`: the one place that says so."""

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.placement.decorators import field_of_role
from lightning_cxl.placement.placement import TensorRole

ROLES_ON_SSD = frozenset({TensorRole.MOMENTUM, TensorRole.VARIANCE, TensorRole.MASTER_WEIGHTS})
"""Of these, what is part of `CPUAdam`'s state; full master weights are not. See `HostTensor.in_state`."""
_SETTLED_ROLES = frozenset({TensorRole.COMPUTE_WEIGHTS, TensorRole.ACTIVATIONS})
_FIELDS = frozenset(filter(None, map(field_of_role, ROLES_ON_SSD | _SETTLED_ROLES)))
_WHAT = (
    "Only optimizer state of `CPUAdam` (momentum, variance, and what master weights have beyond bfloat16 weights), "
    "weights of units that stream, and inputs of units can lie there. Ask for these alone: "
    '{"optimizer_state": "ssd", "weights": "ssd", "activations": "ssd"}'
)


def check_field_on_ssd(field: str, source: str) -> None:
    """Refuse a field of a rule or decorator whose tensors cannot lie on the tier `ssd`.

    Args:
        field: of a `TierSpec`.
        source: who asks, for the message.

    Raises:
        UnsupportedError: it cannot; the message says what can.
    """
    if field not in _FIELDS:
        raise UnsupportedError(f"{source} asks for {field} on tier 'ssd', and that cannot lie there yet. {_WHAT}")


def check_role_on_ssd(role: TensorRole, source: str) -> None:
    """Refuse a role whose tensors cannot be made on the tier `ssd`; weights and inputs of units move there.

    Args:
        role: of the tensor.
        source: who asks, for the message.

    Raises:
        UnsupportedError: it cannot; the message says what can.
    """
    if role not in ROLES_ON_SSD:
        raise UnsupportedError(f"{source} asks for {role.value} on tier 'ssd', and that cannot lie there yet. {_WHAT}")
