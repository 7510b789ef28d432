"""Offload changes where bytes live, never what is computed: against plain Lightning on the same device."""

import copy
import itertools

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from tests.integration.training import EXACT, assert_identical, make_trainer, offload, train
from tests.models import Task, TinyConvNet, TinyTransformer, image_data, token_data


def assert_close(plain, ours):
    """CPUAdam may differ from torch's AdamW by two ulp in a single update: every loss within 1e-6, relative."""
    assert len(plain[0]) == len(ours[0]) > 0
    for ours_loss, plain_loss in zip(ours[0], plain[0], strict=True):
        assert abs(ours_loss - plain_loss) <= 1e-6 * abs(plain_loss)
    for name, value in plain[1].items():
        mine = ours[1][name]
        if name.endswith("qkv.bias"):  # the true gradient of key biases is zero: Adam follows rounding noise there
            mine, value = (
                torch.stack([mine.chunk(3)[i] for i in (0, 2)]),
                torch.stack([value.chunk(3)[i] for i in (0, 2)]),
            )
        torch.testing.assert_close(mine, value, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


MODELS = {
    "transformer": (TinyTransformer, token_data),
    "convolution": (TinyConvNet, image_data),
}


CLIPS = {"no clip": (None, None), "norm": (0.5, "norm"), "value": (0.01, "value")}


@pytest.mark.parametrize(
    ("model", "accumulate", "clip"),
    [
        ("transformer", 1, "no clip"),
        ("transformer", 8, "norm"),
        ("transformer", 1, "value"),
        ("convolution", 2, "norm"),
    ],
)
def test_cpu_adam_follows_torch(model, accumulate, clip):
    make_model, data = MODELS[model]
    value, algorithm = CLIPS[clip]
    arguments = {
        "data": data,
        "trainer_args": {
            "accumulate_grad_batches": accumulate, "gradient_clip_val": value, "gradient_clip_algorithm": algorithm
        },
        "steps": 12 // accumulate + 1,
    }  # fmt: skip
    assert_close(train(make_model, "auto", **arguments), train(make_model, "cxl_offload", **arguments))


@pytest.mark.parametrize("optimizer", ["adagrad", "adafactor"])
def test_other_torch_optimizers_are_bit_identical(optimizer):
    arguments = {"optimizer": optimizer, "steps": 8}
    assert_identical(train(TinyTransformer, "auto", **arguments), train(TinyTransformer, offload(**EXACT), **arguments))


@pytest.mark.on_cpu  # elsewhere gradients are on masters
@pytest.mark.parametrize("offload_activations", [True, False])
def test_every_gradient_is_counted(offload_activations):
    """A block used twice, several backwards per step, unused parameters: gradients equal autograd's own."""
    seed_everything(3, verbose=False)
    model = TinyTransformer(twice=True, dropout=0.0)
    reference = copy.deepcopy(model)
    batches = list(itertools.islice(token_data(), 3))

    class Probe(Task):
        def on_before_optimizer_step(self, optimizer):
            self.grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}

    module = Probe(model)
    trainer = make_trainer(offload(activation_offload=offload_activations), max_steps=1, accumulate_grad_batches=3)
    trainer.fit(module, token_data())
    for x, y in batches:
        (nn.functional.cross_entropy(reference(x).flatten(0, -2), y.flatten()) / 3).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert module.grads.keys() == expected.keys() and "unused.weight" not in expected
    for name, grad in expected.items():
        assert torch.equal(module.grads[name], grad), name
