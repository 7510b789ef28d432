"""Predicted scaling: the table and its script, and the overlap of several ranks in simulated time."""

from dataclasses import replace
from pathlib import Path

import pytest
from footprint import PUBLISHED
from schedule.sharded import simulate
from sharded import predicted_s, units_of

from lightning_cxl.machine.speeds import load_machine

EIGHT = load_machine(Path(__file__).resolve().parents[3] / "examples" / "machines" / "eight_gpus.yaml")


@pytest.mark.parametrize(("count", "tokens"), [(2, 1024), (2, 4096), (4, 2048), (8, 2048)])
def test_prefetch_brings_a_step_close_to_the_ideal_and_without_it_it_is_not(count, tokens):
    units = units_of(PUBLISHED["llama-3.1-8b"], tokens, EIGHT, count)
    steps = [simulate(replace(units, prefetch=ahead), num_steps=2) for ahead in (0, 1)]
    alone, ahead = (step.seconds / step.ideal_s for step in steps)
    assert 1 <= ahead <= 1.10
    assert alone > 1.10 and alone > 1.1 * ahead
    assert predicted_s(units, EIGHT) == pytest.approx(steps[1].seconds, rel=0.02)
