"""Master weights and optimizer state in every form: no gradient and no write gets lost, training is that of float32.

Weights are bfloat16, with split or separate float32 masters, and float32, which are their own masters; on a GPU masters
are separate in every precision. State is in float32, bfloat16 and 8 bit.
"""

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

import lightning_cxl
from lightning_cxl import CPUAdam
from lightning_cxl.optim.kernels import join
from tests.cases import every_pair, every_value
from tests.integration import training
from tests.integration.training import EXACT, assert_equal, assert_same_weights
from tests.models import Task, TinyTransformer
from tests.numerics.reference.blockwise import dequantize

on_cpu = pytest.mark.on_cpu
SEPARATE = [{"master": "fp32"}, EXACT]  # CPUAdam and torch's optimizer, each with float32 masters beside bfloat16
OPTIONS = [{}, {"stream_weights": False}, *SEPARATE]
PRECISIONS = ["32-true", "bf16-true", "bf16-mixed"]


def run(task, strategy, steps=4, precision="bf16-true", **given):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lightning_cxl.LightningCXLWarning)
        return training.run(strategy, task, steps, precision=precision, seed=7, **given)


def assert_close(ours, plain, precision):
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5 if precision == "32-true" else 0.03)
    assert len(set(ours.losses)) == len(ours.losses)


def model(depth=3):
    return TinyTransformer(depth=depth, dropout=0.0)


class Reads(Task):
    """Notes the norm of each of the model's own gradients wherever the loop may read them."""

    def __init__(self):
        super().__init__(model(5), "sgd", scheduler=False, lr=0.01)
        self.norms = []

    def read(self, *_):
        self.norms.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in self.parameters()])

    on_after_backward = on_before_optimizer_step = on_before_zero_grad = read


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize(("accumulate", "precision", "options"), every_value([1, 2], PRECISIONS, OPTIONS), ids=str)
def test_the_models_own_gradients_are_there_to_read(accumulate, precision, options):
    given = {"precision": precision, "accumulate_grad_batches": accumulate}
    ours, plain = (run(Reads, each, **given)[0] for each in (options, "auto"))
    assert len(ours.norms) == len(plain.norms)
    for own, theirs in zip(ours.norms, plain.norms, strict=True):
        assert own == pytest.approx(theirs, rel=0.05 if precision == "bf16-true" else 1e-4, abs=1e-5)
    assert min(map(max, ours.norms[1:])) > 0


class ReadsBetween(Task):
    """Reads gradients between the micro-batches of a step, where nothing says so before, by parameters that it kept."""

    def __init__(self):
        super().__init__(model(5), "sgd", scheduler=False, lr=0.01)
        self.norms, self.kept = [], [self.model.embed.weight, self.model.norm.bias]

    def training_step(self, batch, batch_idx):
        self.norms.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in self.kept])
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("options", [{"stream_weights": False}, SEPARATE[0]], ids=str)
def test_gradients_are_there_between_micro_batches_whoever_reads_them(options):
    ours, plain = (run(ReadsBetween, each, steps=2, accumulate_grad_batches=2)[0] for each in (options, "auto"))
    assert ours.norms == [pytest.approx(norms, rel=0.05) for norms in plain.norms]
    assert [min(norms) > 0 for norms in ours.norms] == [False] + [True] * 3


class Surgery(Task):
    """Adds up gradients by hand, as gradient surgery does, and edits some where they are."""

    automatic_optimization = False

    def __init__(self):
        super().__init__(model(5), "sgd", scheduler=False, lr=0.1)

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
    ours = run(Surgery, options, precision=precision)[0]
    assert_close(ours, run(Surgery, "auto", precision="32-true")[0], precision)


# -- writes to weights -------------------------------------------------------------------------------------------------


@on_cpu  # gradients of separate masters become dense
def test_sparse_gradients_are_left_to_the_users_optimizer():
    class Sparse(Task):
        automatic_optimization = False

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

    ours, plain = (run(Sparse, each, precision="32-true")[0] for each in ({}, "auto"))
    assert ours.losses == plain.losses


class ClampAll(Task):
    """Writes to all weights past torch's version counter, and in tensors that it has kept."""

    def __init__(self):
        super().__init__(model(5), scheduler=False, lr=3e-3)

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
    ours, plain = run(ClampAll, options, 8, precision)[0], run(ClampAll, "auto", 8, "32-true")[0]
    assert_close(ours, plain, precision)
    for own, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own.float().cpu(), theirs.cpu(), atol=2e-4 if precision == "32-true" else 5e-2)
    assert all(type(p) is nn.Parameter for p in ours.parameters())


