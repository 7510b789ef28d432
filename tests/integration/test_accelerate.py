"""Accelerate: what it has of its own, beside the contract of front ends."""

import copy
import importlib

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import LlamaForCausalLM

import lightning_cxl
from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.errors import ConfigError, LightningCXLWarning, UnsupportedError
from tests.cases import every_value
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
from tests.integration.llama import tiny_llama
from tests.models import TinyTransformer, token_data

pytestmark = [
    # torch's compiler looks for gradients of what units are called with
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]
STREAMED = {"stream_weights": True, **EXACT}


def compare(run, check=assert_identical, **options):
    """Run with theirs and with ours; `run` returns (losses, weights)."""
    plain = run(make_accelerator())
    accelerator = make_accelerator({**STREAMED, **options})
    ours = run(accelerator)
    accelerator.free_memory()
    check(plain, ours)
    return accelerator


@pytest.mark.parametrize("order", ["model first", "one by one", "optimizer first"])
def test_objects_prepared_apart(order):
    def run(accelerator):
        model, optimizer = made()
        data = accelerator.prepare(token_data(4))
        if order == "model first":
            model, optimizer = accelerator.prepare(model), accelerator.prepare(optimizer)
        elif order == "one by one":
            model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
        else:
            optimizer, model = accelerator.prepare(optimizer, model)
        return trained(accelerator, model, optimizer, data)

    compare(run)


@pytest.mark.parametrize(
    ("when", "is_prepared", "options"),
    every_value(["before", "after"], [True, False], [{}, {"cpu_adam": True}]),
    ids=str,
)
def test_a_scheduler(when, is_prepared, options, tmp_path):
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

    compare(run, assert_close, **options)


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
    model, optimizer = made(lambda: TinyTransformer(depth=5, dropout=0.0))
    model, optimizer, data = accelerator.prepare(model, optimizer, token_data(4))
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

    accelerator = compare(run)
    assert len(accelerator.report()["optimizers"]) == 2


@pytest.mark.parametrize("options", [{}, {"cpu_adam": True}], ids=["torch", "CPUAdam"])
def test_the_same_objects_again_after_free_memory(options):
    def run(accelerator):
        model, optimizer = made()
        scheduler = warm(optimizer)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, token_data(2), scheduler)
        losses, _ = trained(accelerator, model, optimizer, data, scheduler)
        accelerator.free_memory()
        given = optimizer
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
        assert optimizer is given, "who keeps it steps the optimizer that is in use"
        more, weights = trained(accelerator, model, optimizer, data, scheduler)
        return [*losses, *more, scheduler.get_last_lr()[0]], weights

    compare(run, assert_close, **options)


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

    compare(run)


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


# -- what is refused


def two_models(accelerator):
    generator, critic, *_ = adversaries()
    accelerator.prepare(generator, critic, torch.optim.AdamW([*generator.parameters(), *critic.parameters()]))


def without_its_model(accelerator):
    accelerator.prepare(adamw(TinyTransformer()))


def a_second_one_later(accelerator):
    model = TinyTransformer()
    second = torch.optim.AdamW(model.head.parameters())
    accelerator.prepare(model, torch.optim.AdamW(model.blocks.parameters()))
    accelerator.prepare(second)


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (two_models, "must become one for each model"),
        (without_its_model, "the model of this AdamW was not prepared"),
        (a_second_one_later, "all its optimizers belong in one call"),
    ],
)
def test_optimizers_that_are_refused(prepare, text):
    accelerator = make_accelerator({})
    with pytest.raises((ConfigError, UnsupportedError), match=text):
        prepare(accelerator)


def test_an_accelerator_that_has_prepared_a_model():
    accelerator = make_accelerator()
    accelerator.prepare(TinyTransformer())
    with pytest.raises(ConfigError, match="before `prepare`"):
        CXLAccelerator.attach(accelerator)


@pytest.mark.parametrize(("kind", "num_processes"), [("NO", 2), ("MULTI_GPU", 2), ("FSDP", 1), ("DEEPSPEED", 1)])
def test_several_processes_and_other_plugins(kind, num_processes):
    accelerator = make_accelerator()
    accelerator.state.distributed_type, accelerator.state.num_processes = DistributedType[kind], num_processes
    with pytest.raises(UnsupportedError, match=f"{num_processes} processes"):
        CXLAccelerator.attach(accelerator)
    forget_accelerators()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_of_transformers_alone(tied, tmp_path):
    accelerator = make_accelerator(STREAMED, mixed_precision="bf16")
    parts = prepared(accelerator, lambda: tiny_llama(tie_word_embeddings=tied))

    def loss_of(model, batch):
        return model(input_ids=batch[0], labels=batch[0]).loss

    list(steps(accelerator, *parts, loss_of=loss_of))
    weights = weights_of(accelerator, parts[0])
    state = {"state_dict": accelerator.get_state_dict(parts[0])}
    for kept, given in ((True, {"save_function": accelerator.save}), (False, state)):
        accelerator.unwrap_model(parts[0], keep_fp32_wrapper=kept).save_pretrained(tmp_path / str(kept), **given)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / str(kept)).state_dict()
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in loaded.items())


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


def test_options_of_the_environment(monkeypatch):
    monkeypatch.setenv("LIGHTNING_CXL_CPU_ADAM", "false")
    accelerator = make_accelerator(None)
    assert accelerator.offload.session.config.cpu_adam is False


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
