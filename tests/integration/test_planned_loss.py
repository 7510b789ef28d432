"""What a dry run says of the loss in chunks, against what the device then held."""

import pytest
import torch

import lightning_cxl
from lightning_cxl.commands.plan import loss_on_meta
from lightning_cxl.inventory.dry_run import dry_run
from tests import training_device
from tests.integration.llama import tiny_llama

SHAPE = {"vocab_size": 32_768, "hidden_size": 32, "intermediate_size": 32, "num_layers": 1}
ROWS, TOKENS = 64, 8  # blocks are small: the device apart has no flash kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunked", [True, False])
def test_planned_device_memory_is_what_the_device_holds(chunked, dtype):
    if training_device.current.type == "cpu":
        pytest.skip("needs a device apart")
    with torch.device("meta"):
        planned_model = tiny_llama(**SHAPE).to(dtype)
    planned = dry_run(planned_model, [], loss_on_meta(planned_model, ROWS, TOKENS, chunked=chunked), min_bytes=1)
    model = tiny_llama(**SHAPE).to(dtype).to(training_device.current)
    for parameter in model.parameters():  # as the engine does, and the dry run
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    ids = torch.randint(0, 32_768, (ROWS, TOKENS)).to(training_device.current)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    with lightning_cxl.chunked_loss(model if chunked else torch.nn.Identity()):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.accelerator.synchronize()
    held = torch.accelerator.max_memory_allocated() - before
    assert planned.device_peak_bytes == pytest.approx(held, rel=0.03)
