"""A dry run counts what can be counted by hand, and stores what a real run stores."""

import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_cxl.config import OffloadConfig
from lightning_cxl.devices import HostEngine
from lightning_cxl.inventory.dry_run import dry_run, estimate
from lightning_cxl.inventory.tensors import Workload
from lightning_cxl.streaming.activations import ActivationOffload
from lightning_cxl.streaming.units import find_units
from tests.fakes import RecyclingMemory
from tests.integration.llama import tiny_llama
from tests.models import TinyTransformer

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
    return dry_run(model, find_units(model), compute_loss, min_bytes=MIN_BYTES, **options)


def loss_of(model, tokens):
    output = model(tokens)
    return (output if isinstance(output, torch.Tensor) else output.logits).sum()


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


def test_an_input_of_several_units_is_stored_once():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "blocks": blocks}).to("meta")

    def compute_loss():
        shared = model["first"](torch.empty(32, 64, device="meta"))
        return sum(block(shared) for block in blocks).sum()

    assert dry(model, compute_loss).stored_bytes == {"blocks.0": 32 * 64 * 4}


def test_peak_and_flops_of_one_layer_by_hand():
    layer = nn.Linear(256, 128, bias=False, device="meta")
    x = torch.empty(64, 256, device="meta")
    run = dry_run(layer, [], lambda: layer(x).sum(), min_bytes=MIN_BYTES)
    assert run.stored_bytes == {}
    assert run.forward_flops == 2 * 64 * 256 * 128
    assert run.backward_flops == run.forward_flops  # no gradient of the input
    # the loss and its gradient are scalars, expanded without memory; the weight's gradient meets only those
    outputs, weight_grad = 64 * 128 * 4, 256 * 128 * 4
    assert max(outputs, weight_grad) <= run.device_peak_bytes <= outputs + weight_grad + 64


def test_attention_keeps_no_score_matrix():
    length, width = 4096, 16
    x = torch.empty(1, 2, length, width, device="meta")
    layer = nn.Linear(width, width, bias=False, device="meta")

    def run(causal):
        def compute_loss():
            scaled = x * layer.weight.sum()
            return nn.functional.scaled_dot_product_attention(scaled, scaled, scaled, is_causal=causal).sum()

        return dry_run(layer, [], compute_loss, min_bytes=MIN_BYTES)

    whole, causal = run(False), run(True)
    assert whole.device_peak_bytes < 2 * length * length * 4 / 10
    assert whole.forward_flops == 2 * 2 * length * length * 2 * width
    assert causal.forward_flops == whole.forward_flops / 2
    assert causal.backward_flops == 2 * causal.forward_flops


@pytest.mark.parametrize("own", [False, True])
def test_autocast_that_the_model_switches_itself(own):
    class Switches(nn.Linear):
        def forward(self, x):
            with torch.autocast(device_type=x.device.type, enabled=own, dtype=torch.bfloat16):
                return super().forward(x)

    layer = Switches(256, 128, bias=False, device="meta")
    x = torch.empty(64, 256, device="meta")
    types = []
    layer.register_forward_hook(lambda *values: types.append(values[-1].dtype))
    for mixed in (False, True):
        assert dry_run(layer, [], lambda: layer(x).float().sum(), min_bytes=MIN_BYTES, mixed=mixed).forward_flops
    assert types == [torch.bfloat16 if own else torch.float32] * 2
    with pytest.raises(RuntimeError):  # torch has it no longer when the dry run is over
        layer(x)


@pytest.mark.parametrize(("chosen", "of"), [("num_experts_per_tok", "num_experts"), ("moe_topk", "n_routed_experts")])
def test_an_estimate_counts_the_experts_that_a_router_chooses(chosen, of):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = SimpleNamespace(**{chosen: 2, of: 8})
            self.embedding = nn.Embedding(16, 4, device="meta")
            self.experts = nn.ParameterDict({"up_proj": nn.Parameter(torch.empty(8, 4, 32, device="meta"))})

    load = Workload(batch=3, sequence=5)
    model = nn.ModuleDict({"model": Routed()})
    run = estimate(model, OffloadConfig(), load, "for a test")
    assert run.forward_flops == 2 * 15 * (16 * 4 + 2 * 4 * 32)
