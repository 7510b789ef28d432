"""Streamed weights and updates behind the device: never a stale weight, whatever users do, and really behind."""

import copy
import threading
import time
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_cxl.errors import ConfigError, GradientOverflowError, UnsupportedError
from lightning_cxl.gradients import step as updates
from lightning_cxl.gradients.offload import MAX_STAGED, GradientOffload, HostWorker
from lightning_cxl.optim.cpu_adam import AdamStep
from tests import training_device
from tests.cases import every_value, others_full
from tests.integration.conftest import before_updates
from tests.integration.training import EXACT, assert_equal, assert_same_weights, offload, run, train
from tests.models import Block, Task, TinyTransformer

IGNORE, AFTER = {"on_overflow": "ignore"}, {"overlap_step": False}
ERROR = {"on_overflow": "error"}
STAYS = {"stream_weights": False, **AFTER}
slow_updates = pytest.mark.usefixtures("slow_updates")
pytestmark = pytest.mark.usefixtures("late_copies")


FORMS = {"fp32": {}, "split": {}, "separate": {"master": "fp32"}, "8bit": {"state": "8bit"}}
"""Of masters and state: weights are bfloat16 but in the first."""


def fit(options, *, make_model=TinyTransformer, task=Task, steps=4, form=None, **given):
    if form is not None:
        options = {**FORMS[form], **options}
        given["precision"] = "32-true" if form == "fp32" else "bf16-true"
    return run(options, lambda: task(make_model()), steps, **given)


def assert_same(one, other):
    """Losses, weights and the state of the first optimizer are equal, bit for bit."""
    assert one[0].losses == other[0].losses and len(set(one[0].losses)) > 1
    assert_same_weights(one[0].cpu(), other[0].cpu())
    ours, others = (trainer.optimizers[0].state_dict()["state"] for _, trainer in (one, other))
    torch.testing.assert_close(ours, others, rtol=0, atol=0, check_device=False)


def on_the_cpu(monkeypatch):
    """Ask for both there, too."""
    monkeypatch.setattr(training_device, "current", training_device.CPU)
    monkeypatch.setenv("LIGHTNING_CXL_STREAM_WEIGHTS", "true")
    monkeypatch.setenv("LIGHTNING_CXL_OVERLAP_STEP", "true")


CASES = [
    ("fp32", 1, {"make_model": partial(TinyTransformer, twice=True)}),
    ("fp32", 1, {"where": on_the_cpu}),
    ("fp32", 1, {"gradient_clip_val": 0.3}),
    ("split", 3, {}),
    ("split", 3, {"where": on_the_cpu}),
    ("separate", 1, {}),
    ("8bit", 3, {}),
]


@slow_updates
@pytest.mark.every_case
@pytest.mark.parametrize(("form", "accumulate", "more"), others_full(CASES, CASES[:3]))
def test_is_the_plain_schedule(monkeypatch, form, accumulate, more):
    """With updates behind the next forward, and with updates behind the backward."""
    given = {"form": form, "accumulate_grad_batches": accumulate, **more}
    given.pop("where", lambda _: None)(monkeypatch)
    plain = fit(AFTER, **given)
    for options in ({}, IGNORE, ERROR):
        assert_same(fit(options, **given), plain)


def test_an_update_does_not_write_what_was_fetched_when_the_one_before_ended(monkeypatch):
    """The step is slow to start updates: the end of one fetches units ahead, whose own updates start then."""
    training_device.make_late("to the device, much")
    start = updates.Updates.start

    def slow(*arguments):
        time.sleep(0.004)
        start(*arguments)

    monkeypatch.setattr(updates.Updates, "start", slow)
    assert_same(fit({}), fit(AFTER))


class Reorders(TinyTransformer):
    """Its blocks come in an order that changes with every call: what is fetched ahead is a wrong guess."""

    def __init__(self, order, **shape):
        super().__init__(**shape)
        self.order, self.num_calls = order, 0

    def forward(self, tokens):
        self.num_calls += 1
        x = self.embed(tokens)
        for index in self.order(self.num_calls):
            x = self.blocks[index](x, scale=0.5)
        return self.head(self.norm(x))


