import os
import traceback

import pytest
import torch
from torch.utils.data import DataLoader

from tests import apart

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_child(work):
    """What `work` raised in a forked child, as text; empty if nothing. Fails when the child dies of something else."""
    read, write = os.pipe()
    if not (child := os.fork()):
        text = ""
        try:
            work()
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return text


def test_a_child_that_computes_on_the_cpu_lives():
    held = [torch.ones(4, device="apart"), torch.ones(4, pin_memory=True), torch.Event(device="apart")]
    held[2].record()
    with apart.paused(torch.accelerator.current_stream()):
        held.append(held[0] * 2)  # the parent's streams are at work

        def work():
            torch.manual_seed(1)
            layer = torch.nn.Linear(4, 4)
            layer(torch.ones(4)).sum()
            held.clear()  # tensors and events of the device die with the child's objects
            torch.ones(4).is_pinned()

        assert in_child(work) == ""
    assert held[3].tolist() == [2, 2, 2, 2]


def test_a_child_that_uses_the_device_gets_an_error():
    held = torch.ones(4, device="apart")
    for use in (
        lambda: torch.ones(4, device="apart"),
        lambda: held * 2,
        held.cpu,
        torch.accelerator.synchronize,
        torch.ones(4).pin_memory,
        lambda: torch.Event(device="apart").record(),
        lambda: apart.host_register(1, 1),
        torch.apart.memory_allocated,
    ):
        assert "Cannot re-initialize apart in forked subprocess" in in_child(use), use


def test_loaders_with_workers_and_pinned_memory():
    loader = DataLoader(torch.arange(8.0), batch_size=2, num_workers=1, pin_memory=True, multiprocessing_context="fork")
    batches = [(batch.is_pinned(), batch.to("apart", non_blocking=True)) for batch in loader]
    torch.accelerator.synchronize()
    assert [pinned for pinned, _ in batches] == [True] * 4
    assert torch.cat([batch for _, batch in batches]).tolist() == list(range(8))
