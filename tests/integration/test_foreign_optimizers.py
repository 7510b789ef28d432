"""Optimizers that are not torch's Adam: their state moves; closures and lists of parameters are theirs."""

import pytest
import torch

from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyConvNet, TinyTransformer, image_data, token_data

pytestmark = pytest.mark.on_cpu


def trained(strategy, module, data, **options):
    make_trainer(strategy, **options).fit(module, data)
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    ],
    ids=["SGD fused", "AdamW fused", "AdamW foreach"],
)
def test_state_keeps_its_strides_when_it_moves(make):
    def module():
        torch.manual_seed(0)
        task = Task(TinyConvNet().to(memory_format=torch.channels_last))
        task.configure_optimizers = lambda: make(task.parameters())
        return task

    ours = trained(offload(cpu_adam=False), module(), image_data(), max_steps=4)
    plain = trained("auto", module(), image_data(), max_steps=4)
    assert all(map(torch.equal, ours, plain))


def test_state_that_shares_its_storage_stays():
    class Flat(torch.optim.SGD):
        """Keeps momentum of all parameters in one buffer, which it multiplies as a whole."""

        @torch.no_grad()
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            parameters = self.param_groups[0]["params"]
            if not self.state:
                self.flat = torch.zeros(sum(p.numel() for p in parameters))
                for p, part in zip(parameters, self.flat.split([p.numel() for p in parameters]), strict=True):
                    self.state[p]["momentum"] = part.view_as(p)
            self.flat.mul_(0.9)
            for p in (p for p in parameters if p.grad is not None):
                p.sub_(self.state[p]["momentum"].add_(p.grad), alpha=0.05)
            return loss

    def module():
        torch.manual_seed(0)
        task = Task(TinyTransformer(dropout=0.0))
        task.configure_optimizers = lambda: Flat(task.parameters(), lr=0.05)
        return task

    ours = trained(offload(), module(), token_data(), max_steps=4)
    assert all(map(torch.equal, ours, trained("auto", module(), token_data(), max_steps=4)))


class Sharpness(torch.optim.Optimizer):
    """Climbs, evaluates its closure again, and steps from where it was; writes through ``.data``."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.differences = []

    def step(self, closure):
        first = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        climbs = [(p.grad.float() * 0.5 / (p.grad.float().norm() + 1e-9)).to(p.dtype) for p in parameters]
        for p, climb in zip(parameters, climbs, strict=True):
            p.data.add_(climb)
            p.grad = None
        self.differences.append(float(closure()) - float(first))
        for p, climb in zip(parameters, climbs, strict=True):
            p.data.sub_(climb).add_(p.grad.to(p.dtype), alpha=-0.05)
        return first


@pytest.mark.filterwarnings("ignore:.*overrides")
def test_a_second_evaluation_sees_what_was_written_through_data():
    def differences(strategy):
        torch.manual_seed(0)
        task = Task(TinyTransformer(dropout=0.0))
        task.configure_optimizers = lambda: Sharpness(task.parameters())
        trainer = make_trainer(strategy, max_steps=2, precision="bf16-true")
        trainer.fit(task, token_data())
        return trainer.optimizers[0].differences

    plain, ours = differences("auto"), differences(offload())
    assert min(plain) > 0.1
    assert ours == pytest.approx(plain, rel=0.1)
