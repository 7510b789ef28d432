"""Predicted scaling: the table and its script, and the overlap of several ranks in simulated time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from footprint import PUBLISHED
from scaling import main
from schedule.sharded import simulate
from sharded import predicted_s, units_of

from lightning_cxl.machine.speeds import load_machine
from tests.integration.llama import tiny_llama

EIGHT = load_machine(Path(__file__).resolve().parents[3] / "examples" / "machines" / "eight_gpus.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(4, vocab_size=512, hidden_size=256, intermediate_size=768).config.save_pretrained(folder)
    return str(folder)


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
