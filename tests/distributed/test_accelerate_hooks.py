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
