import json

from results import Results, machine
from timing import Timings


def timings(others_fraction: float = 0.0) -> Timings:
    return Timings(
        seconds={"roof": [0.5, 0.5, 0.5], "ours": [0.5, 0.6, 0.7], "slow": [5.0, None, None]},
        skipped={"peer": "ModuleNotFoundError: No module named 'peer'"},
        traffic_bytes={"roof": 10**9, "ours": 10**9, "slow": 0},
        others_fraction=others_fraction,
    )


def test_a_table_shows_and_keeps_nanoseconds_per_parameter(capsys):
    results = Results({})
    results.table("step, 1G", timings(), 10**9, "roof")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "step, 1G",
        "        ns/parameter  spread  x roof  GB/s",
        "  roof         0.500      0%    1.00   2.0",
        "  ours         0.600     33%    1.20   1.7",
        "  slow         5.000      0%   10.00",
        "  peer: skipped, ModuleNotFoundError: No module named 'peer'",
    ]
    assert [(row.name, row.value, row.unit) for row in results.rows] == [
        ("step, 1G: roof", 0.5, "ns/parameter"),
        ("step, 1G: ours", 0.6, "ns/parameter"),
        ("step, 1G: slow", 5.0, "ns/parameter"),
        ("step, 1G: CPU time of other processes", 0.0, "of all"),
    ]
    assert {(row.goal, row.holds) for row in results.rows} == {(None, None)}


def test_a_busy_machine_is_told(capsys):
    Results({}).table("step, 1G", timings(0.25), 10**9, "roof")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "  doubtful: other processes took 25% of the CPU time meanwhile"


def test_goals_hold_or_not(capsys):
    results = Results({})
    results.at_most("a", 1.03, "x roof", 1.03)
    results.at_most("b", 1.04, "x roof", 1.03)
    results.at_least("c", 2.4, "x faster", 2.4)
    results.at_least("d", 2.3, "x faster", 2.4)
    results.add("e", 1.0, "s")
    assert [row.holds for row in results.rows] == [True, False, True, False, None]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "  a: 1.030 x roof, goal at most 1.03: holds"
    assert shown[3] == "  d: 2.300 x faster, goal at least 2.4: MISSED"
    assert results.summary().splitlines() == [
        "2 of 4 goals hold",
        "  missed: b: 1.040 x roof, goal 1.03",
        "  missed: d: 2.300 x faster, goal 2.4",
    ]


def test_json_has_the_machine_and_rows_of_five_fields(tmp_path):
    results = Results(machine(2))
    results.at_most("a", 1.0, "x roof", 1.03)
    results.write(tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["rows"] == [{"name": "a", "value": 1.0, "unit": "x roof", "goal": 1.03, "holds": True}]
    assert written["machine"]["threads"] == 2
    assert written["machine"]["memory_bytes"] > 0
    assert written["machine"]["cpu"] and written["machine"]["torch"]
