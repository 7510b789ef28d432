"""Accelerate, and loops of the user's own: a step, between steps, once more, without a close."""

import copy
import gc
import importlib
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import lightning_cxl
from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.run.checkpoint import entry_of
from tests import training_device
from tests.cases import every_value, others_full
from tests.integration.accelerate_loop import (
    EXACT,
    PLAIN,
    adamw,
    assert_close,
    assert_identical,
    forget_accelerators,
    loss_of,
    made,
    make_accelerator,
    prepared,
    steps,
    trained,
    warm,
    weights_of,
)
from tests.models import TinyTransformer, token_data

pytestmark = [
    # torch's compiler looks for gradients of what units are called with
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
STREAMED = {"stream_weights": True, **EXACT}
OVERLAPPED = {"stream_weights": True, "overlap_step": True}
OPTIONS = [STREAMED, OVERLAPPED]


def compare(run, *options, **arguments):
    """Run with theirs, and with ours with each of these options, `OPTIONS` if none; `run` returns (losses, weights)."""
    plain = run(make_accelerator(**arguments))
    for each in options or OPTIONS:
        accelerator = make_accelerator(each, **arguments)
        try:
            ours = run(accelerator)
        finally:
            accelerator.free_memory()
        (assert_identical if EXACT.items() <= each.items() else assert_close)(plain, ours)
    return accelerator


def without_dropout(depth=3):
    return TinyTransformer(depth=depth, dropout=0.0)


@pytest.mark.parametrize("order", ["model first", "one by one", "optimizer first"])
def test_objects_prepared_apart(order):
    def run(accelerator):
        model, optimizer = made()
        data = accelerator.prepare(token_data(4))
        if order == "optimizer first":
            optimizer, model = accelerator.prepare(optimizer, model)
        elif order == "one by one":
            model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
        else:
            model, optimizer = accelerator.prepare(model), accelerator.prepare(optimizer)
        return trained(accelerator, model, optimizer, data)

    compare(run, STREAMED)


@pytest.mark.parametrize(
    ("when", "is_prepared", "options"), every_value(["before", "after"], [True, False], OPTIONS), ids=str
)
def test_a_scheduler(when, is_prepared, options):
    def run(accelerator):
        model, optimizer = made()
        scheduler = warm(optimizer) if when == "before" else None
        model, optimizer, data = accelerator.prepare(model, optimizer, token_data(3))
        if when == "after":
            scheduler = warm(optimizer)
        if is_prepared:
            scheduler = accelerator.prepare(scheduler)
        losses, _ = trained(accelerator, model, optimizer, data, scheduler)
        rates = [optimizer.param_groups[0]["lr"]]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # makes new groups
        more, weights = trained(accelerator, model, optimizer, data, scheduler)
        rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) == 2
        return losses + more + rates, weights

    compare(run, options)


class Generator(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Discriminator(Generator):
    def __init__(self):
        super().__init__(3)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(super().forward(x))


def test_weights_that_your_code_holds_are_not_overwritten():
    """An average is put in the place of ``p.data`` for an evaluation, and the tensors of before are put back."""
    accelerator = make_accelerator(STREAMED)
    model, optimizer, data = accelerator.prepare(*narrow(5), token_data(4))
    with pytest.raises(UnsupportedError, match="while your code holds"):
        for batch in data:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            backup = {name: p.data for name, p in model.named_parameters()}
            for _, p in model.named_parameters():
                p.data = (0.5 * p.data).clone()
            with torch.no_grad():
                loss_of(model, batch)
            for name, p in model.named_parameters():
                p.data = backup[name]


def adversaries():
    torch.manual_seed(1)
    generator, critic = Generator(), Discriminator()
    return generator, critic, adamw(generator), adamw(critic)


@pytest.mark.parametrize("together", [True, False])
def test_a_generator_against_a_discriminator(together):
    def run(accelerator):
        generator, critic, of_generator, of_critic = adversaries()
        if together:
            generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, of_generator, of_critic)
        else:
            generator, of_generator = accelerator.prepare(generator, of_generator)
            critic, of_critic = accelerator.prepare(critic, of_critic)
        losses = []
        for seed in range(4):
            noise = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).to(accelerator.device)
            of_critic.zero_grad()
            fake = generator(noise)
            loss = nn.functional.softplus(critic(fake.detach())).mean() + nn.functional.softplus(-critic(noise)).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(critic.parameters(), 0.5)
            of_critic.step()
            of_generator.zero_grad()
            loss = nn.functional.softplus(-critic(fake)).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_value_(generator.parameters(), 0.01)
            of_generator.step()
            losses.append(loss.item())
        of = {f"critic.{name}": value for name, value in weights_of(accelerator, critic).items()}
        return losses, weights_of(accelerator, generator) | of

    accelerator = compare(run, STREAMED)
    assert len(accelerator.report()["optimizers"]) == 2


