"""The Trainer of transformers trains as without us: the same losses, norms, rates and weights."""

import pytest
import torch

from tests import training_device
from tests.cases import every_value
from tests.integration.hf_trainer import EXACT, PLAIN, assert_close, assert_identical, finish, make_trainer, train
from tests.integration.llama import tiny_llama

STREAMED = {"stream_weights": True}
CASES = {
    "accumulation with a rest": {"gradient_accumulation_steps": 3},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "neftune": {"neftune_noise_alpha": 5.0},
    "own checkpointing": {"activation_checkpointing": True},
    "adafactor": {"optim": "adafactor"},
    "grouped by length": {"train_sampling_strategy": "group_by_length"},
    "fused": {"optim": "adamw_torch_fused"},
}


@pytest.mark.parametrize(("case", "streams"), every_value(CASES, [True, False]))
@pytest.mark.usefixtures("late_copies")
def test_is_the_plain_trainer(tmp_path, case, streams):
    assert_identical(
        train(tmp_path, **CASES[case]), train(tmp_path, {"stream_weights": streams, **EXACT}, **CASES[case])
    )


@pytest.mark.on_cpu  # where bitsandbytes has kernels for plain transformers, too
def test_an_optimizer_of_bitsandbytes_steps_on_the_host(tmp_path):
    def run(offload=PLAIN):
        large = tiny_llama(hidden_size=64, intermediate_size=128)  # bitsandbytes keeps small state in float32
        return train(tmp_path, offload, model=large, optim="adamw_bnb_8bit")

    assert_identical(run(), run({"stream_weights": True}))


@pytest.mark.on_cpu
def test_embeddings_have_32_bit_state_also_where_an_optimizer_of_bitsandbytes_has_masters(tmp_path):
    model = tiny_llama(vocab_size=128, hidden_size=64, intermediate_size=128).bfloat16()
    trainer = make_trainer(tmp_path, {}, model=model, optim="adamw_bnb_8bit")
    trainer.train()
    kinds = {}
    for name, parameter in model.named_parameters():
        pair = trainer.accelerator.offload.session.run.masters.find(parameter)
        assert pair.master is not parameter
        kinds[name] = trainer.optimizer.optimizer.state[pair.master]["state1"].dtype
    trainer.end()
    assert kinds["model.embed_tokens.weight"] == torch.float32
    assert kinds["model.layers.0.mlp.up_proj.weight"] == torch.uint8


@pytest.mark.usefixtures("late_copies")
@pytest.mark.filterwarnings("ignore:the gradient of:lightning_cxl.errors.LightningCXLWarning")  # its first scale
@pytest.mark.parametrize(("options", "given"), [(EXACT, {}), (STREAMED, {"gradient_accumulation_steps": 2})], ids=str)
def test_a_loss_scaler(tmp_path, options, given):
    """Neither transformers nor Accelerate makes one without a GPU, so both get it here.

    CPUAdam leaves a step out as torch's AdamW does that is not fused: the scheduler waits. A fused one counts it.
    """
    optim = "adamw_torch_fused" if options == EXACT else "adamw_torch"
    found = []
    for offload in (PLAIN, options):
        trainer = make_trainer(tmp_path, offload, optim=optim, **given)
        accelerator = trainer.accelerator
        accelerator.scaler = torch.amp.GradScaler(training_device.current.type, init_scale=2.0**16, growth_interval=3)
        accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True
        if offload != PLAIN:
            accelerator.offload.attach_scaler(accelerator.scaler)
        trainer.train()
        found.append((*finish(trainer), accelerator.scaler.get_scale()))
    assert found[0][2] == found[1][2] != 2.0**16
    if options == EXACT:
        assert_identical(found[0][:2], found[1][:2])
    else:
        assert_close(found[0][:2], found[1][:2], atol=1e-4)  # last bits of weights decide how some are rounded to fp16
