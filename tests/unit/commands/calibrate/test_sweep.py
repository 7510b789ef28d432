import pytest
import torch

from lightning_cxl.commands.calibrate import Sweep, read, update
from lightning_cxl.native import _cpu, _membench


def tensors(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_sweep_moves_the_bytes_and_changes_nothing(num_threads):
    group, other = tensors(100_003, 100_003, 50_000), tensors(17)
    before = [tensor.clone() for tensor in (*group, *other)]
    sweep = Sweep([[read(group[0]), update(group[1]), update(group[2])], [update(other[0])]], num_threads)
    sweep()
    assert sweep.isa in _cpu.supported_isas()
    assert all(torch.equal(now, then) for now, then in zip((*group, *other), before, strict=True))


def test_the_fastest_variant_is_taken(monkeypatch):
    """A kernel that advances the clock: the last ISA at one place is the fastest."""
    clock = [0.0]

    def sweep(table, num_threads, isa):
        clock[0] += 1.0 if isa == _cpu.supported_isas()[-1] and len(table) == 4 else 2.0

    monkeypatch.setattr(_membench, "sweep", sweep)
    monkeypatch.setattr("lightning_cxl.commands.calibrate.time.perf_counter", lambda: clock[0])
    sweep = Sweep([[read(tensors(10_000)[0])]], 1)
    assert sweep.isa == _cpu.supported_isas()[-1]
    before = clock[0]
    sweep()
    assert clock[0] == before + 1.0
