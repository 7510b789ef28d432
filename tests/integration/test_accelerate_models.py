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
    assert_identical,
    forget_accelerators,
    loss_of,
    make_accelerator,
    prepared,
    steps,
    train,
    weights_of,
)
from tests.integration.test_unclosed import collect
from tests.models import TinyTransformer, token_data

pytestmark = [
    # torch's compiler looks for gradients of what units are called with
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
]
STREAMED = {"stream_weights": True, **EXACT}


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
