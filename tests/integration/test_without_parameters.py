"""Modules without parameters: a metric, a baseline, a tokenizer in the shape of a model."""

import pytest
import torch
from lightning.pytorch import LightningModule

from tests.cases import every_value
from tests.integration.training import make_trainer, offload
from tests.models import token_data


class Baseline(LightningModule):
    """Guesses the same token always; has a buffer at most."""

    def __init__(self, *, buffer: bool):
        super().__init__()
        self.register_buffer("guess", torch.tensor(3)) if buffer else setattr(self, "guess", 3)
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        return None  # nothing to learn

    def validation_step(self, batch, batch_idx):
        self.log("hits", (batch[1] == self.guess).float().mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return torch.full_like(batch[1], int(self.guess))

    def configure_optimizers(self):
        return None


@pytest.mark.parametrize(("options", "buffer"), every_value([{}, {"policy": "interleave"}], [False, True]), ids=str)
def test_evaluation_is_that_of_plain_lightning(options, buffer):
    trainer, plain = make_trainer(offload(**options)), make_trainer()
    module = Baseline(buffer=buffer)
    for verb in ("validate", "test"):
        ours = getattr(trainer, verb)(module, token_data(), verbose=False)
        assert ours == getattr(plain, verb)(module, token_data(), verbose=False) != [{}]
    ours, theirs = trainer.predict(module, token_data()), plain.predict(module, token_data())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert trainer.strategy.report()["num_parameters"] == 0
