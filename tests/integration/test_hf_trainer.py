"""The Trainer of transformers trains as without us: the same losses, norms, rates and weights."""

import pytest

from tests import training_device
from tests.integration.hf_trainer import EXACT, assert_close, assert_identical, train

CASES = {
    "plain": {},
    "accumulation with a rest": {"gradient_accumulation_steps": 3},
    "not clipped": {"max_grad_norm": 0.0},
    "bf16": {"bf16": True},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "neftune": {"neftune_noise_alpha": 5.0},
    "own checkpointing": {"activation_checkpointing": True},
    "adafactor": {"optim": "adafactor"},
    "fused": {"optim": "adamw_torch_fused"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.usefixtures("late_copies")
def test_is_the_plain_trainer(tmp_path, case, streams):
    plain = train(tmp_path, **case)
    assert_identical(plain, train(tmp_path, {"stream_weights": streams, **EXACT}, **case))
    assert_close(plain, train(tmp_path, {"stream_weights": streams}, **case))


@pytest.mark.on_cpu
@pytest.mark.parametrize("case", ["accumulation with a rest", "bf16"])
def test_is_the_plain_trainer_on_the_cpu(tmp_path, case):
    plain = train(tmp_path, **CASES[case])
    assert training_device.current.type == "cpu"
    assert_identical(plain, train(tmp_path, {"stream_weights": True, **EXACT}, **CASES[case]))
    assert_close(plain, train(tmp_path, {}, **CASES[case]))
