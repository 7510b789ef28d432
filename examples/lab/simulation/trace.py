"""Who was busy when: intervals on named lanes, and a file that Chrome's and Perfetto's trace viewers open."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

_PROCESS_ID = 1


class Interval(NamedTuple):
    """One piece of work."""

    lane: str
    name: str
    start_s: float
    """As `time.perf_counter` counts."""
    end_s: float
    nbytes: int
    """Bytes that were moved; 0 for work that is not a copy."""


class Trace:
    """Intervals in the order in which they ended.

    Threading: any thread may add; read it when nobody does.
    """

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def add(self, lane: str, name: str, start_s: float, end_s: float, nbytes: int = 0) -> None:
        """Note a piece of work that has ended."""
        self.intervals.append(Interval(lane, name, start_s, end_s, nbytes))

    def lane(self, name: str) -> list[Interval]:
        """Return the intervals of one lane."""
        return [interval for interval in self.intervals if interval.lane == name]

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the trace event format (JSON); lanes are named threads in the order in which they began to work."""
        ordered = sorted(self.intervals, key=lambda interval: interval.start_s)
        ids = {lane: index for index, lane in enumerate(dict.fromkeys(interval.lane for interval in ordered), start=1)}
        events: list[dict[str, Any]] = []
        for lane, thread_id in ids.items():
            events.append(_metadata("thread_name", thread_id, {"name": lane}))
            events.append(_metadata("thread_sort_index", thread_id, {"sort_index": thread_id}))
        for interval in ordered:
            events.append(
                {
                    "ph": "X",
                    "name": interval.name,
                    "pid": _PROCESS_ID,
                    "tid": ids[interval.lane],
                    "ts": (interval.start_s - ordered[0].start_s) * 1e6,
                    "dur": (interval.end_s - interval.start_s) * 1e6,
                    "args": {"nbytes": interval.nbytes} if interval.nbytes else {},
                }
            )
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _metadata(name: str, thread_id: int, args: dict[str, str | int]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS_ID, "tid": thread_id, "args": args}
