"""Several processes under Accelerate: as one process, with states that any number of processes goes on from."""

import pytest

from tests.distributed import accelerate_hooks, accelerate_runs
from tests.distributed.ranks import of_rank_0
from tests.distributed.test_lightning import assert_close, assert_identical


def run(ranks, world, *args, **keywords):
    """Return what rank 0 has of a run of `world` ranks."""
    return of_rank_0(ranks, world, accelerate_runs.train, *args, **keywords)


def test_several_processes_train_as_one(ranks):
    given = {"micro_batches": 2, "clip": 0.5}
    two, one = run(ranks, 2, 4, **given), run(ranks, 1, 4, **given)
    assert_close(two, one)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)


def test_every_micro_batch_reduces_unless_it_is_told_not_to(ranks):
    once, each = (run(ranks, 2, 2, micro_batches=3, skip_sync=skips) for skips in (True, False))
    assert_close(once, each)
    assert each["reduced"] == 3 * once["reduced"] > 0


@pytest.mark.parametrize("before, after, optimizer", [(2, 2, "AdamW"), (2, 1, "SGD"), (1, 2, "AdamW")])
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


@pytest.mark.parametrize("own", [False, True])
def test_hooks_get_all_models(ranks, tmp_path, own):
    found = of_rank_0(ranks, 2, accelerate_hooks.save_and_load, str(tmp_path), own=own)
    assert found["all given"]
    assert found["weights given"] == [{}, {}]
    assert found["back"] == [not own, True], "whose weights a hook has taken it loads itself"
    assert found["files"] == ["sharded_model_0", "sharded_model_1"]


def test_processes_of_one_machine_share_its_budget(ranks):
    found = of_rank_0(ranks, 2, accelerate_hooks.budget_of_each)
    assert found["bytes"] == 1 << 29


def test_what_one_process_has_saved_of_a_compiled_model_is_loaded(ranks, tmp_path):
    assert ranks.of(2).run(accelerate_hooks.load_what_was_compiled, str(tmp_path)) == [True, True]


def test_ranks_generate_as_many_tokens_as_each_wants(ranks):
    assert ranks.of(2).run(accelerate_hooks.generate) == [(6, True), (11, True)]


def test_own_tests_of_syncs(ranks):
    """Their model has parameters without dimensions alone."""
    ranks.of(2).run(accelerate_runs.own_tests_of_syncs)