@slow_updates
@pytest.mark.parametrize("options", [EXACT, {}], ids=["torch AdamW", "CPUAdam"])
def test_a_step_does_not_write_what_is_being_fetched(options):
    training_device.make_late("to the device, much")
    rotates = partial(Reorders, lambda call: [(call + index) % 6 for index in range(6)], depth=6)
    plain = fit("auto" if options is EXACT else AFTER, make_model=rotates)
    assert_same(fit(options, make_model=rotates), plain)


@slow_updates
def test_a_skipped_block_whose_update_is_late(monkeypatch):
    updating = updates.Updates._updating

    def late(*arguments):
        job = updating(*arguments)
        return lambda: (time.sleep(0.05), job())

    monkeypatch.setattr(updates.Updates, "_updating", late)
    skips = partial(Reorders, lambda call: range(call % 2, 3))
    assert_same(fit(IGNORE, make_model=skips), fit({**IGNORE, **STAYS}, make_model=skips))


# -- what users read and write between steps ---------------------------------------------------------------------------
# Writes to weights that stream, which are their own masters; others are written back by the next step.


class Looks(Callback):
    """Reads the model in every way, one after the other, between the steps; then what it holds past all modules."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, module):
        self.held = [module.model.head.weight, module.model.embed.weight, module.model.norm.weight]

    def on_train_batch_end(self, trainer, module, *_):
        ways = self.ways(trainer, module.model, module.model.blocks[1], self.held)
        self.seen.append(ways[len(self.seen) % len(ways)]().item())

    def on_train_end(self, *_):
        del self.held

    def ways(self, trainer, model, block, held):
        assert all(type(each).__name__ == "Parameter" and each.is_leaf for each in held)
        return [
            lambda: block.mlp[0].weight.norm(),
            lambda: sum(p.double().sum() for p in model.parameters()),
            lambda: model.state_dict()["blocks.2.qkv.weight"].sum(),
            lambda: copy.deepcopy(model).blocks[0].out.weight.sum(),
            lambda: dict(block.norm1._parameters)["weight"].sum(),
            lambda: sum(entry["exp_avg"].sum().double() for entry in trainer.optimizers[0].state.values()),
            lambda: held[0].double().norm(),
            lambda: held[0].data.double().sum(),
            lambda: sum(torch._foreach_norm([each.detach() for each in held])),
            lambda: sum(torch._foreach_norm(held)),
            lambda: copy.deepcopy(held)[1].sum(),
            lambda: torch.nn.functional.embedding(torch.tensor([3], device=held[1].device), held[1]).sum(),
        ]


def assert_looks_alike(options, make=Looks, **given):
    ours, plain = make(), make()
    for looks, how in ((ours, options), (plain, AFTER)):
        fit(how, callbacks=[looks], steps=13, **given)
    assert ours.seen == plain.seen and len(set(plain.seen)) > len(plain.seen) // 2


@slow_updates
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("form", "options"),
    others_full([("fp32", IGNORE), ("separate", {}), ("fp32", {}), ("separate", IGNORE)], [("fp32", IGNORE)]),
)
def test_whoever_looks_at_weights_or_holds_them_sees_the_new_values(form, options):
    assert_looks_alike(options, form=form)


def test_an_update_that_begins_after_the_weights_were_read_is_awaited(monkeypatch):
    reads = threading.Event()

    class LooksBefore(Looks):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            self.before = sum(p.sum().item() for p in module.parameters())
            reads.clear()

        def on_train_batch_end(self, *arguments):
            reads.set()
            super().on_train_batch_end(*arguments)

    before_updates(monkeypatch, lambda: (reads.wait(10), time.sleep(0.02)))
    assert_looks_alike({}, LooksBefore)


class KeepsAlias(Task):
    """Reads, and writes to, other tensors over the memory of weights that stay on the device."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.aliases = [self.model.norm.weight.data, self.model.norm.bias.detach()]
        for alias in self.aliases:
            self.record(alias.clamp_(-1, 1).double().sum())

    def on_train_end(self):
        del self.aliases


@slow_updates
@pytest.mark.parametrize("options", [{}, IGNORE])
def test_another_tensor_over_a_weight_that_stays_on_the_device_is_never_late(options):
    assert_same(fit(options, task=KeepsAlias), fit(AFTER, task=KeepsAlias))


