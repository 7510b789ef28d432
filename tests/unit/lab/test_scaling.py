"""Predicted scaling: the table and its script, and the overlap of several ranks in simulated time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from footprint import PUBLISHED
from scaling import main, scaling, table
from schedule.sharded import simulate
from sharded import predicted_s, units_of

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
    several = [(count, count // 8, how) for count in (16, 32) for how in ("replicate", "shard")]
    found = [(row.num_gpus, row.num_machines, row.between_nodes) for row in rows]
    assert found == [(1, 1, ""), (4, 1, ""), (8, 1, ""), *several]
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


@pytest.mark.parametrize(("count", "tokens"), [(2, 1024), (2, 4096), (4, 2048), (8, 2048)])
def test_prefetch_brings_a_step_close_to_the_ideal_and_without_it_it_is_not(count, tokens):
    units = units_of(PUBLISHED["llama-3.1-8b"], tokens, EIGHT, count)
    steps = [simulate(replace(units, prefetch=ahead), num_steps=2) for ahead in (0, 1)]
    alone, ahead = (step.seconds / step.ideal_s for step in steps)
    assert 1 <= ahead <= 1.10
    assert alone > 1.10 and alone > 1.1 * ahead
    assert predicted_s(units, EIGHT) == pytest.approx(steps[1].seconds, rel=0.02)
