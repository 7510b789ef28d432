"""Several processes under Fabric: as one process, with checkpoints that any number of processes goes on from."""

import pytest
import torch

from tests.distributed import fabric_runs
from tests.distributed.ranks import of_rank_0
from tests.distributed.test_lightning import assert_close, assert_identical


def run(ranks, world, *args, **keywords):
    """Return what rank 0 has of a run of `world` ranks."""
    return of_rank_0(ranks, world, fabric_runs.train, *args, **keywords)


@pytest.mark.parametrize("skip_sync", [True, False])
def test_several_processes_train_as_one(ranks, skip_sync):
    given = {"micro_batches": 2, "clip": 0.5, "skip_sync": skip_sync}
    two, one = run(ranks, 2, 4, **given), run(ranks, 1, 4, **given)
    assert_close(two, one)
    assert two["norms"] == pytest.approx(one["norms"], rel=1e-5)


def test_skipped_reductions_are_not_made(ranks):
    def reduced(**keywords):
        return run(ranks, 2, 2, micro_batches=3, **keywords)["reduced"]

    assert reduced() == 3 * reduced(skip_sync=True) > 0


STATES = {
    "float32": {},
    "bf16 with split masters": {"dtype": torch.bfloat16},
    "bf16 with float32 masters": {"dtype": torch.bfloat16, "options": {"master": "fp32"}},
}


GO_ON = [
    (2, 2, "bf16 with float32 masters"),
    (2, 1, "float32"),
    (1, 2, "bf16 with split masters"),
]


@pytest.mark.parametrize("before, after, state", GO_ON)
def test_another_number_of_processes_goes_on(ranks, tmp_path, before, after, state):
    path = str(tmp_path / "half.ckpt")
    run(ranks, before, 3, save=path, **STATES[state])
    rest = run(ranks, after, 6, resume=path, **STATES[state])
    whole = run(ranks, before, 6, **STATES[state])
    limit = 2**-7 if "bf16" in state else 1e-6  # one rounding: they differ with the order of sums
    expected = {**whole, "losses": whole["losses"][3:]}
    if before == after:
        assert_identical(rest, expected)
    else:
        assert_close(rest, expected, limit)


def test_the_model_is_set_up_before_its_optimizer_is_made(ranks):
    for error in ranks.of(2).run(fabric_runs.set_up_together):
        assert error.startswith("UnsupportedError") and "fabric.setup_module(model)" in error


def test_processes_agree(ranks):
    assert ranks.of(2).run(fabric_runs.agree) == [
        (rank, 2, "from 1", 1.0, [0.0, 1.0]) for rank in range(2)
    ]  # fmt: skip