@pytest.mark.parametrize(("part", "options"), every_value(["norm", "head"], [{}, AFTER]))
def test_a_graph_of_before_a_step_is_refused_while_updates_run(gate, part, options):
    class GoesBackLater(Task):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            x = torch.randn(2, self.model.head.in_features, device=self.device, requires_grad=True)
            later = getattr(self.model, part)(x).square().mean()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
            try:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    self.manual_backward(later)
            finally:
                gate.is_open.set()

    fit(options, task=GoesBackLater, steps=1)


@slow_updates
@pytest.mark.parametrize("options", [{}, IGNORE])
def test_few_groups_are_staged_where_units_wait_for_their_update(monkeypatch, options):
    alive, most = [0], []
    add, take = GradientOffload._accumulate, HostWorker.accumulate

    def added(self, group):
        add(self, group)
        alive[0] -= group.is_staged

    def taken(self, group):
        alive[0] += group.is_staged
        most.append(alive[0])
        take(self, group)

    monkeypatch.setattr(GradientOffload, "_accumulate", added)
    monkeypatch.setattr(HostWorker, "accumulate", taken)
    fit(options, make_model=lambda: TinyTransformer(depth=8, dropout=0.0), accumulate_grad_batches=2, steps=2)
    assert 0 < max(most) <= MAX_STAGED + 1


@slow_updates
@pytest.mark.parametrize(("form", "count", "accumulate"), [("fp32", 1, 1), ("8bit", 2, 2), ("split", 3, 1)])
def test_units_that_stay_on_the_device_are_not_copied_and_train_the_same(form, count, accumulate):
    def trained(**options):
        return fit(options, form=form, accumulate_grad_batches=accumulate)

    plain = trained(**AFTER)
    nbytes, num_left = plain[1].strategy.report()["streamed"]["host_bytes"], 3 - count
    for options in ({}, IGNORE, AFTER):
        found = trained(units_on_device=count, **options)
        assert_same(found, plain)
        streamed = found[1].strategy.report()["streamed"]
        assert streamed.get("num_units", 0) == num_left and streamed.get("host_bytes", 0) == nbytes * num_left // 3


class Clamps(Task):
    """Writes to weights of blocks that it finds in groups of the optimizer, where masters may be, too."""

    @torch.no_grad()
    def on_train_batch_end(self, *_):
        in_groups = {p for group in self.optimizers().param_groups for p in group["params"]}
        for parameter in in_groups.intersection(self.model.blocks.parameters()):
            parameter.clamp_(-0.05, 0.05)


class ByReference(Task):
    """Leaves no trace: neither a look nor a new version."""

    def on_train_start(self):
        self.held = [list(block.parameters()) for block in self.model.blocks]

    def on_train_batch_end(self, *_):
        torch.accelerator.synchronize()  # nobody else sees to it that no copy is under way
        for parameter in self.held[0]:
            parameter.data.mul_(0.9)
        for parameter in self.held[1]:
            parameter.data = parameter.data * 0.9


@slow_updates
@pytest.mark.every_case
@pytest.mark.parametrize(("task", "accumulate", "behind"), [(Clamps, 1, [{}, IGNORE]), (ByReference, 2, [])])
def test_writes_between_steps_count(task, accumulate, behind):
    """With micro-batches also where no step makes copies old."""
    given = {"task": task, "accumulate_grad_batches": accumulate}
    assert_same(fit(EXACT, **given), fit("auto", **given))
    for options in behind:
        assert_same(fit(options, **given), fit(AFTER, **given))


class KeepsGradients(Task):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2:
            optimizer.zero_grad()


def test_gradients_of_the_step_before_are_there_where_the_module_zeroes_them():
    for options in ({}, IGNORE):
        assert_same(fit(options, task=KeepsGradients), fit(AFTER, task=KeepsGradients))


class ChangesRate(Task):
    def training_step(self, batch, batch_idx):
        group = self.optimizers().param_groups[0]
        if batch_idx == 0:  # the gradient of this weight comes last
            self.model.embed.weight.register_hook(lambda grad: group.update(lr=group["lr"] / 2))
        return super().training_step(batch, batch_idx)