CLIPPED = {
    "generator": lambda model, optimizer: (p for p in model.parameters() if p.dim() > 1),
    "list": lambda model, optimizer: list(model.parameters()),
    "tensor": lambda model, optimizer: model.head.weight,
    "of the optimizer": lambda model, optimizer: [p for group in optimizer.param_groups for p in group["params"]],
    "twice": lambda model, optimizer: [model.head.weight, model.head.weight],
}


@pytest.mark.parametrize("kind", CLIPPED)
def test_what_is_clipped(kind):
    def run(accelerator):
        model, optimizer, data = accelerator.prepare(*made(), token_data(3))
        torch.manual_seed(6)
        found = [1.0]
        for batch in data:
            accelerator.backward(loss_of(model, batch))
            if kind != "tensor":
                found.append(accelerator.clip_grad_norm_(CLIPPED[kind](model, optimizer), 0.3, norm_type=1).item())
            accelerator.clip_grad_value_(CLIPPED[kind](model, optimizer), 0.002)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss_of(model, batch).item())
        return found, weights_of(accelerator, model)

    compare(run, STREAMED)


def test_the_schedule_of_one_optimizer_does_not_wait_for_another():
    """Accelerate leaves a scheduler's step out where its own optimizer's was left out."""
    accelerator = make_accelerator({}, mixed_precision="fp16")
    generator, critic, of_generator, of_critic = adversaries()
    schedules = warm(of_generator), warm(of_critic)
    generator, critic, of_generator, of_critic = accelerator.prepare(generator, critic, of_generator, of_critic)
    schedules = accelerator.prepare(*schedules)
    x = torch.ones(2, 16, device=accelerator.device)
    accelerator.backward(generator(x).mean())
    of_generator.step()
    schedules[0].step()
    accelerator.backward(critic(x).mean() * float("inf"))
    with pytest.warns(LightningCXLWarning, match="left out"):
        of_critic.step()
    schedules[1].step()
    assert (of_generator.step_was_skipped, of_critic.step_was_skipped) == (False, True)
    accelerator.backward(generator(x).mean())
    of_generator.step()
    schedules[0].step()
    assert schedules[0].scheduler.last_epoch == 2 and schedules[1].scheduler.last_epoch == 0


# -- what is refused ---------------------------------------------------------------------------------------------------


def two_models(accelerator):
    generator, critic, *_ = adversaries()
    accelerator.prepare(generator, critic, torch.optim.AdamW([*generator.parameters(), *critic.parameters()]))


def without_its_model(accelerator):
    accelerator.prepare(adamw(TinyTransformer()))


def a_new_one_for_a_model_in_training(accelerator):
    model, _ = accelerator.prepare(*narrow())
    accelerator.prepare(model, adamw(model))


