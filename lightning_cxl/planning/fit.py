"""Whether a list of tensors fits, before the first of them is allocated."""

import math
from collections.abc import Mapping, Sequence

from lightning_cxl.config import OnTierFull
from lightning_cxl.errors import TierFullError
from lightning_cxl.placement.placement import Placement, TensorRole
from lightning_cxl.ssd_options import SSD
from lightning_cxl.units import format_bytes


def split_bytes(nbytes: int, placement: Placement) -> dict[str, int]:
    """Return what each tier gets of a tensor, whole bytes that add up to `nbytes`."""
    sizes: dict[str, int] = {}
    before, share_before = 0, 0.0
    for tier, share in placement.split().items():
        share_before += share
        end = min(nbytes, round(nbytes * share_before))
        sizes[tier], before = end - before, end
    sizes[tier] += nbytes - before  # shares may add up to a millionth less than 1
    return sizes


def check_fits(
    requests: Sequence[tuple[TensorRole, int, Placement]],
    free: Mapping[str, int],
    on_tier_full: OnTierFull,
    *,
    most: float = math.inf,
) -> None:
    """Refuse a list of (role, bytes, placement) that the tiers of memory cannot hold, before anything is allocated.

    What is placed on the tier `ssd` takes no memory, see `SsdRoom.check`.

    Args:
        requests: in the order in which they will be allocated.
        free: bytes by tier of memory.
        on_tier_full: whether a full tier spills.
        most: bytes of all tiers together, where they share memory or a limit.

    Raises:
        TierFullError: names the first role that does not fit, how much it needs in all and what every tier has left.
    """
    left, together = dict(free), most
    requests = [each for each in requests if SSD not in each[2].tiers]
    for role, nbytes, placement in requests:
        together -= nbytes
        sizes = None if together < 0 else _where_it_fits(nbytes, placement, left, on_tier_full)
        if sizes is None:
            allowed = placement.tiers if on_tier_full == "spill" else tuple(placement.split())
            needed = sum(size for other, size, _ in requests if other is role)
            have = ", ".join(f"`{name}` {format_bytes(size)}" for name, size in free.items())
            total = format_bytes(sum(size for _, size, _ in requests))
            raise TierFullError(
                f"cannot place {role.value} ({format_bytes(needed)} of {total} to place now) on tier "
                f"{' and '.join(f'`{name}`' for name in placement.split())}"
                f"{' or any other' if len(allowed) > len(placement.split()) else ''}: free before that: {have}"
                f"{f', {format_bytes(most)} together' if together < 0 else ''}. Raise "
                "the tier's budget in `tiers`, free memory, use a smaller model, or see what there is with "
                "`python -m lightning_cxl env`."
            )
        for tier, size in sizes.items():
            left[tier] -= size


def _where_it_fits(
    nbytes: int, placement: Placement, left: Mapping[str, int], on_tier_full: OnTierFull
) -> dict[str, int] | None:
    """Return what each tier gets, as `HostMemory` divides a tensor; None when it fits nowhere."""
    sizes = split_bytes(nbytes, placement)
    over = sum(max(0, size - left.get(tier, 0)) for tier, size in sizes.items())
    if not over:
        return sizes
    if on_tier_full == "error":
        return None
    if sum(left.get(tier, 0) for tier in sizes) < nbytes:
        spilled = next((tier for tier in placement.tiers if tier not in sizes and left.get(tier, 0) >= nbytes), None)
        return None if spilled is None else {spilled: nbytes}
    for tier, size in sizes.items():  # the others of the split take what one of them cannot
        room = left.get(tier, 0)
        more = min(over, max(0, room - size))
        sizes[tier] = min(size, room) + more
        over -= more
    return sizes
