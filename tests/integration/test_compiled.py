"""`torch.compile` on blocks and on models: what the user compiles stays compiled, and nothing of ours is compiled."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from lightning_cxl.errors import UnsupportedError
from tests.integration.training import EXACT, assert_identical, make_trainer, offload, train
from tests.models import Task, TinyTransformer, token_data

# torch's own, when its compiler looks at a block's input
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
DEPTH = 3


class Counting:
    def __init__(self, inner="eager"):
        self.inner = lookup_backend(inner)
        self.num_graphs = self.num_calls = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        compiled = self.inner(graph, inputs)

        def call(*args):
            self.num_calls += 1
            return compiled(*args)

        return call


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled_in_place(model, **options):
    for block in model.blocks:
        block.compile(**options)
    return model


def wrapped(model, count=DEPTH, **options):
    for index, block in enumerate(model.blocks[:count]):
        model.blocks[index] = torch.compile(block, **options)
    return model


first_wrapped = partial(wrapped, count=1)


def run(how, strategy, backend):
    """Train; returns (losses, weights under the names of a model that is not compiled), graphs and calls per step."""
    marks = []

    class Marks(Task):
        def on_train_batch_end(self, *_):
            marks.append((backend.num_graphs, backend.num_calls))

    torch._dynamo.reset()
    losses, state = train(lambda: how(TinyTransformer(depth=DEPTH), backend=backend), strategy, task=Marks, steps=5)
    return losses, {name.replace("_orig_mod.", ""): value for name, value in state.items()}, marks


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch, as it imports inductor
@pytest.mark.parametrize("how", [wrapped, compiled_in_place])
def test_cuda_graphs_of_weights_that_stream_are_refused(how):
    with pytest.raises(
        UnsupportedError, match=r"unit `model.blocks.0` is compiled with CUDA graphs .*stream_weights=False"
    ):
        train(lambda: how(TinyTransformer(depth=DEPTH), mode="reduce-overhead"), offload(**EXACT))


@pytest.mark.parametrize(
    ("how", "inner"),
    [(compiled_in_place, "aot_eager"), (wrapped, "eager"), (torch.compile, "aot_eager"), (first_wrapped, "eager")],
)
def test_units_stay_compiled_and_losses_stay_the_same(how, inner):
    *plain, _ = run(how, "auto", Counting(inner))
    counters.clear()
    backend = Counting(inner)
    *ours, marks = run(how, offload(**EXACT), backend)
    assert_identical(plain, ours)
    num_units = 1 if how is first_wrapped else DEPTH
    # one graph serves all blocks, forward and recompute, in every step, wherever the weights are
    assert marks == [(1, 2 * num_units * (step + 1)) for step in range(5)]
    assert counters["frames"]["ok"] == 1, "a frame that is not a forward of a block was compiled"


def parts_in_place(model, **options):
    for part in (model.embed, model.norm, model.head):
        part.compile(**options)
    return model


@pytest.mark.usefixtures("slow_updates")
@pytest.mark.parametrize("options", [{}, {"on_overflow": "ignore"}], ids=str)
def test_updates_of_what_stays_on_the_device_cause_no_recompile(options):
    plain = run(parts_in_place, offload(overlap_step=False), Counting())
    ours = run(parts_in_place, offload(**options), Counting())
    assert_identical(plain[:2], ours[:2])
    assert ours[2] == plain[2]


class AsksItsWeights(nn.Module):
    """A block whose forward looks at attributes of its weights."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x, *, scale):
        return x + self.linear(x) * self.linear.weight.data.abs().max()


@pytest.mark.parametrize("options", [EXACT, {"master": "fp32"}, {**EXACT, "stream_weights": False}], ids=str)
def test_one_graph_serves_all_blocks_whose_masters_are_separate(options):
    backend, model = Counting("aot_eager"), TinyTransformer(depth=0)
    model.blocks.extend(AsksItsWeights() for _ in range(torch._dynamo.config.recompile_limit + 2))
    compiled_in_place(model, backend=backend, fullgraph=True)
    make_trainer(offload(**options), max_steps=2, precision="bf16-true").fit(Task(model), token_data())
    assert backend.num_graphs == 1


def test_a_run_leaves_nothing_behind():
    model = wrapped(compiled_in_place(TinyTransformer(depth=DEPTH), backend="eager"), backend="eager")
    before = [block.__dict__.get("forward") for block in model.blocks]
    train(lambda: model, offload(), steps=2)
    assert [block.__dict__.get("forward") for block in model.blocks] == before
    assert all("forward" not in block._orig_mod.__dict__ for block in model.blocks)
