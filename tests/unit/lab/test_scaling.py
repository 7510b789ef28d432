"""Predicted scaling: the table and its script, and the overlap of several ranks in simulated time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from footprint import PUBLISHED
from scaling import main, scaling, table
from schedule.sharded import ShardedUnits, simulate
from sharded import predicted_s, units_of
from simulation.links import HostTraffic, Link, Links

from lightning_cxl.commands.plan import PlannedModel, Settings
from lightning_cxl.machine.speeds import load_machine
from tests.integration.llama import tiny_llama

EIGHT = load_machine(Path(__file__).resolve().parents[3] / "examples" / "machines" / "eight_gpus.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4, vocab_size=512, hidden_size=256, intermediate_size=768).config.save_pretrained(folder)
    return str(folder)


def test_every_number_of_gpus_has_a_row_and_several_machines_have_two(folder):
    rows = scaling(PlannedModel(folder), Settings(sequence=256), EIGHT, (1, 4, 8, 12, 16, 32))
    assert [(row.num_gpus, row.num_machines, row.between_nodes) for row in rows] == [
        (1, 1, ""),
        (4, 1, ""),
        (8, 1, ""),
        (16, 2, "replicate"),
        (16, 2, "shard"),
        (32, 4, "replicate"),
        (32, 4, "shard"),
    ]
    assert rows[0].efficiency == 1 and rows[0].received_bytes == 0
    for row in rows:
        assert row.tokens_per_s == pytest.approx(256 * row.num_gpus / row.seconds)
        assert row.efficiency == pytest.approx(row.tokens_per_s / row.num_gpus / rows[0].tokens_per_s)
    assert rows[3].host_bytes == rows[2].host_bytes == rows[5].host_bytes > rows[4].host_bytes > rows[6].host_bytes
    cells = table(rows)
    assert len({len(row) for row in cells}) == 1 and cells[1][:3] == ("1", "1", "-")


def test_the_script_says_that_it_predicts(folder, tmp_path, capsys):
    target = tmp_path / "rows.json"
    main(["--model", folder, "--seq", "256", "--quick", "--json", str(target)])
    shown, written = capsys.readouterr().out, json.loads(target.read_text())
    assert "predicted, not measured" in shown and written["note"] == "predicted, not measured"
    assert [row["num_gpus"] for row in written["rows"]] == [1, 16, 16]


HOST = load_machine(Path(__file__).resolve().parents[3] / "examples" / "machines" / "eight_gpus.yaml")
SHAPE = PUBLISHED["llama-3.1-8b"]
LINKS = Links(device=Link(8, 8, duplex=2), tiers={"host": Link(64, 64, duplex=2)})
TWO = ShardedUnits(
    num_ranks=2,
    num_units=4,
    forward_s=1.0,
    backward_s=2.0,
    weight_bytes=16,
    activation_bytes=0.5,
    adam=HostTraffic(8, 8),
    links=LINKS,
    peer_bytes_per_s=16,
    overlap="backward",
)


def test_a_step_by_hand():
    step = simulate(TWO)
    # a unit: its shard of 8 bytes is read in 1 s, gathered in 1/2 s and computed in 1 s; backward computes 2 s
    assert step.busy_s["forward"]["device 0, h2d"] == step.busy_s["forward"]["device 1, h2d"] == pytest.approx(4)
    assert step.busy_s["forward"]["peer 0"] == pytest.approx(4 * 8 / 16)
    assert step.busy_s["backward"]["peer 0"] == pytest.approx(2 * 4 * 8 / 16)
    assert step.busy_s["backward"]["device 0, d2h"] == pytest.approx(4 * 1)
    # both ranks read shards and inputs, and write gradients; updates read and write beside them
    assert step.busy_s["backward"]["tier host, h2d"] == pytest.approx((4 * 16 + 4 * 1 + 4 * 8) / 64)
    assert step.longest_s == pytest.approx(4 * 1 + 4 * 2)
    assert step.ideal_s == pytest.approx(step.busy_s["forward"]["device 0, h2d"] + 8)
    assert step.bound_by("backward").startswith("compute")
    # the first unit is updated last: it is reduced, leaves, is updated (two ranks write 8 bytes each way), comes back
    assert step.seconds == pytest.approx(step.ideal_s + 0.5 + 1.0 + 0.125 + 1.0 + 0.5, abs=0.2)


@pytest.mark.parametrize(("count", "tokens"), [(2, 1024), (2, 4096), (4, 2048), (8, 2048)])
def test_prefetch_brings_a_step_close_to_the_ideal_and_without_it_it_is_not(count, tokens):
    units = units_of(SHAPE, tokens, HOST, count)
    steps = [simulate(replace(units, prefetch=ahead), num_steps=2) for ahead in (0, 1)]
    alone, ahead = (step.seconds / step.ideal_s for step in steps)
    assert 1 <= ahead <= 1.10
    assert alone > 1.10 and alone > 1.1 * ahead
    assert predicted_s(units, HOST) == pytest.approx(steps[1].seconds, rel=0.02)
