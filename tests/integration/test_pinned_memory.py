"""What the device copies is page-locked: once, whatever a policy says, and not again in every step."""

import pytest
import torch

from lightning_cxl.devices import device_type_of
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.memory.resource import PoolResource
from tests import training_device
from tests.apart.test_fork import in_child
from tests.integration.training import make_trainer, offload
from tests.models import Task, TinyTransformer, token_data

SLAB_BYTES = 64 * 1024
"""Tiny models: what counts as large must be small."""


class Registrations:
    def __init__(self) -> None:
        self.num_bytes, self.ranges = 0, {}  # of all calls; those that are page-locked now

    def cover(self, tensor: torch.Tensor) -> bool:
        address, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= address and end <= start + nbytes for start, nbytes in self.ranges.items())


@pytest.fixture
def registrations(monkeypatch, device_apart):
    monkeypatch.setattr(PoolResource.__init__, "__defaults__", (SLAB_BYTES,))
    kind, seen = device_type_of(training_device.current), Registrations()
    register, unregister = kind.register, kind.unregister

    def noted(address: int, nbytes: int) -> None:
        register(address, nbytes)
        seen.num_bytes += nbytes
        seen.ranges[address] = nbytes

    def forgotten(address: int) -> None:
        unregister(address)
        del seen.ranges[address]

    monkeypatch.setattr(kind, "register", noted)
    monkeypatch.setattr(kind, "unregister", forgotten)
    return seen


class LateTask(Task):
    """Makes its model when the strategy says where weights are created; notes what is page-locked, and when."""

    def configure_model(self):
        self.model = TinyTransformer(width=64, depth=6, dropout=0.0)
        self.created = self.registrations.num_bytes

    def on_train_start(self):
        self.held, self.registered = sum(self.registrations.ranges.values()), self.registrations.num_bytes
        self.roles = self.trainer.strategy.report()["roles"]

    def on_before_optimizer_step(self, optimizer):
        block, cover = self.model.blocks[0].qkv.weight, self.registrations.cover
        self.seen = {"weight": cover(block), "gradient": cover(block.grad)}
        if optimizer.state[block]:  # from the second step on
            self.seen["moment"] = cover(optimizer.state[block]["exp_avg"])


@pytest.mark.parametrize("pin_memory", ["auto", False])
def test_what_the_device_copies_is_page_locked_and_weights_once_where_they_stay(pin_memory, registrations):
    module = LateTask(torch.nn.Identity())
    module.registrations = registrations
    make_trainer(offload(pin_memory=pin_memory), max_steps=2).fit(module, token_data(2, length=64))
    locked = pin_memory == "auto"
    assert module.seen == {"weight": locked, "gradient": locked, "moment": False}
    assert bool(registrations.num_bytes) is locked and module.created == 0
    weights = sum(module.roles[TensorRole.COMPUTE_WEIGHTS.value].values())
    assert weights > 0
    assert module.registered - module.held < weights // 4  # nothing that large was page-locked and let go
    streamed = [p for name, p in module.model.named_parameters() if name.startswith("blocks")]
    assert all(registrations.cover(parameter) is locked for parameter in streamed)


def in_children(model, uses):
    """What a worker of a DataLoader may do."""
    return {name: in_child(lambda use=use: use(model)) for name, use in uses.items()}


def refused_in_child(use):
    if text := in_child(use):
        raise RuntimeError(text)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("weights", ["page-locked", "pageable", "on ssd"])
def test_forked_children_that_use_weights_they_do_not_have_get_an_error(weights, tmp_path):
    kept = []  # parameters that someone has looked up before
    uses = {
        "sum": lambda model: model.blocks[5].qkv.weight.sum().item(),
        "kept": lambda model: kept[0].tolist(),
        "state dict": lambda model: model.blocks[1].state_dict()["qkv.weight"].tolist(),
        "call": lambda model: model.blocks[2].qkv(torch.ones(1, 32)).tolist(),
        "data": lambda model: model.blocks[3].qkv.weight.data.tolist(),
        "gradient": lambda model: model.blocks[3].out.weight.grad,  # may be in such memory, too
        "shapes": lambda model: [(p.shape, p.device, p.dtype, p.numel(), p.requires_grad) for p in model.parameters()],
        "nothing": lambda model: torch.ones(4).sum(),
        "in the fork of a fork": lambda model: refused_in_child(lambda: model.blocks[4].out.weight.sum().item()),
    }
    options = {"pin_memory": weights != "pageable", "overlap_step": False}  # no update is under way in a fork
    if weights == "on ssd":
        options["tiers"] = {"ssd": {"path": str(tmp_path), "budget": "64MiB"}}
        options["tier_rules"] = {"*": {"weights": "ssd"}}
    model = TinyTransformer(depth=6)
    model.blocks[5].norm2.weight = model.blocks[5].norm1.weight  # before `qkv`, which must be hidden nevertheless
    kept.append(model.blocks[4].qkv.weight)
    task = Task(model)
    task.on_train_batch_end = lambda *_: setattr(task, "found", in_children(model, uses))
    make_trainer(offload(**options), max_steps=2).fit(task, token_data(2))
    for found in (task.found, in_children(model, uses)):
        for name, text in found.items():
            refused = weights != "pageable" and name not in ("shapes", "nothing")
            assert ("UnsupportedError: this process was forked" in text) if refused else not text, (name, text)
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
