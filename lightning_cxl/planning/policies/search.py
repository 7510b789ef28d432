"""Finds which fraction of every class should be local, so that a convex cost is least and nothing overflows.

The cost is a sum of maxima over resources, so it is convex, flat where something else decides, and has kinks where two
resources tie. Moving one class at a time gets stuck at a kink; moving bytes of one class in and as many of another out
does not. Steps halve until they are small. Deterministic, and a few hundred evaluations: no solver is needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_STEPS = tuple(0.5**k for k in range(1, 10))
_GAIN = 1e-6  # relative; below it two costs are the same
_SMALL = 1e-3  # of all bytes; what a class this small does is not worth looking for: it stays where a start has it
_MAX_MOVES = 64  # of one size

Fractions = tuple[float, ...]
"""Local part of every class, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What fits: the classes' bytes, and how many of them may and must be local."""

    nbytes: tuple[int, ...]
    most_local: float
    least_local: float

    def local(self, x: Sequence[float]) -> float:
        """Return the local bytes."""
        return sum(size * part for size, part in zip(self.nbytes, x, strict=True))

    def repaired(self, x: Sequence[float]) -> Fractions:
        """Return the fractions with all scaled down, or up towards 1, so that they fit."""
        now, total = self.local(x), sum(self.nbytes)
        if now > self.most_local:
            x = [part * self.most_local / now for part in x]
        elif now < self.least_local:
            up = (self.least_local - now) / (total - now)
            x = [part + (1 - part) * up for part in x]
        return tuple(min(1.0, max(0.0, part)) for part in x)


def minimise(cost: Callable[[Fractions], float], bounds: Bounds, starts: Sequence[Fractions]) -> Fractions:
    """Return the best fractions found from several starts.

    Args:
        cost: of fractions within `bounds`.
        bounds: what fits.
        starts: at least one; repaired where they do not fit. The result costs no more than any of them.
    """
    found = [_descend(cost, bounds, bounds.repaired(start)) for start in starts]
    return min(found, key=lambda each: each[0])[1]


def _descend(cost: Callable[[Fractions], float], bounds: Bounds, x: Fractions) -> tuple[float, Fractions]:
    best = cost(x)
    for step in _STEPS:
        for _ in range(_MAX_MOVES):
            value, candidate = min(((cost(y), y) for y in _moves(x, step, bounds)), default=(best, x))
            if value >= best - _GAIN * abs(best):
                break
            best, x = value, candidate
    return best, x


def _moves(x: Fractions, step: float, bounds: Bounds) -> Iterator[Fractions]:
    """Yield what one step leads to: one class in or out, all together, or one in and another one out."""
    sizes, now = bounds.nbytes, bounds.local(x)
    room_in, room_out = max(0.0, bounds.most_local - now), max(0.0, now - bounds.least_local)
    small = _SMALL * sum(sizes)
    for i, size in enumerate(sizes):
        if size <= small:
            continue
        into, out = min(step, 1 - x[i]), min(step, x[i])
        yield from _changed(x, {i: min(into, room_in / size)})
        yield from _changed(x, {i: -min(out, room_out / size)})
        for j, other in enumerate(sizes):
            if j != i and other > small:
                moved = min(into * size, x[j] * other)
                yield from _changed(x, {i: moved / size, j: -moved / other})
    for sign in (step, -step):
        y = tuple(min(1.0, max(0.0, part + sign)) for part in x)
        if bounds.least_local <= bounds.local(y) <= bounds.most_local:
            yield y


def _changed(x: Fractions, by: dict[int, float]) -> Iterator[Fractions]:
    if all(by.values()):
        yield tuple(min(1.0, max(0.0, part + by.get(i, 0.0))) for i, part in enumerate(x))