class Headed(nn.Module):
    """A trunk that others may have, too, and a head of its own."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = Generator(3), nn.Linear(16, 2)


def a_part_of_a_model(accelerator):
    """Both would move it and receive its gradients."""
    actor = Headed()
    accelerator.prepare(actor, adamw(actor))
    accelerator.prepare(actor.trunk)


def a_model_that_shares_a_part(accelerator):
    actor, critic = Headed(), Headed()
    critic.trunk = actor.trunk
    accelerator.prepare(actor, adamw(actor))
    accelerator.prepare(critic)


SHARES = r"shares 6 parameters, such as `\S+`, with Headed"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("prepare", "options", "text"),
    [
        (two_models, {}, "must become one for each model"),
        (without_its_model, {}, "the model of this AdamW was not prepared"),
        (a_new_one_for_a_model_in_training, STREAMED, "end that training first"),
        (a_part_of_a_model, STREAMED, SHARES),
        (a_model_that_shares_a_part, {"stream_weights": False}, SHARES),
    ],
)
def test_models_and_optimizers_that_are_refused(prepare, options, text):
    accelerator = make_accelerator(options)
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        prepare(accelerator)
    accelerator.free_memory()


def test_loaded_state_lies_on_its_tier(tmp_path):
    """Torch's own optimizers make new tensors when they load."""
    accelerator = make_accelerator(STREAMED)
    list(steps(accelerator, *prepared(accelerator, data=lambda: token_data(1))))
    accelerator.save_state(str(tmp_path))
    accelerator.free_memory()
    accelerator = make_accelerator(STREAMED)
    _, optimizer, *_ = prepared(accelerator)
    accelerator.load_state(str(tmp_path))
    averages = [state["exp_avg"] for state in optimizer.state.values()]
    assert sum(average.nbytes for average in averages) > 0
    assert all(lightning_cxl.residency(average) == {"dram": average.nbytes} for average in averages)
    assert sum(accelerator.report()["roles"]["momentum"].values()) > 0


def test_a_file_of_options_that_is_no_good(tmp_path):
    path = tmp_path / "options.yaml"
    with pytest.raises(ConfigError, match="cannot read the options"):
        make_accelerator(path)
    for text, message in {
        "- a list": "must map names of options",
        "no_such_option: 1": "unknown option 'no_such_option'",
        "tiers: {": "cannot read the options",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            make_accelerator(path)


@pytest.mark.filterwarnings("ignore:RegressionModel was moved to `cpu`, which ends its run")  # as it does
@pytest.mark.filterwarnings("ignore:RegressionModel gets gradients and was prepared without")  # one half of test_sync
@pytest.mark.every_case
@pytest.mark.parametrize("name", ["test_script", pytest.param("test_sync", marks=pytest.mark.on_cpu)])
def test_a_script_of_accelerates_own_tests(name, monkeypatch, capsys):
    """Its accelerators are ours."""
    forget_accelerators()
    module = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    made = []

    class Ours(CXLAccelerator):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(module, "Accelerator", Ours)
    if name == "test_script":
        monkeypatch.setattr(module, "is_fp16_available", bool)  # Accelerate refuses it on devices unknown to it
    module.main()
    assert any(each.report()["optimizers"] for each in made), "nothing was trained with our accelerator"
    if name == "test_script":
        assert "**Test reinstantiated state**" in capsys.readouterr().out, "its last part"
    for each in made:
        each.free_memory()
    forget_accelerators()


@pytest.mark.parametrize(
    ("is_dropped", "options"),
    [(True, {}), (False, {"stream_weights": True}), (False, {"master": "fp32"})],
    ids=str,
)
def test_gradients_from_before_the_run(options, is_dropped):
    """They can be dropped, and count once: also those of parameters that the step does not use."""
    found, (first, second) = [], token_data(2)
    for offload in (PLAIN, options):
        torch.manual_seed(5)
        model = TinyTransformer(depth=5, dropout=0.0).bfloat16()
        loss_of(model, first).backward()
        model.unused.weight.grad = torch.ones_like(model.unused.weight)
        accelerator = make_accelerator(offload)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if is_dropped:
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, [t.to(accelerator.device) for t in second]))
        found.append([0.0 if p.grad is None else p.grad.float().norm().item() for p in model.parameters()])
        optimizer.step()
        model, optimizer = accelerator.free_memory(model, optimizer)
    assert found[1] == pytest.approx(found[0], rel=0.02, abs=1e-4)


# -- loops of the user's own, with CPUAdam and without: a step ---------------------------------------------------------


def narrow(depth=3):
    return made(partial(without_dropout, depth))


def training(step, depth=3, num_batches=4):
    """Return a run for `compare` that makes these steps: `step` gets all there is and returns a loss."""

    def run(accelerator):
        model, optimizer, data = accelerator.prepare(*narrow(depth), token_data(num_batches))
        losses = [step(accelerator, model, optimizer, batch, at).item() for at, batch in enumerate(data)]
        return losses, weights_of(accelerator, model)

    return run


