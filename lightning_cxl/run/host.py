"""`Host`: the machine as one run uses it: tiers with budgets, the policy, and copies to the device."""

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import LightningCXLWarning
from lightning_cxl.gradients.step import why_after_backward
from lightning_cxl.inventory.inventory import AskedTiers, Inventory, list_tensors
from lightning_cxl.inventory.tensors import Loop, Workload
from lightning_cxl.machine.binding import RankBinding
from lightning_cxl.machine.speeds import ssd_of
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.hook import HostAllocationMode, activate
from lightning_cxl.memory.host_memory import HostMemory
from lightning_cxl.placement.placement import PlacementPolicy, Placer, TensorRole, resolve
from lightning_cxl.planning.decide import Plan, RunPolicy, decide, free_for, settle_state
from lightning_cxl.planning.policies import PlanningPolicy
from lightning_cxl.run.state_on_ssd import SsdUse, io_data, tier_row
from lightning_cxl.ssd_options import SSD
from lightning_cxl.transfer.engine import TransferEngine, make_engine

log = logging.getLogger(__name__)


class Host:
    """What a run needs before there is a model. See [Note: Order of life].

    Args:
        policy: places what no decorator or rule asks for; the one that ``config.policy`` names when None.
        engine: copies between host and device; the device's own when None. Closed with the host.
        binding: what this process has of a machine that it shares with others; None where it has all of it.
    """

    def __init__(
        self,
        config: OffloadConfig,
        device: torch.device,
        topology: Topology | None = None,
        policy: PlacementPolicy | PlanningPolicy | None = None,
        engine: TransferEngine | None = None,
        binding: RankBinding | None = None,
    ) -> None:
        self.config = config
        self.device = device
        self._shared = binding.describe() if binding else []
        budgets, room = (binding.budgets, binding.room) if binding else (config.budgets(), {})
        topology = binding.topology if binding else topology
        found = topology or Topology.detect(on_missing_tier=config.on_missing_tier)
        self.ssd_options = options = binding.ssd if binding else config.ssd()
        """What this process has of the tier `ssd`; None where there is none."""
        self.topology = found if options is None else found.with_ssd(options)
        self.ssd = None if options is None else ssd_of(self.topology)
        """The tier `ssd` with what it may hold; None where there is none."""
        pin = device.type != "cpu" if config.pin_memory == "auto" else bool(config.pin_memory)
        full = config.on_tier_full
        self.memory = HostMemory(self.topology, budgets=budgets, room=room, on_tier_full=full, pin=pin)
        self.policy = RunPolicy(config, self.topology, device, policy)
        self.placer = Placer(self.topology, self.policy.by_tensor, self.memory.free_bytes)
        self.engine = make_engine(device) if engine is None else engine

    @property
    def streams_weights(self) -> bool:
        """Whether the weights of units stream, if the model has units."""
        return self.config.streams_weights(self.engine.computes_on_host)

    def activate(self) -> AbstractContextManager[Any]:
        """Return a region in which `lightning_cxl.empty` and `host_allocation` use this memory and its budgets."""
        return activate(self.memory, self.placer)

    def creating_weights(self) -> AbstractContextManager[Any]:
        """Return a region in which torch's host tensors are placed as compute weights."""
        return HostAllocationMode(self.memory, self.placer, role=TensorRole.COMPUTE_WEIGHTS)

    def inventory(self, model: nn.Module, optimizers: Sequence[Optimizer], loop: Loop) -> Inventory:
        """Return what a run of a model would hold, now that decorators and rules are known. See [Note: One inventory].

        Args:
            optimizers: as the user made them on it; empty where nothing is trained.
        """
        tiers = resolve(model.named_modules(remove_duplicate=False), self.config.tier_rules, self.topology)
        objection = why_after_backward(loop.needs_whole_step, optimizers)
        workload = Workload(
            batch=1,
            sequence=self.config.batch_tokens or 0,
            num_micro_batches=2 if loop.accumulates else 1,
            computes_on_host=self.engine.computes_on_host,
            updates_in_backward=objection is None,
        )
        inventory = list_tensors(model, optimizers, self.config, workload, asked=AskedTiers(model, tiers))
        if optimizers and inventory.overlap == "forward":
            log.info(f"the optimizer's step runs behind the next forward, not behind the backward: {objection}")
        if self.ssd is not None:
            _warn_of_weights_that_stay(inventory)
            room = free_for(model, self.memory).usable_bytes
            inventory = settle_state(inventory, room, self.ssd, self.config.on_tier_full)
            if inventory.ssd_records and inventory.units and not self.config.batch_tokens:
                log.info("no memory is kept for activations: with `batch_tokens`, more goes to the tier ssd instead")
        return inventory

    def decide(self, inventory: Inventory) -> Plan:
        """Return where everything of an inventory goes."""
        return decide(inventory, self.policy, self.memory, self.config.on_tier_full, self.ssd)

    def report(self, state: str = "running", ssd: SsdUse | None = None) -> dict[str, Any]:
        """Return measured bytes of all tiers, and nothing of a run, as JSON-able data.

        Args:
            ssd: what the run has stored on the tier `ssd`; None before it has.
        """
        stats, moved = self.memory.stats(), {}
        if (tier := self.topology.ssd) is not None:
            use = ssd or SsdUse()
            stats["tiers"][tier.name] = tier_row(tier, use)
            moved = io_data(use)
        return {
            "state": state,
            "device": str(self.device),
            **stats,
            "policy": self.policy.name,
            "planned_roles": {},
            "reasons": {},
            "num_parameters": 0,
            "num_trainable": 0,
            "units": [],
            "streamed": {},
            "ssd": moved,
            "optimizers": [],
            "notes": [*self.topology.notes, *self._shared, *self.memory.notes()],
        }

    def close(self) -> None:
        """Free everything that no tensor of the user's is in. Idempotent."""
        with ExitStack() as cleanup:
            cleanup.callback(self.memory.close)
            cleanup.callback(self.engine.close)


def _warn_of_weights_that_stay(inventory: Inventory) -> None:
    """Say it where weights are asked for on the tier `ssd` and none can lie there: memory has to hold all of them."""
    role = TensorRole.COMPUTE_WEIGHTS
    weights = [each for each in inventory.tensors if each.role is role]
    if any(each.tier == SSD for each in weights):
        return
    rows = {id(each.parameter): (each.tier, each.source) for each in weights}
    wishes = (rows.get(id(p)) or inventory.asked.lookup(p, role) for p in inventory.model.parameters())
    why = next((why for tier, why in wishes if tier is None and why), None)
    if why is not None:
        warnings.warn(
            f"no weights lie on tier `ssd`: {why}. Set stream_weights=True, train with torch's Adam or AdamW, or ask "
            f"for weights inside of units",
            LightningCXLWarning,
            stacklevel=2,
        )
