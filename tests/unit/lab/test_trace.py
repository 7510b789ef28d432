import json
import time

import pytest
from simulation.trace import Trace


def test_a_span_notes_the_time_of_its_body_also_when_it_raises():
    trace = Trace()
    before_s = time.perf_counter()
    with pytest.raises(KeyError), trace.span("compute", "unit 0"):
        raise KeyError
    (interval,) = trace.lane("compute")
    assert before_s <= interval.start_s <= interval.end_s <= time.perf_counter()
    assert (interval.name, interval.nbytes) == ("unit 0", 0)
    assert trace.lane("h2d") == []


def test_the_file_has_named_lanes_and_microseconds_from_the_first_start(tmp_path):
    trace = Trace()
    trace.add("h2d", "dram", 100.5, 101.0, 4096)
    trace.add("compute", "unit 0", 100.0, 102.0)
    trace.add("h2d", "cxl", 101.0, 101.5, 8192)
    trace.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "compute", 2: "h2d"}
    assert all(event["pid"] == 1 and event["ph"] in "MX" for event in events)
    work = [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert work == [
        ("compute", "unit 0", 0.0, 2e6, {}),
        ("h2d", "dram", 5e5, 5e5, {"nbytes": 4096}),
        ("h2d", "cxl", 1e6, 5e5, {"nbytes": 8192}),
    ]
