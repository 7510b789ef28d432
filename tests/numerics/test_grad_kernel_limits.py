"""What the gradient kernels do not need: memory, and indices that fit 32 bits."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from adam_bench.memory import peak_bytes, reset_peak

from lightning_cxl.native import _cpu, _grads
from tests.numerics.big_tensors import PAGE, BigMemory
from tests.numerics.reference import gradients as grad_reference

BF16 = torch.bfloat16
ISAS = _cpu.supported_isas()


def test_measuring_takes_no_memory():
    size = 1 << 26  # 128 MiB, of which a float32 copy would take twice as much
    source = torch.ones(size, dtype=BF16)
    table, results = array("Q", [source.data_ptr(), 0, size, 1, 0, 0]), array("d", [0.0])
    for isa in ISAS:
        _grads.measure(table, results, 2, isa)  # threads have their stacks now
        try:
            reset_peak()
        except OSError:
            pytest.skip("the kernel does not let this process reset its peak")
        before = peak_bytes()
        _grads.measure(table, results, 2, isa)
        assert peak_bytes() - before <= 1 << 20
        assert results[0] == size


@contextmanager
def repeated_zeros(nbytes: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the address of `nbytes` of zeros in little memory, and a page behind them, of its own, as bfloat16."""
    memory = BigMemory(nbytes + PAGE)
    try:
        yield memory.address, memory.window(nbytes, PAGE, BF16)
    finally:
        memory.free()


@pytest.mark.slow
@pytest.mark.full
def test_more_elements_than_32_bits_can_count():
    nbytes = 1 << 33  # 2 ** 32 elements
    with repeated_zeros(nbytes) as (address, behind):
        last = behind[:1001]
        last.copy_(torch.randn(1001))
        size, results = nbytes // 2 + 1001, array("d", [0.0])
        for isa in ISAS:
            _grads.measure(array("Q", [address, 0, size, 1, 0, 0]), results, _cpu.available_threads(), isa)
            assert results[0] == grad_reference.sum_of_squares(last)


@pytest.mark.slow
@pytest.mark.full
def test_random_bits_of_elements_whose_counters_exceed_32_bits():
    """One counter serves two elements: these are the first ones behind 2 ** 33."""
    nbytes, key = 1 << 34, 0x0123456789ABCDEF
    with repeated_zeros(nbytes) as (source_address, source), repeated_zeros(nbytes) as (address, sums):
        source, sums = source[:1001], sums[:1001]
        source.copy_(torch.rand(1001) * 0.01)
        sums.fill_(1.0)
        expected = sums.clone()
        total = grad_reference.accumulate(source, expected, key, first=nbytes // 2)
        wrong = torch.ones_like(sums)
        grad_reference.accumulate(source, wrong, key)
        assert not torch.equal(wrong, expected)
        results = array("d", [0.0])
        row = [source_address, address, nbytes // 2 + 1001, 1, 1, key]
        _grads.accumulate(array("Q", row), results, _cpu.available_threads(), ISAS[-1])
        assert torch.equal(sums, expected)
        assert results[0] == total
