"""Separate master weights: nothing about gradients or weights gets lost.

Here bfloat16 weights with `master="fp32"` or torch's optimizer; on a GPU, every precision.
"""

import warnings

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch._dynamo.utils import counters

import lightning_cxl
from tests.cases import every_value
from tests.integration.training import EXACT, make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

SEPARATE = [{"master": "fp32"}, EXACT]  # CPUAdam and torch's optimizer, each with float32 masters beside bfloat16


class Norms(Task):
    """Records the norm of the gradients that the optimizer sees, with weights that never change."""

    def __init__(self, model, **kwargs):
        super().__init__(model, "sgd", scheduler=False, lr=0.0, **kwargs)
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(torch.stack([g.float().norm() for g in grads]).norm().item() if grads else 0.0)


def run(task, strategy="cxl_offload", steps=4, precision="bf16-true", **trainer_args):
    seed_everything(7, verbose=False)
    module = task if isinstance(task, nn.Module) else task()
    trainer = make_trainer(strategy, max_steps=steps, precision=precision, **trainer_args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lightning_cxl.LightningCXLWarning)
        trainer.fit(module, token_data())
    return module, trainer


def model():
    return TinyTransformer(dropout=0.0)


@pytest.mark.parametrize("zero", ["module", "child", "optimizer", "to zero"])
def test_zero_grad_reaches_the_masters(zero):
    class Manual(Norms):
        def __init__(self):
            super().__init__(model())
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            if zero == "module":
                self.zero_grad()
            elif zero == "child":
                self.model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=zero == "optimizer")

    assert run(Manual)[0].norms == pytest.approx(run(Manual, "auto")[0].norms, rel=0.02)


class Clamp(Task):
    """Clamps a weight once, after the second step."""

    def __init__(self):
        super().__init__(model(), scheduler=False, lr=1e-4)

    def on_train_batch_end(self, *_):
        if self.global_step == 2:
            with torch.no_grad():
                self.model.head.weight.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("options", SEPARATE, ids=str)
def test_changes_to_weights_between_steps_reach_the_masters(tmp_path, options):
    module, _ = run(Clamp, offload(**options), steps=4)
    assert module.model.head.weight.abs().max() <= 0.0105, "two more steps have started from the clamped weights"
    module, trainer = run(Clamp, offload(**options), steps=2)  # saved between the change and the next step
    trainer.save_checkpoint(tmp_path / "clamped.ckpt")
    saved = torch.load(tmp_path / "clamped.ckpt", weights_only=True)
    assert saved["lightning_cxl"]["master_weights"]["model.head.weight"].abs().max() <= 0.0101


class Reads(Task):
    """Notes the norm of each of the model's own gradients wherever the loop may read them."""

    def __init__(self):
        super().__init__(TinyTransformer(depth=5, dropout=0.0), "sgd", scheduler=False, lr=0.01)
        self.norms = []

    def read(self):
        self.norms.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in self.parameters()])

    def on_after_backward(self):
        self.read()

    def on_before_optimizer_step(self, optimizer):
        self.read()

    def on_before_zero_grad(self, optimizer):
        self.read()


OPTIONS = [{}, {"stream_weights": False}, *SEPARATE]


PRECISIONS = ["32-true", "bf16-true", "bf16-mixed"]


@pytest.mark.parametrize(("accumulate", "precision", "options"), every_value([1, 2], PRECISIONS, OPTIONS), ids=str)
def test_the_models_own_gradients_are_there_to_read(accumulate, precision, options):
    ours, plain = (
        run(Reads, strategy, precision=precision, accumulate_grad_batches=accumulate)[0]
        for strategy in (offload(**options), "auto")
    )
    assert len(ours.norms) == len(plain.norms)
    for own, theirs in zip(ours.norms, plain.norms, strict=True):
        assert own == pytest.approx(theirs, rel=0.05 if precision == "bf16-true" else 1e-4, abs=1e-5)
    assert all(max(norms) > 0 for norms in ours.norms[1:]) == all(max(norms) > 0 for norms in plain.norms[1:])
    assert min(map(max, ours.norms[1:])) > 0


