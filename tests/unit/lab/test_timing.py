import pytest
import timing
from timing import Contender, measure


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a contender says so."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    return now


def contender(name, clock, *seconds, optional=False):
    """Takes so many seconds in its runs, the last number in all that follow."""
    left = list(seconds)

    def run():
        clock[0] += left.pop(0) if len(left) > 1 else left[0]

    return Contender(name, lambda: run, optional)


def test_medians_spreads_and_ratios(clock):
    # the first two runs of each are not counted
    timings = measure([contender("a", clock, 9, 9, 1, 2, 3), contender("b", clock, 9, 9, 4, 4, 6)], 3)
    assert timings.seconds == {"a": [1, 2, 3], "b": [4, 4, 6]}
    assert timings.first_seconds == {"a": 9, "b": 9}
    assert (timings.median("a"), timings.spread("a")) == (2, 1.0)
    assert timings.ratio("b", "a") == 2  # of 4, 2 and 2
    assert timings.fastest(["b", "a"]) == "a"
    assert timings.fastest(["b", "none"]) == "b"
    assert timings.fastest(["none"]) is None
    assert "a" in timings and "none" not in timings
