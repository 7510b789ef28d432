import threading

import pytest
import torch

from lightning_cxl.errors import TierNotFoundError
from lightning_cxl.memory import hook as scope
from lightning_cxl.memory.hook import is_placing, new_weight, ordinary_memory
from lightning_cxl.memory.placement import (
    Placer,
    TensorRole,
    TierSpec,
    constructing,
    constructing_spec,
)
from tests.unit.memory.host import Host


@pytest.fixture
def host():
    host = Host()
    with scope.activate(host.memory, Placer(host.topology, host.memory.free_bytes)):
        yield host


def like(*shape, **options):
    return torch.empty(*shape, device="meta", **options)


def test_shape_strides_and_dtype_are_kept_and_the_policy_decides(host):
    source = like(4, 6).t()
    weight = new_weight(source, torch.bfloat16, None)
    assert (weight.shape, weight.stride(), weight.dtype) == ((6, 4), (1, 6), torch.bfloat16)
    assert host.tier(weight) == "cxl"
    assert host.bytes_of(TensorRole.COMPUTE_WEIGHTS) == {"cxl": 48}


def test_a_spec_decides_before_the_policy(host):
    assert host.tier(new_weight(like(9), torch.float32, TierSpec(weights="dram"))) == "dram"
    assert host.tier(new_weight(like(9), torch.float32, TierSpec(gradients="dram"))) == "cxl"
    with pytest.raises(TierNotFoundError, match="hbm"):
        new_weight(like(9), torch.float32, TierSpec(weights="hbm"))


def test_the_hook_pauses_in_this_thread_and_goes_on(host):
    with host.mode():
        assert is_placing()
        with ordinary_memory():
            assert not is_placing()
            assert host.tier(torch.ones(9)) is None and host.tier(torch.ones(9).clone()) is None
            with ordinary_memory():
                pass
            assert host.tier(torch.ones(9)) is None
        assert host.tier(torch.ones(9)) == "cxl"
        with pytest.raises(KeyError), ordinary_memory():
            raise KeyError
        assert is_placing()
    assert not is_placing()


def test_made_for_a_spec_only_in_this_thread_and_region():
    seen = []
    with constructing(TierSpec(weights="dram")):
        assert constructing_spec() == TierSpec(weights="dram")
        thread = threading.Thread(target=lambda: seen.append(constructing_spec()))
        thread.start()
        thread.join()
        with constructing(None):
            assert constructing_spec() is None
    assert constructing_spec() is None and seen == [None]
