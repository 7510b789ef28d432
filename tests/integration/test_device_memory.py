"""Memory of the device while weights and activations stream: what a few units need, however many there are."""

from functools import partial

import pytest
import torch

from tests import training_device
from tests.cases import every_value
from tests.integration.training import offload, train
from tests.models import Task, TinyTransformer

ROUND = 1 << 16  # the gradients of one unit: how many are on their way is a matter of time


class Casts(Task):
    """Casts under an autocast of its own, which keeps the casts of weights."""

    def training_step(self, batch, batch_idx):
        with torch.autocast(training_device.current.type, torch.bfloat16):
            return super().training_step(batch, batch_idx)


def peaks(depth, options, task):
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    losses, _ = train(partial(TinyTransformer, depth=depth), offload(**options), steps=3, task=task)
    assert len(losses) == 3
    return torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()


KINDS = {
    "behind the forward": ({}, Task),
    "behind the backward": ({"on_overflow": "ignore"}, Task),
    "autocast": ({}, Casts),
}


@pytest.mark.parametrize(("late", "kind"), every_value(["nothing", "kernels", "copies"], KINDS))
def test_the_peak_does_not_grow_with_the_number_of_units(late, kind):
    options, task = KINDS[kind]
    if training_device.current.type == "cpu":
        pytest.skip("needs a device apart")
    training_device.make_late(late)  # late kernels let the host run far ahead
    few, many = peaks(6, options, task), peaks(18, options, task)
    assert many == pytest.approx(few, abs=ROUND)
