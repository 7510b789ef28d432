import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices import HostEngine
from lightning_cxl.inventory.dry_run import dry_run
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Mesh, Workload
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.units import find_units
from tests.fakes import RecyclingMemory
from tests.integration.llama import tiny_llama
from tests.models import TinyTransformer

SHAPES = st.lists(st.integers(1, 40), max_size=3).map(lambda shape: torch.empty(shape, device="meta"))
MESHES = st.builds(Mesh, num_devices=st.integers(1, 9), num_machines=st.integers(1, 5), replicates=st.booleans())


@given(SHAPES.filter(lambda parameter: parameter.ndim > 0), MESHES)
def test_a_shard_is_the_longest_of_torch_s_chunks(parameter, mesh):
    assert mesh.shard_numel(parameter) == torch.chunk(parameter, mesh.num_shards)[0].numel()


def test_a_machine_has_its_ranks_shards():
    even, odd = torch.empty(8, 4, device="meta"), torch.empty(3, device="meta")
    shards = Mesh(num_devices=2, num_machines=2)
    assert shards.machine_bytes(128, [even]) == 64
    assert shards.machine_bytes(12, [odd]) == 8  # two ranks of one padded number of four bytes
    assert shards.machine_bytes(140, [even, odd]) == 72
    assert Mesh(num_devices=2, num_machines=2, replicates=True).machine_bytes(128, [even]) == 128
    assert Mesh(num_devices=4).machine_bytes(12, [odd]) == 16
    assert Mesh().machine_bytes(77, [even]) == 77
    assert shards.machine_bytes(5, []) == 5


@pytest.mark.parametrize(
    ("count", "frozen", "streamed"),
    [
        (0, (), "012345"), (1, (), "12345"), (2, (), "1245"), (3, (), "135"), (1, (1, 2, 3), "02345"),
        (4, (1, 2, 3), "45"), (6, (), ""), (9, (5,), ""),
    ],
)  # fmt: skip
def test_units_stay_on_the_device_spread_evenly_and_frozen_ones_first(count, frozen, streamed):
    model = TinyTransformer(depth=6)
    for index in frozen:
        model.blocks[index].requires_grad_(False)
    plan = list_tensors(model, None, OffloadConfig(units_on_device=count), Workload(batch=1, sequence=8))
    assert "".join(unit.name[-1] for unit in plan.streamed) == streamed
    assert plan.overlap == "forward"


MIN_BYTES = 1 << 10


class NumpyBytes:
    """Not from torch's allocator, which is watched."""

    def __init__(self, nbytes):
        self._memory = torch.from_numpy(np.empty(nbytes, np.uint8))

    def tensor(self, shape, dtype):
        count = torch.Size(shape).numel()
        return self._memory[: count * dtype.itemsize].view(dtype).view(shape)


def really_stored(model, tokens):
    """What the engine's own offload has stored when the forward of a real model is over."""
    memory = RecyclingMemory()
    offload = ActivationOffload(HostEngine(), memory.allocate, min_bytes=MIN_BYTES)
    offload.attach(find_units(model), model)
    loss = loss_of(model, tokens)
    stored = memory.live_bytes
    loss.backward()
    offload.detach()
    return stored


def real_peak(model, ids, trace):
    """Most that torch's allocator gave out at once in forward and backward of a real model, says its profiler."""
    offload = ActivationOffload(HostEngine(), lambda nbytes, unit: NumpyBytes(nbytes), min_bytes=MIN_BYTES)
    offload.attach(find_units(model), model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    for is_watched in (False, True):  # what libraries allocate once is not the model's
        with profile(activities=[ProfilerActivity.CPU], profile_memory=is_watched) as profiler:
            model(input_ids=ids, labels=ids).loss.backward()
    offload.detach()
    profiler.export_chrome_trace(str(trace))
    events = [each for each in json.loads(trace.read_text())["traceEvents"] if each.get("name") == "[memory]"]
    sizes = [each["args"]["Bytes"] for each in sorted(events, key=lambda each: each["ts"])]
    return max(itertools.accumulate(sizes))


@pytest.fixture(scope="module")
def child():
    """A process of its own: oneDNN reads once a process which instructions it may use."""
    with pytest.MonkeyPatch.context() as patch:
        # it packs bfloat16 matrices into memory of its own on some processors: not here
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as child:
            yield child


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "vocab"), [(torch.float32, 512), (torch.bfloat16, 512), (torch.bfloat16, 4096)])
@pytest.mark.full
def test_peak_is_what_torch_really_gives_out(tmp_path, child, dtype, vocab):
    model = tiny_llama(4, vocab_size=vocab, hidden_size=256, intermediate_size=768).to(dtype)
    ids = torch.zeros(1, 192, dtype=torch.long)
    real = child.submit(real_peak, model, ids, tmp_path / "trace.json").result()
    model.to("meta")
    ids = ids.to("meta")
    run = dry(model, lambda: model(input_ids=ids, labels=ids, use_cache=True).loss, computes_on_host=True)
    assert run.device_peak_bytes == pytest.approx(real, rel=0.03)


def dry(model, compute_loss, **options):
    return dry_run(model, find_units(model), Workload(batch=1, sequence=1, **options), compute_loss, MIN_BYTES)


def loss_of(model, tokens):
    output = model(tokens)
    return (output if isinstance(output, torch.Tensor) else output.logits).sum()


def test_products_of_experts_are_counted():
    x, offsets = torch.empty(24, 16, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
    weights = torch.empty(4, 16, 8, device="meta")
    layer = torch.nn.ParameterList([weights.bfloat16()])
    x = x.bfloat16().requires_grad_()
    run = dry(
        layer, lambda: torch.nn.functional.grouped_mm(x, layer[0], offs=offsets).tanh().sum(), computes_on_host=False
    )
    products = 2 * 24 * 16 * 8
    assert (run.forward_flops, run.backward_flops) == (products, 2 * products)


@pytest.mark.parametrize("length", [12, 40, 200])
@pytest.mark.parametrize(
    "make", [TinyTransformer, lambda: TinyTransformer(twice=True), tiny_llama], ids=["tiny", "one unit twice", "llama"]
)
def test_stores_what_a_real_run_stores(make, length):
    model, tokens = make(), torch.zeros(2, length, dtype=torch.long)
    expected = really_stored(model, tokens)
    assert expected > 0
    model.to("meta").train()
    assert sum(dry(model, lambda: loss_of(model, tokens.to("meta"))).stored_bytes.values()) == expected
