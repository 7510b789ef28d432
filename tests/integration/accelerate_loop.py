"""What the tests of Accelerate share: accelerators on the device under test, and one loop as Accelerate's guide has it.

Accelerate does not know the device apart by itself: the variable ``ACCELERATE_TORCH_DEVICE`` names it. It has no loss
scaler there, nor on the CPU, so `make_accelerator` puts one in.
"""

import os

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from torch import nn

from lightning_cxl.accelerate import CXLAccelerator
from tests import training_device
from tests.integration.training import EXACT, assert_identical
from tests.models import TinyTransformer, token_data
from tests.processes import forget_libraries

__all__ = ["EXACT", "assert_identical"]
PLAIN = "plain"


def forget_accelerators():
    """Let the next accelerator begin anew: Accelerate keeps device and precision for all of a process."""
    forget_libraries()
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(training_device.current)


def make_accelerator(offload=PLAIN, **arguments):
    forget_accelerators()
    fp16 = arguments.get("mixed_precision") == "fp16" and training_device.current.type != "cuda"
    if fp16:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if offload == PLAIN or fp16:
        accelerator = Accelerator(**arguments)
    else:
        accelerator = CXLAccelerator(offload=offload, **arguments)
    if fp16:
        accelerator.state.device = PartialState().device = training_device.current
        accelerator.scaler = torch.amp.GradScaler(training_device.current.type, init_scale=2.0**10)
        accelerator.native_amp = True
        if offload != PLAIN:
            CXLAccelerator.attach(accelerator, offload)
    return accelerator


def loss_of(model, batch):
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1)


def warm(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=6)


def made(make_model=TinyTransformer):
    torch.manual_seed(5)
    model = make_model()
    return model, adamw(model)


def prepared(accelerator, make_model=TinyTransformer, data=token_data):
    model, optimizer = made(make_model)
    return accelerator.prepare(model, optimizer, data(), warm(optimizer))


def steps(accelerator, model, optimizer, data, scheduler=None, *, loss_of=loss_of):
    for batch in data:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        yield loss.item()


def trained(accelerator, model, *parts):
    """Train an epoch with the same dropout; returns (losses, weights)."""
    torch.manual_seed(6)
    return list(steps(accelerator, model, *parts)), weights_of(accelerator, model)


def weights_of(accelerator, model):
    return {name: value.detach().cpu().clone() for name, value in accelerator.get_state_dict(model).items()}


def assert_close(plain, ours, atol=1e-6):
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(plain[0]), rtol=1e-6, atol=atol)