def one_step(accelerator, model, optimizer, batch, at=0, *, backward=None, **zero):
    """A step; `backward` takes the accelerator and the loss."""
    loss = loss_of(model, batch)
    (backward or (lambda accelerator, loss: accelerator.backward(loss)))(accelerator, loss)
    optimizer.step()
    optimizer.zero_grad(**zero)
    return loss


def batches():
    return [tuple(part.to(training_device.current) for part in batch) for batch in token_data(4)]


def the_same_graph_twice(*parts):
    def twice(accelerator, loss):
        accelerator.backward(loss, retain_graph=True)
        accelerator.backward(loss * 0.5)

    return one_step(*parts, backward=twice)


def penalty_on_gradients(accelerator, model, optimizer, batch, at):
    """Of the embedded tokens, as a part of the graph."""
    embedded = []
    hook = model.embed.register_forward_hook(lambda *args: embedded.append(args[-1]))
    loss = loss_of(model, batch)
    hook.remove()
    (gradient,) = torch.autograd.grad(loss, embedded[0], create_graph=True)
    loss = loss + gradient.square().sum()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def an_error_in_the_forward(accelerator, model, optimizer, batch, at):
    hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batch[0])
    hook.remove()
    return one_step(accelerator, model, optimizer, batch)


def an_error_in_the_backward(accelerator, model, optimizer, batch, at):
    hook = model.blocks[1].out.weight.register_hook(lambda _: 1 / 0)
    loss = loss_of(model, batch)
    with pytest.raises(ZeroDivisionError):
        accelerator.backward(loss)
    hook.remove()
    optimizer.zero_grad()
    return one_step(accelerator, model, optimizer, batch)


def gradients_of_a_part_dropped(accelerator, model, *rest):
    def dropped(accelerator, loss):
        accelerator.backward(loss)
        model.blocks[0].zero_grad()

    return one_step(accelerator, model, *rest, backward=dropped)


def gradients_that_are_kept(accelerator, model, optimizer, batch, at):
    loss = loss_of(model, batch)
    accelerator.backward(loss)
    held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    before = [grad.clone() for grad in held]
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.zero_grad()
    assert len(held) > 30 and all(map(torch.equal, held, before))
    return loss


def a_block_that_is_frozen_for_a_while(accelerator, model, optimizer, batch, at):
    model.blocks[0].requires_grad_(at not in (1, 2))
    return one_step(accelerator, model, optimizer, batch)


STEPS = {
    "an error in the backward": an_error_in_the_backward,
    "a plain backward": lambda *parts: one_step(*parts, backward=lambda accelerator, loss: loss.backward()),
    "the same graph twice": the_same_graph_twice,
    "a penalty on gradients": penalty_on_gradients,
    "an error in the forward": an_error_in_the_forward,
    "gradients that are zeroed": lambda *parts: one_step(*parts, set_to_none=False),
    "gradients of a part dropped": gradients_of_a_part_dropped,
    "gradients that are kept": gradients_that_are_kept,
    "a block that is frozen for a while": a_block_that_is_frozen_for_a_while,
}


@pytest.mark.parametrize("step", STEPS)
def test_a_step(step):
    compare(training(STEPS[step]))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_gradient_with_a_graph_that_leaves_its_parameter_is_refused(options):
    """Whoever adds its norm to the loss would get a loss without it."""
    accelerator = make_accelerator(options)
    model, _ = accelerator.prepare(*narrow(6))
    with pytest.raises(UnsupportedError, match=r"a gradient that is part of a graph .*torch.autograd.grad"):
        loss_of(model, batches()[0]).backward(create_graph=True)


# -- between steps -----------------------------------------------------------------------------------------------------


behind = pytest.mark.skipif(training_device.chosen.type == "cpu", reason="no update runs behind")


CLEARS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, in place": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model, in place": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "each in place": lambda model, optimizer: [p.grad.zero_() for p in model.parameters() if p.grad is not None],
}


