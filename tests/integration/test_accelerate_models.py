"""Models under our accelerator: tied, compiled, bfloat16, adapters, evaluation; what is left at the end; refusals."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from accelerate.utils import DistributedType

from lightning_cxl.accelerate import CXLAccelerator
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.memory.hook import active
from lightning_cxl.run.session import close_garbage
from tests import training_device
from tests.integration.accelerate_loop import (
    EXACT,
    adamw,
    assert_close,
    assert_identical,
    forget_accelerators,
    loss_of,
    make_accelerator,
    prepared,
    steps,
    train,
    weights_of,
)
from tests.integration.llama import tiny_llama
from tests.integration.test_unclosed import collect
from tests.models import TinyTransformer, token_data

pytestmark = [
    # torch's compiler looks for gradients of what units are called with
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]
STREAMED = {"stream_weights": True, **EXACT}


def bf16(**arguments):
    return TinyTransformer(**arguments).bfloat16()


def compiled(model):
    model.compile(backend="eager")
    return model


MODELS = {
    "tied": lambda: TinyTransformer(tied=True),
    "a block twice": lambda: TinyTransformer(twice=True),
    "compiled in place": lambda: compiled(TinyTransformer(dropout=0.0)),
    "compiled": lambda: torch.compile(TinyTransformer(dropout=0.0), backend="eager"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model(kind):
    parts = {"make_model": MODELS[kind]}
    assert_identical(train(parts=parts, num_batches=4), train(STREAMED, parts=parts, num_batches=4))


def test_a_model_that_accelerate_compiles(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "error_on_recompile", True)
    torch._dynamo.reset()

    def run(accelerator):
        mine = prepared(accelerator, lambda: TinyTransformer(dropout=0.0), data=lambda: token_data(4))
        torch.manual_seed(6)
        losses = list(steps(accelerator, *mine))
        more = accelerator.prepare(token_data(1))  # looks at what is prepared
        losses += list(steps(accelerator, mine[0], mine[1], more, mine[3]))
        return losses, weights_of(accelerator, mine[0])

    plain = run(make_accelerator(dynamo_backend="eager"))
    accelerator = make_accelerator(STREAMED, dynamo_backend="eager")
    torch._dynamo.reset()
    ours = run(accelerator)
    assert len(accelerator.offload.session.runs) == 1
    accelerator.free_memory()
    assert_identical(plain, ours)


def test_adapters_of_peft():
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    def of_llama(model, batch):
        return model(input_ids=batch[0], labels=batch[0]).loss

    parts = {"make_model": adapted}
    assert_identical(
        train(parts=parts, loss_of=of_llama, num_batches=4),
        train(STREAMED, parts=parts, loss_of=of_llama, num_batches=4),
    )


@pytest.mark.parametrize("offload", [{"stream_weights": True}, {"stream_weights": False}, {"master": "fp32"}], ids=str)
def test_a_bfloat16_model_with_masters(offload):
    """Rounds to bfloat16 once, where plain AdamW rounds state, too: not the same, but close to float32's."""
    exact = train(parts={"make_model": TinyTransformer})
    ours = train(offload, parts={"make_model": bf16})
    assert_close(exact, ours, atol=0.05)
    assert len(set(ours[0])) == 8


def test_evaluation_between_steps():
    def run(accelerator):
        model, optimizer, data, scheduler = prepared(accelerator, data=lambda: token_data(2))
        held_out = accelerator.prepare(token_data(2))
        losses = []
        for _ in range(2):
            torch.manual_seed(6)
            losses += steps(accelerator, model, optimizer, data, scheduler)
            model.eval()
            with torch.no_grad():
                losses += [accelerator.gather_for_metrics(loss_of(model, batch)).sum().item() for batch in held_out]
            model.train()
        return losses, weights_of(accelerator, model)

    plain = run(make_accelerator())
    accelerator = make_accelerator(STREAMED)
    ours = run(accelerator)
    accelerator.free_memory()
    assert_identical(plain, ours)