class ReadsInStep(Task):
    """Reads gradients between the micro-batches of a step, where nothing says so before, and is compiled then."""

    def __init__(self):
        super().__init__(TinyTransformer(depth=5, dropout=0.0), "sgd", scheduler=False, lr=0.01)
        self.norms, self.kept = [], [self.model.embed.weight, self.model.norm.bias]
        self.graphs, self.breaks = 0, []

    def training_step(self, batch, batch_idx):
        self.norms.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in self.kept])
        torch.compiler.reset()
        counters.clear()
        torch.compile(lambda: [p.detach().norm() for p in self.kept], backend="aot_eager")()
        self.graphs += counters["stats"]["unique_graphs"]
        self.breaks += counters["graph_break"]
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, of the compiler
@pytest.mark.parametrize("options", [{"stream_weights": False}, SEPARATE[0]], ids=str)
def test_gradients_are_there_between_micro_batches_whoever_reads_them(options):
    ours, plain = (
        run(ReadsInStep, strategy, steps=2, precision="bf16-true", accumulate_grad_batches=2)[0]
        for strategy in (offload(**options), "auto")
    )
    assert ours.norms == [pytest.approx(norms, rel=0.05) for norms in plain.norms]
    assert [min(norms) > 0 for norms in ours.norms] == [False] + [True] * 3
    assert (ours.graphs, ours.breaks) == (4, [])


class Surgery(Task):
    """Adds up gradients by hand, as gradient surgery does, and edits some where they are."""

    automatic_optimization = False

    def __init__(self):
        super().__init__(TinyTransformer(depth=5, dropout=0.0), "sgd", scheduler=False, lr=0.1)

    def training_step(self, batch, batch_idx):
        optimizer, total = self.optimizers(), {}
        for part in range(2):
            optimizer.zero_grad()
            loss = self.loss([t[part : part + 1] for t in batch])
            self.record(loss)
            self.manual_backward(loss)
            for name, p in self.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad.clone().mul_(1 + part)
        self.zero_grad()
        assert all(p.grad is None for p in self.parameters())
        for name, p in self.named_parameters():
            p.grad = total.get(name)
        self.model.head.weight.grad.data.clamp_(-0.05, 0.05)
        self.model.embed.weight.grad *= 0.5
        optimizer.step()


@pytest.mark.parametrize(("precision", "options"), every_value(PRECISIONS, OPTIONS), ids=str)
def test_assigned_gradients_are_those_that_count(precision, options):
    ours, plain = run(Surgery, offload(**options), precision=precision)[0], run(Surgery, "auto", precision="32-true")[0]
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "32-true" else 0.03)
    assert len(set(ours.losses)) == len(ours.losses)


class ClampAll(Task):
    """Writes to all weights past torch's version counter, and in tensors that it has kept."""

    def __init__(self):
        super().__init__(TinyTransformer(depth=5, dropout=0.0), "adamw", scheduler=False, lr=3e-3)

    def on_train_batch_end(self, *_):
        parameters = list(self.parameters())  # waits for updates, which tensors that are kept do not
        if self.global_step == 2:
            self.kept = [p.data for p in parameters]
        elif self.global_step == 4:
            for data in self.kept:
                data.mul_(0.9)
            del self.kept, data
            return  # nothing else says that somebody has written
        for p in parameters:
            if self.global_step < 6:
                p.data.clamp_(-0.1, 0.1)
            else:
                p.data = p.data * 0.95


@pytest.mark.parametrize(("precision", "options"), every_value(PRECISIONS, OPTIONS), ids=str)
def test_writes_through_data_count_for_all_parameters(precision, options):
    ours, plain = (
        run(ClampAll, strategy, steps=8, precision=own)[0]
        for strategy, own in ((offload(**options), precision), ("auto", "32-true"))
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "32-true" else 0.03)
    for own, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.float().cpu(), theirs.cpu(), atol=2e-4 if precision == "32-true" else 5e-2)
    assert all(type(p) is nn.Parameter for p in ours.parameters())