def test_weights_loaded_in_a_run_are_what_trains_next(tmp_path):
    """Writing in place counts as a change: separate masters take it over, as a copied-in state dict would be."""
    reference = model()
    lightning_cxl.save_weights(reference, tmp_path)

    def trained(load):
        module = Task(model())
        module.on_train_start = lambda: load(module.model)
        return run(module, {"master": "fp32"}, 3)[0].state_dict()

    expected = trained(lambda model: model.load_state_dict(reference.state_dict()))
    assert_equal(trained(lambda model: lightning_cxl.load_weights(model, tmp_path)), expected)
    assert not torch.equal(expected["model.embed.weight"].cpu(), reference.embed.weight.bfloat16())


class FillsInHook(Task):
    """A hook of the second step fills all weights, of the model or of the optimizer's groups."""

    def __init__(self, make):
        super().__init__(model(), make, scheduler=False, lr=1e-3)
        self.seen = []

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        getattr(optimizer, f"register_step_{self.when}_hook")(self.fill)
        return optimizer

    @torch.no_grad()
    def fill(self, optimizer, *_):
        if len(self.seen) == 1:
            in_groups = [p for group in optimizer.param_groups for p in group["params"]]
            for p in self.parameters() if self.of == "model" else in_groups:
                (p.data if self.of == "data of groups" else p).fill_(0.25)

    def on_train_batch_end(self, *_):
        self.seen.append([p.detach().float().cpu() for p in self.parameters()])


@pytest.mark.parametrize(
    ("options", "make", "of", "when"),
    every_pair(
        [*OPTIONS, {"state_on_device": True}],
        *(["adamw", "sgd"], ["model", "groups", "data of groups"], ["pre", "post"]),
    ),
    ids=str,
)
def test_what_hooks_around_a_step_write_is_in_the_model_and_in_the_masters(options, make, of, when):
    task = FillsInHook(make)
    task.of, task.when = of, when
    seen = run(task, options, 3)[0].seen
    if when == "post":
        assert all(torch.equal(value, torch.full_like(value, 0.25)) for value in seen[1])
    for value in seen[1] + seen[2]:
        torch.testing.assert_close(value, torch.full_like(value, 0.25), rtol=0, atol=0.02)


def test_what_a_callback_writes_to_the_optimizers_weights_is_in_the_forward_of_its_batch():
    @torch.no_grad()
    def shrink(trainer, *_):
        for p in trainer.optimizers[0].param_groups[0]["params"]:
            p.mul_(0.9)

    given = {"steps": 3, "callbacks": [LambdaCallback(on_train_batch_start=shrink)]}
    training.assert_same(*(training.fit(each, **given) for each in ("auto", {**EXACT, "stream_weights": False})))


class CallsNoHooks(torch.optim.Optimizer):
    """Its step calls no hooks, though one is registered."""

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            p.fill_(0.5)
        return loss

    step.hooked = True  # as torch marks what it has wrapped


class HooksInVain(Task):
    def configure_optimizers(self):
        optimizer = CallsNoHooks(self.parameters(), {})
        optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook was called"))
        return optimizer

    def on_train_batch_end(self, *_):
        self.seen = [p.detach().float().cpu() for p in self.parameters()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_that_calls_no_hooks_reaches_the_model(options):
    seen = run(lambda: HooksInVain(model()), options, 2)[0].seen
    assert all(torch.equal(value, torch.full_like(value, 0.5)) for value in seen)


# -- split masters train as float32 masters do -------------------------------------------------------------------------


class Masters(Task):
    """Records the float32 masters after the last step, by name of the parameter, and types of gradients."""

    def __init__(self):
        super().__init__(model())

    def on_before_optimizer_step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.dtypes = {grad.dtype for grad in grads}

    def on_train_end(self):
        states = {p: s for o in self.trainer.optimizers for p, s in o.state.items()}
        self.masters = {}
        for pair in self.trainer.strategy.run.masters:
            remainder, value = states.get(pair.master, {}).get("remainder"), pair.master.detach()
            self.masters[pair.name] = value.float() if remainder is None else join(value, remainder)


def assert_same_training(ours, other):
    assert ours.losses == other.losses and len(set(ours.losses)) > 1
    assert_same_weights(ours, other)
    assert other.masters.keys() == dict(other.named_parameters()).keys()
    assert_equal(ours.masters, other.masters)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in ours.masters.values()), "more than bfloat16"


