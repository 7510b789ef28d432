import gc
import weakref

import pytest
import torch
from simulation.engine import SimulatedEngine
from simulation.links import Link, Links

from lightning_cxl.devices import HostEngine, make_engine
from lightning_cxl.errors import UnsupportedError
from tests import training_device

_LINKS = Links(device=Link(2e9, 2e9, 1e-4, duplex=2), tiers={"dram": Link(4e9, 4e9), "cxl": Link(1e9, 0.5e9)})
_SPLIT = {"dram": 0.75, "cxl": 0.25}
_ON_THE_CPU = {"host": HostEngine, "simulated": lambda: SimulatedEngine(_LINKS, lambda address, nbytes: _SPLIT)}


@pytest.fixture(params=[*_ON_THE_CPU, "device, pinned", "device, pageable"])
def sides(request):
    """An engine and two functions that bring values to its host and device side; a device's copies are late."""
    name = request.param
    if name in _ON_THE_CPU:
        engine = _ON_THE_CPU[name]()
        yield engine, torch.Tensor.clone, torch.Tensor.clone
    else:
        device = request.getfixturevalue("on_device")
        training_device.make_late("copies")
        engine = make_engine(device)
        yield engine, torch.Tensor.pin_memory if "pinned" in name else torch.Tensor.clone, lambda t: t.to(device)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_values_survive_the_round_trip(sides, dtype):
    engine, host, device = sides
    values = torch.arange(-3, 9).view(3, 4).to(dtype)
    on_host = host(torch.zeros_like(values))
    engine.d2h(device(values), on_host).wait_host()
    assert torch.equal(on_host, values)
    on_device = device(torch.zeros_like(values))
    engine.h2d(on_host, on_device).wait()
    assert torch.equal(on_device.cpu(), values)


def test_small_empty_and_strided_sources_keep_their_values(sides):
    engine, host, device = sides
    for shape in ((0,), (3, 0), (), (1,)):
        on_host = host(torch.zeros(shape))
        engine.d2h(device(torch.ones(shape)), on_host).wait_host()
        assert torch.equal(on_host, torch.ones(shape))
    values = torch.randn(4, 6)
    on_host = host(torch.zeros(6, 4))
    engine.d2h(device(values).t(), on_host).wait_host()
    assert torch.equal(on_host, values.t())


def test_the_source_may_change_after_wait_and_be_dropped_at_once(sides):
    engine, host, device = sides
    on_host = host(torch.zeros(1000))
    source = device(torch.ones(1000))
    transfer = engine.d2h(source, on_host)
    transfer.wait()
    source.fill_(7.0)
    transfer.wait_host()
    assert torch.equal(on_host, torch.ones(1000))
    transfer = engine.d2h(device(torch.full((1000,), 2.0)), on_host)
    device(torch.full((1000,), 3.0))  # would take over the memory of the dropped source
    transfer.wait_host()
    assert torch.equal(on_host, torch.full((1000,), 2.0))


def test_a_copy_starts_after_the_work_queued_before_it(sides):
    engine, host, device = sides
    matrix = device(torch.randn(256, 256))
    product = matrix
    for _ in range(20):
        product = torch.tanh(product @ matrix)
    on_host = host(torch.zeros(256, 256))
    engine.d2h(product, on_host).wait_host()
    assert torch.equal(on_host, product.cpu())


def test_several_copies_in_flight_arrive_each_in_its_place(sides):
    engine, host, device = sides
    hosts = [host(torch.zeros(100)) for _ in range(8)]
    transfers = [engine.d2h(device(torch.full((100,), float(i))), one) for i, one in enumerate(hosts)]
    for i in (5, 0, 7, 1, 6, 2, 4, 3):
        transfers[i].wait_host()
        assert torch.equal(hosts[i], torch.full((100,), float(i)))


def test_after_holds_between_the_directions_and_along_a_chain(sides):
    engine, host, device = sides
    values = torch.randn(1000)
    hosts = [host(torch.zeros(1000)) for _ in range(4)]
    devices = [device(values), *(device(torch.zeros(1000)) for _ in range(4))]
    transfer = None
    for i, on_host in enumerate(hosts):
        there = engine.d2h(devices[i], on_host, after=transfer and [transfer])
        transfer = engine.h2d(on_host, devices[i + 1], after=[there])
    transfer.wait()
    assert torch.equal(devices[-1].cpu(), values)
    assert there.done()


def test_synchronize_finishes_everything_and_buffers_are_let_go_after_close(sides):
    engine, host, device = sides
    on_host, on_device = host(torch.zeros(100)), device(torch.ones(100))
    transfers = [engine.d2h(on_device, on_host) for _ in range(3)]
    engine.synchronize()
    assert all(transfer.done() for transfer in transfers)
    transfers[-1].wait_host()
    assert torch.equal(on_host, torch.ones(100))
    references = weakref.ref(on_host), weakref.ref(on_device)
    engine.d2h(on_device, on_host)  # never waited for
    engine.close()
    engine.close()
    del on_host, on_device, transfers
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_what_cannot_be_copied_is_refused(sides):
    engine, host, device = sides
    with pytest.raises(ValueError, match="same shape and dtype"):
        engine.d2h(device(torch.zeros(3)), host(torch.zeros(4)))
    with pytest.raises(ValueError, match="same shape and dtype"):
        engine.h2d(host(torch.zeros(3)), device(torch.zeros(3, dtype=torch.float64)))
    with pytest.raises(ValueError, match="goes from"):
        engine.d2h(torch.zeros(3, device="meta"), host(torch.zeros(3)))
    assert isinstance(make_engine("cpu"), HostEngine)
    with pytest.raises(UnsupportedError, match="cannot be offloaded from `meta`"):
        make_engine("meta")
