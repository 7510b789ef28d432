"""`optimizer.step` of an adopted optimizer takes and returns what the user's own does."""

import pytest
import torch
from lightning.pytorch import Callback

from tests.cases import every_value
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import Task, TinyTransformer, token_data


class Scaled(torch.optim.SGD):
    """A user's optimizer with a keyword of its own, which returns more than the loss."""

    def step(self, closure=None, *, factor=1.0):
        loss = super().step(closure)
        return loss, factor


class Manual(Task):
    def __init__(self, step, optimizer=Scaled):
        super().__init__(TinyTransformer(dropout=0.0))
        self.automatic_optimization = False
        self.make_optimizer, self.step = optimizer, step
        self.returned = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()

        def closure():
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            return loss

        self.returned.append(self.step(optimizer, closure))
        return {"loss": self._losses[-1], "batch": batch_idx}

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters(), lr=0.1)


class Outputs(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((outputs["loss"].item(), outputs["batch"]))


def fit(strategy, step, optimizer=Scaled, steps=3):
    torch.manual_seed(3)
    module, callback = Manual(step, optimizer), Outputs()
    make_trainer(strategy, max_steps=steps, callbacks=[callback]).fit(module, token_data())
    return module, callback.seen


STEPS = {
    "closure and keyword": lambda optimizer, closure: optimizer.step(closure=closure, factor=0.5),
    "closure": lambda optimizer, closure: optimizer.step(closure),
    "keyword": lambda optimizer, closure: (closure(), optimizer.step(factor=0.5))[1],
}


@pytest.mark.parametrize("how", STEPS)
def test_keywords_arrive_and_what_is_returned_comes_back(how):
    (plain, expected), (ours, seen) = (fit(strategy, STEPS[how]) for strategy in ("auto", offload()))
    assert [factor for _, factor in ours.returned] == [factor for _, factor in plain.returned]
    for loss, reference in zip(ours.returned, plain.returned, strict=True):
        assert loss[0] == reference[0] if how == "keyword" else loss[0].item() == pytest.approx(reference[0].item())
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert [index for _, index in seen] == [index for _, index in expected] == [0, 1, 2]
    assert [loss for loss, _ in seen] == ours.losses


@pytest.mark.parametrize(("make", "options"), every_value([torch.optim.AdamW, torch.optim.SGD], [{}, EXACT]), ids=str)
def test_torchs_own_steps_return_the_loss_and_refuse_keywords(options, make):
    module, _ = fit(offload(**options), STEPS["closure"], make)
    assert [loss.item() for loss in module.returned] == module.losses

    with pytest.raises(TypeError, match="factor"):
        fit(offload(**options), STEPS["closure and keyword"], make)


def test_a_torch_optimizer_whose_step_someone_replaced_gets_closure_and_keyword(monkeypatch):
    """As test suites do with mocks, and wrappers that count calls."""
    calls = []
    original = torch.optim.SGD.step

    def step(self, closure=None, **keywords):
        calls.append(keywords)
        return original(self, closure), "wrapped"

    step.hooked = True
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    module, _ = fit(offload(), STEPS["closure and keyword"], torch.optim.SGD)
    assert calls == [{"factor": 0.5}] * 3
    assert [(loss.item(), mark) for loss, mark in module.returned] == [(loss, "wrapped") for loss in module.losses]
