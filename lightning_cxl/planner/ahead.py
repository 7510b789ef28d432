"""`RunPlanner`: where everything of a run goes, decided and checked against memory before any of it is allocated.

[Note: Planning a run]
The strategy lets the user's optimizers be made first, on the model as it is: they know which state there will be. Then
the whole run is known except for activations, whose size the first batch tells. A policy that plans (`PlanningPolicy`)
sees all of it as one job; others are asked tensor by tensor, as the run will ask them. What does not fit is refused
here. What counts as room: free memory of every tier within its budget, and what the model's weights take already,
on their tier or in ordinary memory, because they move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError
from lightning_cxl.memory.host_tensors import is_ordinary
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placements import ModelPlacements
from lightning_cxl.planner.dry_run import DryRun
from lightning_cxl.planner.held import held_tensors
from lightning_cxl.planner.job import MemoryClass
from lightning_cxl.planner.machine import Machine
from lightning_cxl.planner.model_job import Measured, model_job
from lightning_cxl.planner.report import check_fits
from lightning_cxl.planner.speeds import machine_of, machine_without_speeds
from lightning_cxl.planner.workload import Workload
from lightning_cxl.policies.api import PlanningPolicy
from lightning_cxl.policies.bandwidth import Bandwidth
from lightning_cxl.policies.decided import DecidedPolicy
from lightning_cxl.policies.registry import get_policy, plans
from lightning_cxl.tiers.annotate import TierSpec
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.tiers.placer import Placer
from lightning_cxl.tiers.policy import PlacementPolicy, RoleHomePolicy
from lightning_cxl.tiers.rules import resolve
from lightning_cxl.tiers.topology import Topology
from lightning_cxl.updates import why_after_backward

_SLACK_BYTES = 128 * 2**20


class RunPlanner:
    """Chooses the policy of a run, and lets it decide once model and optimizers are known. See [Note: Planning a run].

    Args:
        config: of the run.
        device: what computes.
        memory: of the run.
        wanted: a policy object that wins over ``config.policy``; None for none.
        owner: what the module of a parameter asks for.

    Raises:
        ConfigError: there is no such policy, or it needs speeds that are not known.
    """

    def __init__(
        self,
        config: OffloadConfig,
        device: torch.device,
        memory: HostMemory,
        wanted: object,
        owner: Callable[[object], TierSpec | None],
    ) -> None:
        self._config = config
        self._memory = memory
        topology = memory.topology
        self._homes = RoleHomePolicy(topology, pin=memory.pins, cpu_computes=device.type == "cpu")
        chosen = choose(wanted, config, topology, device)
        self._planning = chosen if isinstance(chosen, Planning) else None
        self.policy_name = "by role" if chosen is None else getattr(chosen, "name", type(chosen).__name__)
        first = self._homes if chosen is None or isinstance(chosen, Planning) else chosen
        self.placer = Placer(topology, first, memory.free_bytes, owner)
        """Asks the policy; before `plan`, one that plans leaves the answer to the roles' homes."""

    def plan(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        computes_on_host: bool,
        accumulates: bool,
        needs_whole_step: str | None,
    ) -> ModelPlacements:
        """Return where everything goes, decided.

        Args:
            model: its parameters, wherever they are.
            optimizers: as the user made them; empty where nothing is trained.
            computes_on_host: the CPU is the device.
            accumulates: several micro-batches are added up before a step.
            needs_whole_step: what may call a step off, or look at gradients, once its closure runs; None if nothing.

        Raises:
            ConfigError: rules or decorators that cannot be honoured.
            TierFullError: the run does not fit where the policy wants it.
        """
        load = Workload(
            batch=0,  # neither is known before the first batch
            sequence=0,
            num_micro_batches=2 if accumulates else 1,
            computes_on_host=computes_on_host,
            updates_in_backward=why_after_backward(needs_whole_step, optimizers) is None,
        )
        tiers = resolve(model.named_modules(remove_duplicate=False), self._config.tier_rules, self._memory.topology)
        placements = ModelPlacements(model, tiers, self.placer)
        held = held_tensors(model, self._config, load, placements.asked, optimizers)
        room, together = room_for(model, self._memory)
        if self._planning is not None:
            dry = Measured(DryRun({}, 0, 0.0, 0.0))
            job = model_job(type(model).__name__, model, self._config, load, dry, placements.asked, held).job
            # how large activations are is not known yet; where they go is decided now
            unknown = MemoryClass(role=TensorRole.ACTIVATIONS, nbytes=0)
            job = replace(job, classes=(*job.classes, unknown))
            machine = self._planning.machine.with_capacity({name: _usable(room[name]) for name in room}, together)
            decision = self._planning.policy.decide(job, machine)
            self.placer.policy = DecidedPolicy(decision, self._memory.topology.names, self._homes)
        requests = [(role, size, placements.for_parameter(p, role, size)) for p, role, size in held.all()]
        check_fits(requests, room, self._config.on_tier_full, most=together)
        return placements