def test_a_model_for_evaluation_alone():
    def run(accelerator):
        torch.manual_seed(5)
        model = accelerator.prepare_model(TinyTransformer().eval(), evaluation_mode=True)
        with torch.no_grad():
            return [loss_of(model, batch).item() for batch in accelerator.prepare(token_data(3))], {}

    plain = run(make_accelerator())
    accelerator = make_accelerator(STREAMED)
    ours = run(accelerator)
    assert accelerator.report()["streamed"]["num_units"] == 3
    accelerator.free_memory()
    assert_identical(plain, ours)


# -- the end


def test_nothing_is_left_after_free_memory():
    before = training_device.held()
    accelerator = make_accelerator({})
    parts = prepared(accelerator, data=lambda: token_data(2))
    list(steps(accelerator, *parts))
    assert training_device.held() != before or training_device.current.type == "cpu"
    model = weakref.ref(parts[0])
    host = weakref.ref(accelerator.offload.session.host)
    optimizer = weakref.ref(parts[1].optimizer)
    assert active() is not None
    parts = accelerator.free_memory(*parts)
    parts = None
    gc.collect()
    assert model() is None and optimizer() is None and host() is None
    assert active() is None
    assert accelerator.offload.session.runs == []
    assert training_device.held() == before, "the accelerator is still there"


def test_nothing_is_left_where_nobody_frees():
    before = training_device.held()
    accelerator = make_accelerator({})
    parts = prepared(accelerator, data=lambda: token_data(2))
    list(steps(accelerator, *parts))
    model = weakref.ref(parts[0])
    del accelerator, parts
    forget_accelerators()
    collect()
    close_garbage()
    gc.collect()
    assert model() is None
    assert active() is None
    assert training_device.held() == before


def test_what_is_trained_is_plain_after_free_memory():
    accelerator = make_accelerator({"stream_weights": True})
    torch.manual_seed(5)
    model = TinyTransformer()
    optimizer = adamw(model)
    data = token_data(2)
    prepared_ = accelerator.prepare(model, optimizer, data)
    for batch in prepared_[2]:
        accelerator.backward(loss_of(prepared_[0], batch))
        prepared_[1].step()
    accelerator.free_memory()
    assert type(optimizer) is torch.optim.AdamW and len(optimizer.state) > 0
    model.cpu()
    before = model.head.weight.clone()
    optimizer.zero_grad()
    loss_of(model, next(iter(data))).backward()
    optimizer.step()
    assert not torch.equal(before, model.head.weight)


def test_a_report():
    accelerator = make_accelerator({"stream_weights": True})
    assert accelerator.report()["state"] == "running"
    parts = prepared(accelerator, data=lambda: token_data(2))
    list(steps(accelerator, *parts))
    report = accelerator.report()
    assert report["num_parameters"] == sum(p.numel() for p in parts[0].parameters())
    assert report["config"]["stream_weights"] == {"value": True, "origin": "argument"}
    assert report["streamed"]["num_units"] == 3 and len(report["optimizers"]) == 1
    accelerator.free_memory()
    assert accelerator.report()["state"] == "finished"
    assert accelerator.report()["num_parameters"] == report["num_parameters"]


def test_copies_are_in_no_run():
    accelerator = make_accelerator({"stream_weights": True})
    parts = prepared(accelerator, data=lambda: token_data(2))
    list(steps(accelerator, *parts))
    weights = weights_of(accelerator, parts[0])
    for average in (copy.deepcopy(parts[0]), pickle.loads(pickle.dumps(parts[0]))):
        average.cpu()
        assert all(torch.equal(value, weights[name]) for name, value in average.state_dict().items())
        loss_of(average, next(iter(token_data(1)))).backward()
    other = pickle.loads(pickle.dumps(accelerator.offload))
    assert other.session.config == accelerator.offload.session.config and other.session.runs == []
    accelerator.free_memory()


# -- what is refused


def test_a_model_is_missing():
    accelerator = make_accelerator({})
    with pytest.raises(ConfigError, match="the model of this AdamW was not prepared"):
        accelerator.prepare(adamw(TinyTransformer()))


def test_a_second_optimizer_comes_too_late():
    accelerator = make_accelerator({})
    model = TinyTransformer()
    first = torch.optim.AdamW(model.blocks.parameters())
    second = torch.optim.AdamW(model.head.parameters())
    model, first = accelerator.prepare(model, first)
    with pytest.raises(UnsupportedError, match="has optimizers already"):
        accelerator.prepare(second)
    accelerator.free_memory()


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
