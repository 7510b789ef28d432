"""One job through all front ends, as `examples/bench/front_ends.py` compares them."""

import pytest
import torch

from tests.integration.front_ends import bench, job_here


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", bench.FRONT_ENDS)
@pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning")  # resumes from there
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # as TRL spells it
def test_every_front_end_trains_the_job_as_without_us(tmp_path, name, streams):
    if name not in bench.there_are():
        pytest.skip("needs TRL")
    job = job_here(tmp_path, layers=3, hidden=32, sequence=32, options={"stream_weights": streams})
    found = bench.compare(name, job)
    assert found.loss <= bench.GOAL_LOSS
    assert found.resumes_exactly
    assert found.worst_role <= bench.GOAL_PLANNED
    assert (found.staging is None) == (name == "Fabric")
    assert found.staging is None or found.staging <= 4 / 3, "of three groups, and one that is just let go of"
    assert found.activations <= 1 / (job.layers + 1), "at most one input more than planned"


def test_all_front_ends_train_the_same_job(tmp_path):
    """Else the comparison would be of five jobs."""
    names = [name for name in bench.there_are() if name in ("Lightning", "Fabric", "Accelerate", "HF Trainer")]
    job = job_here(tmp_path, layers=2, hidden=32, sequence=32)
    losses = [bench.FRONT_ENDS[name](bench.replaced(job, tmp_path / name), ours=True).losses for name in names]
    for other in losses[1:]:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(losses[0]), rtol=1e-6, atol=0)
