"""The paper's greedy, row by row, and its rules on other machines."""

from dataclasses import replace

import pytest

from lightning_cxl.planning.policies import LatencyFirst
from tests.unit.planning.policies.jobs import GIB, NEMO_12B, QWEN_7B, R, job_of, machine

# local GiB per class by replaying the authors' rule (utils/numa_allocation_patch.py of CXL-Aware-LLM-Finetuning) on
# their two shapes, one sequence of 32,768: momentum, variance, master grads, master weights, compute weights,
# activations, compute grads
ROLES = (R.MOMENTUM, R.VARIANCE, R.MASTER_GRADS, R.MASTER_WEIGHTS, R.COMPUTE_WEIGHTS, R.ACTIVATIONS, R.COMPUTE_GRADS)
TABLE = [
    (QWEN_7B, 100, 1, (28.4, 28.4, 28.4, 14.2, 0.7, 0.0, 0.0)),
    (QWEN_7B, 128, 1, (28.4, 28.4, 28.4, 28.4, 14.2, 0.3, 0.0)),
    (NEMO_12B, 100, 1, (45.6, 45.6, 8.7, 0.0, 0.0, 0.0, 0.0)),
    (NEMO_12B, 128, 1, (45.6, 45.6, 22.8, 13.9, 0.0, 0.0, 0.0)),
    (NEMO_12B, 128, 2, (45.6, 45.6, 15.2, 15.2, 6.3, 0.0, 0.0)),
]


@pytest.mark.parametrize(("job", "dram", "cards", "local"), TABLE)
def test_table_of_the_published_shapes(job, dram, cards, local):
    splits = LatencyFirst().decide(job, machine(dram=dram, cards=(256,) * cards)).splits
    sizes = job.bytes_of()
    assert [round(splits[role].get("dram0", 0) * sizes[role] / GIB, 1) for role in ROLES] == list(local)
    for role in ROLES:  # the rest is striped over the cards equally
        parts = {splits[role].get(f"cxl{i}", 0.0) for i in range(cards)}
        assert max(parts) - min(parts) < 1e-9
        assert sum(splits[role].values()) == pytest.approx(1)


def test_a_mixed_class_takes_at_most_its_equal_share_of_dram():
    job = job_of({R.MOMENTUM: 100})
    split = LatencyFirst().decide(job, machine(dram=90, cards=(200, 200), unit=1)).splits[R.MOMENTUM]
    assert split == pytest.approx({"dram0": 0.33, "cxl0": 0.335, "cxl1": 0.335})


def test_a_full_card_leaves_its_part_to_the_other():
    split = (
        LatencyFirst().decide(job_of({R.MOMENTUM: 100}), machine(dram=0, cards=(10, 200), unit=1)).splits[R.MOMENTUM]
    )
    assert split == pytest.approx({"cxl0": 0.1, "cxl1": 0.9})


def test_nodes_of_a_tier_count_each():
    host = machine(dram=40, cards=(100,), unit=1)
    host = replace(host, tiers=(host.tiers[0], replace(host.tiers[1], num_nodes=2)))
    split = LatencyFirst().decide(job_of({R.MOMENTUM: 90}), host).splits
    assert split[R.MOMENTUM] == pytest.approx({"dram0": 1 / 3, "cxl0": 2 / 3})
