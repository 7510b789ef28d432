"""Several processes under Accelerate: as one process, with states that any number of processes goes on from."""

import pytest

from tests.distributed import accelerate_runs
from tests.distributed.ranks import of_rank_0
from tests.distributed.test_lightning import assert_close, assert_identical


def run(ranks, world, *args, **keywords):
    """Return what rank 0 has of a run of `world` ranks."""
    return of_rank_0(ranks, world, accelerate_runs.train, *args, **keywords)


CASES = {
    "plain": {},
    "accumulated and clipped": {"micro_batches": 2, "clip": 0.5},
    "another optimizer": {"optimizer": "SGD", "clip": 0.5},
}


@pytest.mark.parametrize("name", CASES)
def test_several_processes_train_as_one(ranks, name):
    two, one = run(ranks, 2, 4, **CASES[name]), run(ranks, 1, 4, **CASES[name])
    assert_close(two, one)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)


@pytest.mark.parametrize("nests", [False, True])
def test_every_micro_batch_reduces_unless_it_is_told_not_to(ranks, nests):
    once, each = (run(ranks, 2, 2, micro_batches=3, skip_sync=skips, nests=nests) for skips in (True, False))
    assert_close(once, each)
    assert each["reduced"] == 3 * once["reduced"] > 0


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("before, after", [(2, 2), (2, 1), (1, 2)])
def test_another_number_of_processes_goes_on(ranks, tmp_path, before, after, optimizer):
    path = str(tmp_path / "step_3")
    whole = run(ranks, before, 6, optimizer=optimizer)
    run(ranks, before, 3, save=path, optimizer=optimizer)
    rest = run(ranks, after, 6, resume=path, optimizer=optimizer)
    compare = assert_identical if before == after else assert_close
    compare(rest, {**whole, "losses": whole["losses"][3:]})


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2)])
def test_a_state_is_what_was_saved_last_whatever_lay_in_its_folder(ranks, tmp_path, before, after):
    path = str(tmp_path / "step_3")
    run(ranks, before, 1, save=path)
    saved = run(ranks, after, 3, save=path)
    for world in (1, 2):
        assert_identical(run(ranks, world, 3, resume=path), {**saved, "losses": []})
