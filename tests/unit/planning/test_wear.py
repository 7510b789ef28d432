"""What a run writes to its drives, and for how long consumer drives are rated for that."""

import pytest

from lightning_cxl.planning.wear import RATED_DRIVE_WRITES, Wear, wear_advice

TB = 10**12


def test_drive_writes_per_day_and_days_to_the_rating_by_hand():
    # 10 GB every 100 s are 8.64 TB a day: 8.64 writes of 1 TB, of which 600 are rated
    wear = Wear(10e9, TB, 100.0)
    assert wear.drive_writes_per_day == pytest.approx(8.64)
    assert wear.rated_steps == 60_000
    assert wear.rated_days == pytest.approx(600 / 8.64)
    assert wear.wears_out
    text = wear.describe()
    assert "10 GB written per step, 8.64 drive writes per day" in text
    assert "rated for 600 TB per TB of its size, is worn out after 69.4 days" in text
    assert all(word in wear_advice(wear) for word in ("within a year", 'state="bf16"', '"8bit"', "larger drive"))


@pytest.mark.parametrize(("step_seconds", "wears_out"), [(525, True), (526, False)])
def test_a_year_is_the_limit(step_seconds, wears_out):
    wear = Wear(10e9, TB, step_seconds)  # 60,000 steps are rated, and a year has 31,536,000 s
    assert wear.wears_out is wears_out
    assert wear.rated_steps * step_seconds == pytest.approx(wear.rated_days * 86400)


def test_a_larger_drive_lasts_longer_and_less_state_too():
    assert Wear(10e9, 2 * TB, 100.0).rated_days == pytest.approx(2 * Wear(10e9, TB, 100.0).rated_days)
    assert Wear(5e9, TB, 100.0).rated_days == pytest.approx(2 * Wear(10e9, TB, 100.0).rated_days)
    assert "years of such steps" in Wear(1e9, 10 * TB, 100.0).describe()


def test_without_seconds_it_is_steps():
    wear = Wear(10e9, TB)
    assert (wear.drive_writes_per_day, wear.rated_days, wear.wears_out) == (None, None, False)
    assert wear.describe() == (
        "10 GB written per step, 10 TB per 1,000 steps: a consumer drive, rated for 600 TB per TB of its size, is worn "
        "out after 60,000 steps"
    )
    assert wear.as_data() == {
        "written_bytes_per_step": 10e9,
        "drive_bytes": TB,
        "drive_writes_per_day": None,
        "rated_steps": RATED_DRIVE_WRITES * 100,
        "rated_days": None,
        "wears_out_within_a_year": False,
    }