@pytest.mark.parametrize(
    ("precision", "optimizer", "options"),
    [("bf16-true", "adamw", {"master": "fp32"}), ("bf16-true", "sgd", {})],
    ids=str,
)
def test_an_optimizer_object_can_be_used_for_a_second_fit(precision, optimizer, options):
    class Cached(Task):
        def configure_optimizers(self):
            if not hasattr(self, "cached"):
                self.cached = super().configure_optimizers()
            return self.cached

    def twice(make_strategy):
        seed_everything(3, verbose=False)
        module = Cached(model(), optimizer, scheduler=False)
        run(module, make_strategy(), steps=2, precision=precision)
        held = {id(p) for group in module.cached.param_groups for p in group["params"]}
        assert held == {id(p) for p in module.parameters()}, "the user's object holds the model's own parameters again"
        run(module, make_strategy(), steps=3, precision=precision)
        return module.losses

    assert twice(lambda: offload(**options)) == pytest.approx(
        twice(lambda: "auto"), rel=1e-5 if precision == "32-true" else 0.03
    )


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("backward", ["manual_backward", "loss.backward"])
def test_gradients_that_arrive_late_are_complete_when_backward_returns(backward):
    class Manual(Norms):
        def __init__(self):
            super().__init__(model())
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            for part in range(2):
                loss = self.loss([t[part : part + 1] for t in batch])
                self.manual_backward(loss) if backward == "manual_backward" else loss.backward()
            self.clip_gradients(optimizer, gradient_clip_val=0.001, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    ours = run(Manual, offload(activation_offload=False))[0].norms
    assert ours == pytest.approx([0.001] * 4, rel=0.01)


@pytest.mark.on_cpu
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("first", [True, False])
def test_create_graph_keeps_the_graph(first):
    class Graph(Task):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            if not first:
                self.manual_backward(self.loss(batch))
            self.loss(batch).backward(create_graph=True)
            grad = self.model.head.weight.grad
            assert grad.requires_grad
            (second,) = torch.autograd.grad(grad.float().square().sum(), self.model.head.weight)
            assert second.any()
            self.optimizers().step()
            self.optimizers().zero_grad()
            self.grad = grad.detach().float()

    ours = run(lambda: Graph(model(), scheduler=False), offload(activation_offload=False), steps=1)[0]
    plain = run(lambda: Graph(model(), scheduler=False), "auto", steps=1)[0]
    torch.testing.assert_close(ours.grad, plain.grad, rtol=0.02, atol=1e-4)


@pytest.mark.on_cpu  # gradients of separate masters become dense
def test_sparse_gradients_are_left_to_the_users_optimizer():
    class Sparse(Task):
        def __init__(self):
            super().__init__(nn.Sequential(nn.Embedding(37, 16, sparse=True), nn.Linear(16, 37)))

        def configure_optimizers(self):
            dense = torch.optim.SGD(self.model[1].parameters(), lr=0.1)
            return [dense, torch.optim.SparseAdam(list(self.model[0].parameters()), lr=0.1)]

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

        automatic_optimization = False

    ours, plain = run(Sparse, precision="32-true")[0], run(Sparse, "auto", precision="32-true")[0]
    assert ours.losses == plain.losses


def test_a_failing_checkpoint_plugin_does_not_keep_the_run_alive(tmp_path):
    module = Task(model())
    trainer = make_trainer("cxl_offload", max_steps=1)

    class Broken(lightning_cxl.integrations.lightning.strategy.CXLCheckpointIO):
        def teardown(self):
            raise OSError(28, "No space left on device")

    trainer.strategy.checkpoint_io = Broken()
    with pytest.raises(OSError, match="No space"):
        trainer.fit(module, token_data())
    assert trainer.strategy._session.run is None
    assert all(not p._post_accumulate_grad_hooks for p in module.parameters())
    assert all("forward" not in vars(m) for m in module.modules())


@pytest.mark.parametrize(("precision", "options"), [("32-true", {}), ("bf16-true", SEPARATE[0])], ids=str)
def test_users_own_reference_steps_the_same_optimizer(precision, options):
    class Own(Task):
        def __init__(self):
            super().__init__(model())
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.own.zero_grad()
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            self.own.step()

        def configure_optimizers(self):
            self.own = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return self.own

    # Lightning does not count steps that it does not see, so batches limit the run
    limits = {"steps": -1, "max_epochs": 1, "limit_train_batches": 4}
    ours, plain = (
        run(Own, offload(**options), precision=precision, **limits)[0],
        run(Own, "auto", precision="32-true", **limits)[0],
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "32-true" else 0.03)
    assert len(set(ours.losses)) == len(ours.losses)
