"""bfloat16 training with split masters: equal to float32 masters, bit for bit, and the model keeps its gradients."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lightning_cxl import CPUAdam
from lightning_cxl.optim.kernels import join
from tests.cases import every_value
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

pytestmark = pytest.mark.on_cpu


class Masters(Task):
    """Records the float32 masters after the last step, by name of the parameter."""

    def on_train_end(self):
        masters = self.trainer.strategy.run.masters
        states = {p: s for o in self.trainer.optimizers for p, s in o.state.items()}
        self.masters = {}
        for pair in masters:
            remainder = states.get(pair.master, {}).get("remainder")
            value = pair.master.detach()
            self.masters[pair.name] = value.float() if remainder is None else join(value, remainder)


def no_dropout(**options):
    return TinyTransformer(dropout=0.0, **options)


def fit(options, *, make_model=no_dropout, task=Masters, steps=6, precision="bf16-true", **trainer_args):
    seed_everything(5, verbose=False)
    module = task(make_model())
    strategy = offload(**options) if isinstance(options, dict) else options
    trainer = make_trainer(strategy, max_steps=steps, precision=precision, **trainer_args)
    trainer.fit(module, token_data())
    return module, trainer


def assert_same_training(ours, other):
    assert ours.losses == other.losses and len(set(ours.losses)) > 1
    for name, value in other.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert ours.masters.keys() == other.masters.keys() == dict(other.named_parameters()).keys()
    for name, value in other.masters.items():
        assert torch.equal(ours.masters[name], value), name
    assert any(not torch.equal(m, m.bfloat16().float()) for m in ours.masters.values()), "more than bfloat16"


# -- split and float32 masters train the same --------------------------------------------------------------------------

CLIPS = {"no clip": {}, "norm": {"gradient_clip_val": 0.5}, "value": {"gradient_clip_val": 0.01}}
CLIPS["value"]["gradient_clip_algorithm"] = "value"


@pytest.mark.parametrize(("accumulate", "clip"), every_value([1, 2, 8], CLIPS))
def test_split_and_float32_masters_train_the_same(accumulate, clip):
    arguments = {"accumulate_grad_batches": accumulate, "steps": 8 if accumulate < 8 else 3, **CLIPS[clip]}
    module, trainer = fit({}, **arguments)
    assert isinstance(trainer.optimizers[0], CPUAdam)
    state = trainer.optimizers[0].state[module.model.head.weight]
    assert state["remainder"].dtype == torch.int16 and state["remainder"].any()
    assert_same_training(module, fit({"master": "fp32"}, **arguments)[0])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_bf16_sums_of_gradients_train_too(accumulate):
    """`accumulate="bf16"` leaves gradients in bfloat16, and does the same with split and with float32 masters."""

    class Check(Masters):
        def on_before_optimizer_step(self, optimizer):
            self.dtypes = {
                p.grad.dtype for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            }

    arguments = {"task": Check, "accumulate_grad_batches": accumulate}
    split, wide = fit({"accumulate": "bf16"}, **arguments)[0], fit({}, **arguments)[0]
    assert split.dtypes == {torch.bfloat16}
    assert wide.dtypes == {torch.float32 if accumulate > 1 else torch.bfloat16}
    assert split.losses == pytest.approx(wide.losses, rel=5e-3)
    assert (split.losses == wide.losses) == (accumulate == 1)
    separate = fit({"accumulate": "bf16", "master": "fp32"}, **arguments)[0]
    assert_same_training(split, separate)


# -- several optimizers ------------------------------------------------------------------------------------------------


class Several(Masters):
    """Manual optimization; `shared` is whether both optimizers hold the head."""

    automatic_optimization = False
    second: type[torch.optim.Optimizer] = torch.optim.SGD
    shared = True

    def configure_optimizers(self):
        head = list(self.model.head.parameters())
        body = [p for p in self.parameters() if self.shared or not any(p is h for h in head)]
        return [torch.optim.AdamW(body, lr=3e-3), self.second(head, lr=1e-3)]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = self.loss(batch)
        self.record(loss)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        self.manual_backward(self.loss(batch))
        assert all((p.grad is None) != any(p is h for h in self.model.head.parameters()) for p in self.seen())
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def seen(self):
        """The parameters whose gradients the model itself has."""
        masters = self.trainer.strategy.run.masters
        pairs = [masters.find(p) for name, p in self.named_parameters() if "unused" not in name]
        return [pair.compute for pair in pairs if pair.is_shared]


@pytest.mark.parametrize(("second", "shared"), every_value([torch.optim.SGD, torch.optim.AdamW], [True, False]))
def test_two_optimizers_with_and_without_common_parameters(second, shared):
    task = type("Task", (Several,), {"second": second, "shared": shared})
    split, separate = (fit({"master": master}, task=task, steps=40)[0] for master in ("split", "fp32"))
    assert_same_training(split, separate)
