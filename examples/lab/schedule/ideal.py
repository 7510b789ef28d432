"""What a step takes at best: everything overlapped, and everything overlapped that its dependencies allow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Seconds of work of each kind."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    host_s: float

    def longest_s(self) -> float:
        return max(self.compute_s, self.h2d_s, self.d2h_s, self.host_s)

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.compute_s + other.compute_s,
            self.h2d_s + other.h2d_s,
            self.d2h_s + other.d2h_s,
            self.host_s + other.host_s,
        )


@dataclass(frozen=True)
class Step:
    """One training step with an exact update.

    The first unit's weights come from its update, so nothing computes while they are fetched; its gradients are the
    last ones, so nothing computes while they are written out and used.
    """

    num_units: int
    forward: Load
    backward: Load
    fetch_s: float
    """A unit's weights' way to the device."""
    write_s: float
    """A unit's gradients' way to the host."""
    update_s: float
    """A unit's update."""

    def ratio(self) -> float:
        """Return the seconds of compute in those of the longest transfer."""
        both = self.forward + self.backward
        return both.compute_s / max(both.h2d_s, both.d2h_s, both.host_s)

    def ideal_s(self) -> float:
        """Return the longest kind of work, and the first fetch and the last write with its update."""
        return (self.forward + self.backward).longest_s() + self.fetch_s + self.write_s + self.update_s

    def bound_s(self) -> float:
        """Return what no schedule is faster than that keeps copies to the phase that asks for them.

        Backward cannot begin before forward has ended; gradients and updates exist in backward only, from its first
        unit on; and the device has no room to move copies to the other phase.
        """
        forward, backward = self.forward, self.backward
        forward_unit_s, backward_unit_s = forward.compute_s / self.num_units, backward.compute_s / self.num_units
        forward_s = max(
            self.fetch_s + forward.compute_s,
            forward.h2d_s + forward_unit_s,
            # the last input may be on its way still when backward begins
            forward.d2h_s * (1 - 1 / self.num_units) + forward_unit_s,
        )
        backward_s = max(
            backward.compute_s + self.write_s + self.update_s,
            backward.h2d_s + backward_unit_s + self.write_s + self.update_s,
            backward_unit_s + backward.d2h_s + self.update_s,
            backward_unit_s + self.write_s + backward.host_s,
        )
        return forward_s + backward_s

    def serial_s(self) -> float:
        """Return what it takes when nothing overlaps."""
        both = self.forward + self.backward
        return both.compute_s + both.h2d_s + both.d2h_s + both.host_s


@dataclass(frozen=True)
class UnitShape:
    """Bytes of one unit, and what its links and its update take."""

    weights_bytes: float
    activation_bytes: float
    gradient_bytes: float
    update_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float

    def step(self, num_units: int, num_slots: int, forward_s: float, backward_s: float) -> Step:
        """Return the step of a model of such units.

        Weights are fetched once for each phase, but those in the slots when forward ends need no second time; the last
        unit's input is on the device when backward begins.
        """
        refetched = max(0, num_units - num_slots)
        fetch_s = self.weights_bytes / self.h2d_bytes_per_s
        out_s, back_s = self.activation_bytes / self.d2h_bytes_per_s, self.activation_bytes / self.h2d_bytes_per_s
        write_s = self.gradient_bytes / self.d2h_bytes_per_s
        return Step(
            num_units,
            forward=Load(forward_s, num_units * fetch_s, num_units * out_s, 0.0),
            backward=Load(
                backward_s,
                refetched * fetch_s + (num_units - 1) * back_s,
                num_units * write_s,
                num_units * self.update_s,
            ),
            fetch_s=fetch_s,
            write_s=write_s,
            update_s=self.update_s,
        )
