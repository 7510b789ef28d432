"""Hooks on states of Accelerate get the same on several processes; machines are counted without a launcher's word."""

import pytest

from tests.distributed import accelerate_hooks
from tests.distributed.ranks import of_rank_0


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
