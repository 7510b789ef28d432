"""Who an adopted optimizer says it is: dashboards, loggers and user code know the user's class, not ours."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

import lightning_cxl
from tests.cases import every_value
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

CLASSES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class TwoOfAKind(Task):
    """Two Adam optimizers, and an AdamW: names are numbered within a class."""

    def __init__(self, model):
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        first, second, *rest = self.model.blocks
        others = [p for block in rest for p in block.parameters()]
        return [
            torch.optim.Adam(first.parameters(), lr=1e-3),
            torch.optim.Adam(second.parameters(), lr=2e-3),
            torch.optim.AdamW(others, lr=3e-3),
        ]


def logged_names(strategy, module, tmp_path, steps=2):
    monitor = LearningRateMonitor(log_momentum=True)
    trainer = make_trainer(
        strategy, max_steps=steps, logger=CSVLogger(tmp_path), log_every_n_steps=1, callbacks=[monitor]
    )
    trainer.fit(module, token_data())
    return list(monitor.lrs), trainer


@pytest.mark.parametrize("make", [lambda: Task(TinyTransformer()), lambda: TwoOfAKind(TinyTransformer())])
def test_learning_rates_are_logged_under_the_names_of_plain_lightning(tmp_path, make):
    plain, _ = logged_names("auto", make(), tmp_path, 6)
    ours, trainer = logged_names("cxl_offload", make(), tmp_path, 6)
    assert ours == plain and len(plain) > 1
    assert all(isinstance(optimizer, lightning_cxl.CPUAdam) for optimizer in trainer.optimizers)


@pytest.mark.parametrize("name", CLASSES)
def test_an_adopted_optimizer_is_the_users_class_and_cpu_adam(name):
    module = Task(TinyTransformer(), name)
    trainer = make_trainer("cxl_offload", max_steps=1)
    trainer.fit(module, token_data())
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, CLASSES[name]) and isinstance(optimizer, lightning_cxl.CPUAdam)
    assert isinstance(optimizer, torch.optim.AdamW) == (name == "adamw")
    assert type(optimizer).__name__ == type(optimizer).__qualname__ == CLASSES[name].__name__
    assert repr(optimizer).startswith(f"{CLASSES[name].__name__} (")
    (line,) = trainer.strategy.report()["optimizers"]
    assert line.startswith(f"{CLASSES[name].__name__} by CPUAdam on the host")


@pytest.mark.parametrize(
    ("transport", "state"),
    every_value([copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))], ["fp32", "8bit"]),
)
def test_copies_and_pickles_go_on_as_the_original(transport, state):
    """During a run and after it, with the state and the class they had."""

    class Copies(Callback):
        def on_train_batch_end(self, trainer, *_):
            self.during = transport(trainer.optimizers[0])

    callback = Copies()
    trainer = make_trainer(offload(state=state), max_steps=2, callbacks=[callback])
    trainer.fit(Task(TinyTransformer(width=64)), token_data())
    (original,) = trainer.optimizers
    results = []
    for optimizer in (callback.during, transport(original), original):
        assert type(optimizer) is type(original)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        results.append([p.detach().clone() for group in optimizer.param_groups for p in group["params"]])
    for other in results[:-1]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[-1], strict=True))