CLIPS = {
    "no clip": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
}


@on_cpu
@pytest.mark.parametrize(("accumulate", "clip"), every_value([2, 1, 8], CLIPS))
def test_split_and_float32_masters_train_the_same(accumulate, clip):
    given = {"accumulate_grad_batches": accumulate, "steps": 8 if accumulate < 8 else 3, **CLIPS[clip]}
    module, trainer = run(Masters, {}, **given)
    assert isinstance(trainer.optimizers[0], CPUAdam)
    state = trainer.optimizers[0].state[module.model.head.weight]
    assert state["remainder"].dtype == torch.int16 and state["remainder"].any()
    assert_same_training(module, run(Masters, SEPARATE[0], **given)[0])


@on_cpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bf16_sums_of_gradients_train_too(accumulate):
    """`accumulate="bf16"` leaves gradients in bfloat16, and does the same with split and with float32 masters."""
    sums = {"accumulate": "bf16"}
    split, wide, separate = (
        run(Masters, options, 6, accumulate_grad_batches=accumulate)[0] for options in (sums, {}, sums | SEPARATE[0])
    )
    assert split.dtypes == {torch.bfloat16}
    assert wide.dtypes == {torch.float32 if accumulate > 1 else torch.bfloat16}
    assert split.losses == pytest.approx(wide.losses, rel=5e-3)
    assert (split.losses == wide.losses) == (accumulate == 1)
    assert_same_training(split, separate)


class Several(Masters):
    """Steps two optimizers by hand, each toggled; `shared` is whether both hold the head."""

    automatic_optimization = False
    on_before_optimizer_step = Task.on_before_optimizer_step

    def configure_optimizers(self):
        head = list(self.model.head.parameters())
        body = [p for p in self.parameters() if self.shared or not any(p is h for h in head)]
        return [torch.optim.AdamW(body, lr=3e-3), self.second(head, lr=1e-3)]

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.record(loss)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


@on_cpu
@pytest.mark.parametrize(("second", "shared"), every_value([torch.optim.AdamW, torch.optim.SGD], [False, True]))
def test_two_optimizers_with_and_without_common_parameters(second, shared):
    task = type("Task", (Several,), {"second": second, "shared": shared})
    split, separate = (run(task, {"master": master}, 10)[0] for master in ("split", "fp32"))
    assert_same_training(split, separate)


LARGE = "model.blocks.0.mlp.0.weight"


def large():
    """Some of its weights are large enough for state in few bits."""
    return Task(TinyTransformer(width=64, dropout=0.0), scheduler=False)


def state_of(module, trainer):
    return trainer.optimizers[0].state[module.get_parameter(LARGE)]


@on_cpu
@pytest.mark.parametrize(("target", "precision"), every_value(["torch", "plain"], ["bf16-true", "32-true"]))
def test_torchs_optimizer_goes_on_from_8_bit_state(tmp_path, target, precision):
    """By itself under our strategy, in plain Lightning after a conversion."""
    path = tmp_path / "six.ckpt"
    module, trainer = run(large, {"state": "8bit"}, 6, precision, save=path)
    old, own_precision = state_of(module, trainer), precision
    if target == "plain":
        plain = lightning_cxl.plain_checkpoint(torch.load(path, weights_only=True))
        assert "lightning_cxl" not in plain
        path, own_precision = tmp_path / "plain.ckpt", "32-true"
        torch.save(plain, path)
    resumed, other = run(large, "auto" if target == "plain" else EXACT, 6, own_precision, ckpt_path=path)
    assert type(other.optimizers[0]) is torch.optim.AdamW
    new = state_of(resumed, other)
    assert new.keys() == {"step", "exp_avg", "exp_avg_sq"} and new["step"] == 6
    assert torch.equal(new["exp_avg"], dequantize(old["state1"], old["absmax1"], unsigned=False))
    assert torch.equal(new["exp_avg_sq"], dequantize(old["state2"], old["absmax2"], unsigned=True))
    if precision == "bf16-true":
        masters = resumed.state_dict() if target == "plain" else other.strategy._session.trained.masters.named_masters()
        assert torch.equal(masters[LARGE], join(module.get_parameter(LARGE).detach(), old["remainder"]))