def test_a_rate_that_changes_in_the_backward_counts_or_is_refused():
    assert_same(fit({}, task=ChangesRate), fit(AFTER, task=ChangesRate))
    with pytest.raises(UnsupportedError, match="changed while updates ran behind the backward"):
        fit(IGNORE, task=ChangesRate)


class Manual(Task):
    """Two micro-batches a step, by hand; keeps copies of the gradients of the blocks after each, and where they are."""

    automatic_optimization = False

    def __init__(self, model):
        super().__init__(model, scheduler=False)
        self.seen, self.places = [], set()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.record(loss)
        self.manual_backward(loss)
        grads = {name: p.grad for name, p in self.model.blocks.named_parameters()}
        self.places |= {grad.device.type for grad in grads.values()}
        self.seen.append({name: grad.cpu().clone() for name, grad in grads.items()})
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class AsksForInputs(Task):
    """`torch.autograd.grad` recomputes the units of a step that adds micro-batches up, before its last backward."""

    def loss(self, batch):
        inputs = []
        handle = self.model.embed.register_forward_hook(lambda module, args, output: inputs.append(output))
        loss = super().loss(batch)
        handle.remove()
        (grad,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        self.record(grad.norm())
        return loss


@slow_updates
def test_updates_wait_for_the_last_micro_batch():
    arguments = {"task": AsksForInputs, "accumulate_grad_batches": 2}
    assert_same(fit(IGNORE, **arguments), fit(AFTER, **arguments))


def triple(parameter):
    parameter.grad.mul_(3)


class Hooked(Manual):
    """Puts a hook on before the run, and another one in it."""

    def __init__(self, model):
        super().__init__(model)
        self.model.blocks[1].qkv.weight.register_post_accumulate_grad_hook(triple)

    def training_step(self, batch, batch_idx):  # one micro-batch a step: hooks find no sum in `p.grad` where it streams
        if len(self.seen) == 1:
            self.model.blocks[1].out.weight.register_post_accumulate_grad_hook(triple)
        super().training_step(batch, 1)


@pytest.mark.every_case
@pytest.mark.parametrize("task", [Manual, Hooked])
def test_gradients_are_those_of_the_plain_run_when_backward_returns(task):
    plain, ours = (fit(options, task=task, steps=3)[0] for options in ("auto", EXACT))
    assert ours.losses == plain.losses and len(ours.seen) == len(plain.seen) == (3 if task is Hooked else 6)
    assert_equal(ours.seen, plain.seen)
    assert ours.places == {"cpu"}


class SumsHooked(Hooked):
    def training_step(self, batch, batch_idx):
        Manual.training_step(self, batch, 0)


def test_a_hook_that_would_find_one_gradient_of_a_sum_is_an_error():
    with pytest.raises(UnsupportedError, match=r"register_post_accumulate_grad_hook.*`model\.blocks\.1\.qkv\.weight`"):
        fit({**EXACT, "stream_weights": True}, task=SumsHooked, steps=2)


class Appends(Block):
    def __init__(self, there):
        super().__init__(32, 0.1)
        self.router, self.there = nn.Linear(32, 4), there

    def forward(self, x, collected):
        shares = self.router(x).softmax(-1)
        collected["losses"].append(shares.square().mean().to(self.there))
        collected["states"].append(super().forward(x) * shares[..., :1])
        return collected["states"][-1]


class Collects(TinyTransformer):
    """Every block appends a loss and its result to lists that the model reads: more blocks than slots."""

    def __init__(self, there):
        super().__init__(depth=0)
        self.blocks.extend(Appends(there) for _ in range(6))

    def forward(self, tokens):
        x = self.embed(tokens)
        collected = {"losses": [], "states": [x]}
        for block in self.blocks:
            x = block(x, collected)
        assert len(collected["losses"]) == 6 and len(collected["states"]) == 7
        self.losses = collected["losses"]
        return self.head(self.norm(sum(collected["states"])))


class AddsLosses(Task):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss + sum(self.model.losses).to(loss.device)


@slow_updates
@pytest.mark.every_case
@pytest.mark.parametrize("late", ["copies and kernels"], indirect=True)
@pytest.mark.parametrize("there", [None, "cpu"])  # autograd runs what is on the CPU in another thread
def test_losses_that_blocks_append_to_a_list_of_the_model(late, there):
    given = {"make_model": lambda: Collects(there), "task": AddsLosses, "steps": 3}
    assert_same(fit(EXACT, **given), fit("auto", **given))
    for options in ({}, IGNORE):
        assert_same(fit(options, **given), fit(AFTER, **given))


@slow_updates
def test_a_second_optimizer_over_the_same_weights():
    class Two(Task):
        automatic_optimization = False

        def configure_optimizers(self):
            own = list(self.model.blocks.parameters())
            return [torch.optim.AdamW(own, lr=1e-2), torch.optim.SGD(own, lr=1e-1, weight_decay=0.1)]

        def training_step(self, batch, batch_idx):
            first, other = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            first.step()
            other.step()
            first.zero_grad()

    assert_same(fit({}, task=Two), fit(AFTER, task=Two))


class LeavesSomeOut(Task):
    def configure_optimizers(self):
        return torch.optim.AdamW([p for name, p in self.model.named_parameters() if "qkv" not in name], lr=1e-3)


def test_a_gradient_that_no_optimizer_waits_for_is_refused():
    module = LeavesSomeOut(TinyTransformer())
    with pytest.raises(UnsupportedError, match=r"blocks.2`: no optimizer has `qkv.weight`, `qkv.bias`, which"):
        run({}, module, 2)
    assert all(p.device.type == "cpu" and p.grad is None for p in module.model.blocks[2].qkv.parameters())
    assert_same(fit({**EXACT, **STAYS}, task=LeavesSomeOut), fit("auto", task=LeavesSomeOut))


# -- memory of the device and of the host ------------------------------------------------------------------------------

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


KINDS = {"behind the forward": ({}, Task), "behind the backward": (IGNORE, Task), "autocast": ({}, Casts)}


@pytest.mark.usefixtures("device_apart")
@pytest.mark.parametrize(("late", "kind"), every_value(["copies and kernels", "kernels", "copies"], KINDS))
def test_the_peak_does_not_grow_with_the_number_of_units(late, kind):
    options, task = KINDS[kind]
    training_device.make_late(late)  # else how far the host runs ahead, as far as it may or less, is chance
    few, many = peaks(6, options, task), peaks(18, options, task)
    assert many == pytest.approx(few, abs=ROUND)


# -- really behind -----------------------------------------------------------------------------------------------------


def test_a_step_returns_while_its_updates_run(gate):
    were_open = []

    def opens(*_):
        were_open.append(gate.is_open.is_set())
        gate.is_open.set()

    fit({}, callbacks=[LambdaCallback(on_train_batch_end=opens)], steps=1)
    assert were_open == [False] and gate.num_waiting == 6, "three blocks, embedding, norm, head"


@pytest.mark.parametrize("options", [IGNORE, ERROR], ids=str)
def test_updates_run_behind_the_backward(gate, options):
    class Opens(TinyTransformer):
        def forward(self, tokens):
            x = super().forward(tokens)
            self.embed.weight.register_hook(self.at_the_end) if self.training else None
            return x

        def at_the_end(self, grad):
            """Runs when the gradient of the embedding is there, the last of all."""
            gate.open_when_one_waits()

    fit(options, make_model=Opens, steps=1)
    assert gate.is_open.is_set() and gate.num_waiting >= 3


class BreaksInBlockOne(Task):
    """In its third step a gradient that is not a number reaches the output of block 1, and all that is before it."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.before = {name: value.cpu().clone() for name, value in self.state_dict().items()}
            breaks = self.model.blocks[1].register_forward_hook(
                lambda _module, _inputs, output: output.register_hook(lambda grad: grad * torch.nan) and None
            )
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            breaks.remove()
        return loss


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_gradient_behind_the_backward_ends_the_run_and_reaches_no_weight(tmp_path, form):
    """A checkpoint of the exception does not hide it."""
    given = {"callbacks": [ModelCheckpoint(tmp_path, save_on_exception=True)], "enable_checkpointing": True}
    task = BreaksInBlockOne(TinyTransformer())
    with pytest.raises(GradientOverflowError, match=r"`model\.blocks\.1\..*go on from a checkpoint"):
        fit(ERROR, task=lambda _: task, steps=5, form=form, **given)
    after = {name: value.cpu() for name, value in task.state_dict().items()}
    changed = {
        name.split(".")[2] for name in after if not torch.equal(after[name], task.before[name]) if "blocks" in name
    }
    assert changed == {"2"}, "its backward was over before"
    assert all(value.isfinite().all() for value in after.values())


def test_a_bad_gradient_that_is_seen_after_other_updates_ends_the_run():
    """That of a unit that ran twice is left to the end of the backward."""
    task = BreaksInBlockOne(TinyTransformer(twice=True))
    with pytest.raises(GradientOverflowError, match="in the middle of a step of AdamW that has changed weights"):
        run(ERROR, task, 5)


@pytest.mark.every_case
@pytest.mark.parametrize("of_every_optimizer", [False, True])
def test_hooks_around_the_step_see_new_weights(monkeypatch, of_every_optimizer):
    """A hook of the optimizer itself takes the overlap away."""
    seen = []

    def sees(optimizer, *_):
        seen.append(optimizer.param_groups[0]["params"][3].sum().item())

    class HooksItsStep(Task):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            made["optimizer"].register_step_post_hook(sees)
            return made

    if of_every_optimizer:
        handle = register_optimizer_step_post_hook(sees)
        try:
            ours = fit({})
        finally:
            handle.remove()
    else:
        monkeypatch.setattr(updates.Updates, "start", lambda *_: pytest.fail("an update ran behind"))
        ours = fit(IGNORE, task=HooksItsStep)
    assert len(set(seen)) == 4
    assert_same(ours, fit(AFTER))


def test_an_overlap_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="overlap_step=True needs stream_weights"):
        offload(overlap_step=True, stream_weights=False)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_error_in_an_update_while_another_one_ends_the_run(monkeypatch, caplog):
    """The first error is raised, the others are logged: raised, they would keep the Trainer from its own teardown."""

    def fails(*_):
        raise MemoryError("no memory for an update")

    def breaks(trainer, module, batch, batch_idx):
        if batch_idx == 2:
            monkeypatch.setattr(AdamStep, "apply", fails)

    with caplog.at_level("WARNING"), pytest.raises(MemoryError, match="no memory for an update"):
        fit(IGNORE, callbacks=[LambdaCallback(on_train_batch_start=breaks)])
    assert "was not the only one" in caplog.text


def test_an_error_of_an_update_in_the_backward_is_raised_by_the_step(monkeypatch):
    """Of a weight of a module that contains blocks: no forward waits for it."""
    apply, threads = AdamStep.apply, []

    def fails(step, work, scale):
        if [each.parameter.dim() for each in work] == [0]:
            threads.append(threading.current_thread())
            if len(threads) == 3:
                raise MemoryError("no memory for an update")
        apply(step, work, scale)

    monkeypatch.setattr(AdamStep, "apply", fails)
    with pytest.raises(MemoryError, match="no memory for an update"):
        fit(IGNORE, make_model=partial(TinyTransformer, scalars=True))
    assert len(threads) == 3 and threading.main_thread() not in threads


@slow_updates
def test_the_real_error_of_a_gradient_is_raised(monkeypatch):
    accumulate = GradientOffload._accumulate

    def fails(self, group):
        if any("blocks.1" in each.pair.name for each in group.gradients):
            raise RuntimeError("the real reason")
        time.sleep(0.002)
        accumulate(self, group)

    monkeypatch.setattr(GradientOffload, "_accumulate", fails)
    with pytest.raises(RuntimeError, match="the real reason"):
        fit(IGNORE)


class Fails(TinyTransformer):
    def forward(self, tokens):
        out = super().forward(tokens)
        self.blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)  # in the recompute, the last of the backward
        return out


@slow_updates
@pytest.mark.parametrize("options", [{}, IGNORE])
def test_after_an_error_in_a_recompute_weights_are_on_the_host(options):
    module, homes = Task(Fails()), []

    def note(*_):
        homes.append([p.data_ptr() for p in module.model.blocks.parameters()])

    module.on_train_start = note
    with pytest.raises(ZeroDivisionError):
        run(options, module, 2)
    note()
    assert homes[0] == homes[1]
