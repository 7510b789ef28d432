"""`choose_sharing`: whether ranks of a machine share weights, as the user says or as a measurement does."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.agreement import on_all_ranks
from lightning_cxl.sharding.same_machine import own_place, why_apart


@dataclass(frozen=True, slots=True)
class GatherSeconds:
    """What a gather of the same bytes has taken in both ways."""

    nbytes: int
    """Of the whole unit."""
    shared: float
    """Every rank reads shared host memory."""
    peers: float
    """Ranks send each other their parts."""

    @property
    def shares_weights(self) -> bool:
        """Whether shared memory is the faster way; also where both take as long, for it needs no collective."""
        return self.shared <= self.peers

    def explain(self) -> str:
        """Return one line for a report."""
        ways = {"shared host memory": self.shared, "gathers between ranks": self.peers}
        (fast, less), (slow, more) = sorted(ways.items(), key=lambda item: (item[1], item[0] != "shared host memory"))
        speeds = f"{self.nbytes / less / 1e9:.2f} GB/s, {slow} {self.nbytes / more / 1e9:.2f} GB/s"
        return f"weights come together by {fast}: {speeds} (measured)"


class ShareChoice(NamedTuple):
    """Whether weights are shared, and why, in one line for the report."""

    shares: bool
    reason: str


def choose_sharing(asked: bool | Literal["auto"], group: Any, measure: Callable[[], GatherSeconds]) -> ShareChoice:
    """Decide for a group over which weights are sharded. All of its ranks call it, and get the same.

    Args:
        asked: what the user wants; `"auto"`: what is faster on this machine.
        measure: times both ways on all ranks, see `measure_gather`; called for `"auto"` where ranks can share.
    """
    if asked is False:
        return ShareChoice(False, "weights are gathered between ranks, as share_weights=False asks for")
    apart = why_apart(on_all_ranks(own_place, group))
    if asked is True:
        if apart is not None:
            raise UnsupportedError(
                f"share_weights=True cannot be honoured: {apart}. Use share_weights='auto', or a mesh of two "
                "dimensions whose last one, over which weights are sharded, stays inside a machine (HSDP)."
            )
        return ShareChoice(True, "weights lie in shared host memory, as share_weights=True asks for")
    if apart is not None:
        return ShareChoice(False, f"weights are gathered between ranks: {apart}")
    try:
        found = measure()
    except UnsupportedError as error:  # on all ranks, or on none
        return ShareChoice(False, f"weights are gathered between ranks: {error}")
    return ShareChoice(found.shares_weights, found.explain())
