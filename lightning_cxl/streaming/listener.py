"""`UnitListener`: learns what happens to streamed units. Gradients come and are looked at in step with it."""

from typing import Any, Protocol


class UnitListener(Protocol):
    """Learns what happens to streamed units."""

    def recompute_begins(self) -> None:
        """Learn that a unit is about to be recomputed, in the backward that it is a part of."""

    def unit_is_over(self, unit: Any) -> None:
        """Learn that the backward of a unit is over, and that its weights are at home."""

    def someone_looks(self) -> None:
        """Learn that someone looks at parameters through their modules. What runs behind is done."""


class Nobody:
    """A `UnitListener` that does nothing: of units that are not trained."""

    def recompute_begins(self) -> None:
        """Do nothing."""

    def unit_is_over(self, unit: Any) -> None:
        """Do nothing."""

    def someone_looks(self) -> None:
        """Do nothing."""
