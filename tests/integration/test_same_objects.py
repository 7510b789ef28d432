"""A user who makes optimizer and scheduler once, and fits more than once."""

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.optim.lr_scheduler import ChainedScheduler, LinearLR, SequentialLR, StepLR

from tests.cases import every_value
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

SCHEDULERS = {
    "step": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.5, total_iters=2), StepLR(optimizer, 1, 0.5)], milestones=[2]
    ),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer, 0.5), StepLR(optimizer, 1, 0.5)]),
}


class Once(Task):
    """Makes optimizer and scheduler where it is made itself."""

    def __init__(self, model, scheduler):
        super().__init__(model)
        self.own = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.own_scheduler = SCHEDULERS[scheduler](self.own)

    def configure_optimizers(self):
        return [self.own], [{"scheduler": self.own_scheduler, "interval": "step"}]

    def on_train_batch_end(self, *_):
        self.lrs.append(self.own.param_groups[0]["lr"])


def fit_twice(make_strategy, scheduler, steps=3):
    seed_everything(4, verbose=False)
    module = Once(TinyTransformer(dropout=0.0), scheduler)
    for _ in range(2):
        make_trainer(make_strategy(), max_steps=steps).fit(module, token_data())
    return module


@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize(("scheduler", "options"), every_value(SCHEDULERS, [{}, EXACT]), ids=str)
def test_the_second_fit_goes_on_with_the_same_optimizer_and_scheduler(options, scheduler):
    plain, ours = fit_twice(lambda: "auto", scheduler), fit_twice(lambda: offload(**options), scheduler)
    assert ours.lrs == plain.lrs and len(set(plain.lrs)) > 4
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    states = [list(module.own.state.values()) for module in (plain, ours)]
    assert [state["step"].item() for state in states[1]] == [state["step"].item() for state in states[0]]


def test_after_a_run_the_scheduler_drives_the_users_own_optimizer():
    module = Once(TinyTransformer(dropout=0.0), "sequential")
    before = vars(module.own)["step"]  # the scheduler's wrapper
    trainer = make_trainer("cxl_offload", max_steps=2)
    trainer.fit(module, token_data())
    assert trainer.optimizers[0] is not module.own
    for scheduler in (module.own_scheduler, *module.own_scheduler._schedulers):
        assert scheduler.optimizer is module.own
    assert vars(module.own)["step"] is before
    # they go on by hand, together with the optimizer of the run
    rate = module.own.param_groups[0]["lr"]
    module.loss(next(iter(token_data()))).backward()
    module.own.step()
    module.own_scheduler.step()
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.own.param_groups[0]["lr"] != rate


def test_so_it_is_after_a_run_that_failed():
    class Failing(Once):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("out of luck")

    module = Failing(TinyTransformer(), "step")
    before = vars(module.own)["step"]
    with pytest.raises(RuntimeError, match="out of luck"):
        make_trainer("cxl_offload", max_steps=2).fit(module, token_data())
    assert module.own_scheduler.optimizer is module.own and vars(module.own)["step"] is before