@behind
@pytest.mark.usefixtures("slow_updates", "late_copies")
@pytest.mark.every_case
@pytest.mark.parametrize("how", others_full(CLEARS, ["optimizer", "model, in place"]))
def test_gradients_that_are_cleared_while_updates_run(how):
    def run(options):
        accelerator = make_accelerator(options)
        model, optimizer = accelerator.prepare(*narrow())
        losses = []
        for batch in batches():
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            CLEARS[how](model, optimizer)
            losses.append(loss.item())
            held = [p.grad for group in optimizer.param_groups for p in group["params"]]
            assert all(grad is None if how == "optimizer" else grad is None or not grad.any() for grad in held)
        accelerator.free_memory()
        return losses, {name: p.detach().clone() for name, p in model.named_parameters()}

    assert_identical(run({**OVERLAPPED, "overlap_step": False}), run(OVERLAPPED))


@behind
@pytest.mark.usefixtures("late_copies")
def test_gradients_on_their_way_are_cleared_too():
    """Nobody has said that they are read between micro-batches, so they may be on their way."""
    training_device.make_late("to the host, much")

    def run(discards):
        accelerator = make_accelerator({"stream_weights": True})
        accelerator.offload.loop = Loop(accumulates=True, reads_gradients=False, edits_gradients=False)
        model, optimizer = accelerator.prepare(*narrow())
        first, second, *_ = batches()
        if discards:
            accelerator.gradient_state._set_sync_gradients(False)
            accelerator.backward(loss_of(model, first))
            accelerator.gradient_state._set_sync_gradients(True)
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, second))
        optimizer.step()
        accelerator.free_memory()
        return [p.detach().clone() for p in model.parameters()]

    assert all(map(torch.equal, run(discards=False), run(discards=True)))


@behind
@pytest.mark.usefixtures("slow_updates", "late_copies")
def test_a_file_is_made_when_updates_are_done(monkeypatch):
    accelerator = make_accelerator(OVERLAPPED)
    model, optimizer = accelerator.prepare(*narrow())
    accelerator.backward(loss_of(model, batches()[0]))
    optimizer.step()
    units = accelerator.offload.session.runs[0]._streamer._units
    assert any(unit.is_updating() for unit in units)
    found = []

    def noting(*args):
        found.append([unit.is_updating() for unit in units])
        return entry_of(*args)

    monkeypatch.setattr("lightning_cxl.run.user_loop.entry_of", noting)
    optimizer.state_dict()
    assert found == [[False] * 3]


# -- prepared again, and not closed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["the model", "a module around it"])
def test_a_new_training_ends_the_one_that_had_the_model(wrap, caplog):
    def train(accelerator, model):
        optimizer = adamw(model)
        list(steps(accelerator, *accelerator.prepare(model, optimizer, token_data(2), warm(optimizer))))

    held = training_device.held()
    ours = without_dropout()
    plain = copy.deepcopy(ours)
    first, second = make_accelerator(STREAMED), make_accelerator(STREAMED)
    train(first, ours)
    with caplog.at_level("INFO"):
        assert second.prepare(ours) is ours, "it may compute there"
        assert not caplog.records
        train(second, wrap(ours))
    assert "the training that TinyTransformer was part of has ended" in caplog.text
    with pytest.raises(ConfigError, match="no model has been prepared"):
        first.backward(torch.ones(1, requires_grad=True).sum())
    second.free_memory()
    for _ in range(2):
        train(make_accelerator(), plain)
    assert all(map(torch.equal, ours.cpu().parameters(), plain.cpu().parameters()))
    del first, second, ours
    gc.collect()
    assert all(nbytes <= held[where] for where, nbytes in training_device.held().items())


UNCLOSED = """
import os, sys
import torch
from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.run.user_loop import UserLoop
ssd = {"tiers": {"ssd": {"path": sys.argv[1], "budget": "64MiB"}}, "tier_rules": {"*": {"optimizer_state": "ssd"}}}
accelerator = CXLAccelerator(offload=ssd)
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(2, 8)).sum())
optimizer.step()
if os.fork() == 0:
    UserLoop.close = lambda loop: os._exit(3)  # it would wait for threads of its parent
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.on_cpu
def test_a_program_and_its_forked_child_end_without_close(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0"] and not done.stderr
