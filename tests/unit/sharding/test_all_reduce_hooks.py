"""Hooks of FSDP2 that reduce gradients on another stream than the one that they were allocated on."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.sharding.fsdp import refuse_other_cuts


def test_all_reduce_hooks_of_a_user_are_refused():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)))
        refuse_other_cuts(model)
        model.set_all_reduce_hook(lambda grad: None)
        with pytest.raises(UnsupportedError, match="set_all_reduce_hook"):
            refuse_other_cuts(model)
    finally:
        dist.destroy_process_group()