@dataclass(frozen=True, slots=True)
class Planning:
    """A policy that plans, with the machine that it plans for."""

    policy: PlanningPolicy
    name: str
    machine: Machine


def choose(
    wanted: object, config: OffloadConfig, topology: Topology, device: torch.device
) -> Planning | PlacementPolicy | None:
    """Return the policy that a user asked for; by default ours, where there is a choice and speeds are known.

    Args:
        wanted: a policy object that wins over ``config.policy``; None for none.
        config: of the run.
        topology: the machine.
        device: what computes.

    Returns:
        None where roles have their homes.

    Raises:
        ConfigError: there is no such policy, or it needs speeds that are not known.
    """
    if wanted is None and config.policy == "auto":
        if sum(not tier.emulated for tier in topology.tiers) < 2:
            return None
        machine = machine_of(topology, device, file=config.machine)
        return None if machine is None else Planning(Bandwidth(), "bandwidth", machine)
    policy = get_policy(config.policy) if wanted is None else wanted
    name = config.policy if wanted is None else type(policy).__name__
    if not plans(policy):
        return cast(PlacementPolicy, policy)
    machine = machine_of(topology, device, file=config.machine)
    if machine is None and getattr(policy, "needs_speeds", True):
        raise ConfigError(
            f"policy {name!r} needs the speeds of all tiers ({', '.join(topology.names)}), and they are not known. Run "
            f"`python -m lightning_cxl calibrate`, or give a file with `machine=`, such as those in examples/machines."
        )
    return Planning(cast(PlanningPolicy, policy), name, machine or machine_without_speeds(topology, device))


def _usable(nbytes: int) -> int:
    """Return what a plan may fill of a tier: pools have unused ends of slabs, and splits end in whole stripes."""
    return nbytes - min(nbytes // 8, _SLACK_BYTES)


def room_for(model: nn.Module, memory: HostMemory) -> tuple[dict[str, int], int]:
    """Return what each tier can hold of a run, and all together, including what the model's weights take already."""
    own = dict.fromkeys(memory.topology.names, 0)
    ordinary = 0
    for parameter in filter(is_ordinary, model.parameters()):
        tier = memory.tier_at(parameter.data_ptr()) if parameter.numel() else None
        if tier is None:
            ordinary += parameter.nbytes
        else:
            own[tier.name] += parameter.nbytes
    room = {}
    for name, free in memory.free_bytes().items():
        accounts = memory.stats()["tiers"][name]
        # ordinary memory comes from the nearest tier, and is free when the weights have moved
        after_move = free + (ordinary if name == memory.topology.names[0] else 0)
        room[name] = min(after_move, accounts["budget_bytes"] - accounts["used_bytes"]) + own[name]
    return room, memory.topology.host_available_bytes() + ordinary + sum(own.values())
