"""A dry run counts what can be counted by hand, and stores what a real run stores."""

import itertools
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_cxl.devices import HostEngine
from lightning_cxl.inventory.dry_run import dry_run
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
    return dry_run(model, find_units(model), Workload(batch=1, sequence=1, **options), compute_loss, MIN_BYTES)


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
