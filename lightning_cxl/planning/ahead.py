"""`RunPlanner`: where everything of a run goes, decided and checked against memory before any of it is allocated.

[Note: Planning a run]
The strategy lets the user's optimizers be made first, on the model as it is: they know which state there will be. Then
the whole run is known except for activations and compute, which ``batch_tokens`` or the first batch tells. A policy
that plans (`PlanningPolicy`) sees all of it as one job; others are asked tensor by tensor, all with what is free now.
What does not fit is refused here. What counts as room: free memory of every tier within its budget, and what the
model's weights take already, on their tier or in ordinary memory, because they move.
"""

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError, LightningCXLWarning
from lightning_cxl.inventory.held import held_tensors
from lightning_cxl.inventory.workload import Workload
from lightning_cxl.machine.machine import Machine, check_split
from lightning_cxl.machine.speeds import machine_of, machine_without_speeds, with_new_tiers
from lightning_cxl.machine.topology import Topology
from lightning_cxl.memory.host_tensors import is_ordinary
from lightning_cxl.memory.ordinary import anonymous_bytes
from lightning_cxl.memory.stacks import HostMemory
from lightning_cxl.placement.decorators import TierSpec
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.placer import Placer
from lightning_cxl.placement.policy import PlacementPolicy, RoleHomePolicy
from lightning_cxl.placement.rules import resolve
from lightning_cxl.planning.fit import check_fits
from lightning_cxl.planning.jobs.job import Job, MemoryClass
from lightning_cxl.planning.jobs.model_job import estimate, model_job
from lightning_cxl.planning.placements import ModelPlacements
from lightning_cxl.planning.policies.api import Decision, PlanningPolicy
from lightning_cxl.planning.policies.bandwidth import Bandwidth
from lightning_cxl.planning.policies.decided import DecidedPolicy
from lightning_cxl.planning.policies.registry import get_policy, plans
from lightning_cxl.updates.unit_updates import why_after_backward

log = logging.getLogger(__name__)
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
        self._homes = RoleHomePolicy(topology, cpu_computes=device.type == "cpu")
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
        tokens = self._config.batch_tokens or 0
        load = Workload(
            batch=1,
            sequence=tokens,
            num_micro_batches=2 if accumulates else 1,
            computes_on_host=computes_on_host,
            updates_in_backward=why_after_backward(needs_whole_step, optimizers) is None,
        )
        tiers = resolve(model.named_modules(remove_duplicate=False), self._config.tier_rules, self._memory.topology)
        placements = ModelPlacements(model, tiers, self.placer, pin=self._memory.pins)
        held = held_tensors(model, self._config, load, placements.asked, optimizers)
        room, together = room_for(model, self._memory)
        measured = estimate(model, self._config, load, "before the first batch")
        if self._planning is not None:
            job = model_job(type(model).__name__, model, self._config, load, measured, placements.asked, held).job
            if TensorRole.ACTIVATIONS not in job.free_classes():
                # how large they are may not be known yet; where they go is decided now
                unknown = MemoryClass(role=TensorRole.ACTIVATIONS, nbytes=0)
                job = replace(job, classes=(*job.classes, unknown))
            topology = self._memory.topology  # rules and decorators may have asked for one tier more
            planning = replace(self._planning, machine=with_new_tiers(self._planning.machine, topology))
            decision = planning.decide(job, room, together)
            self.placer.policy = DecidedPolicy(decision, topology.names, self._homes)
        requests = [(role, size, placements.for_parameter(p, role, size)) for p, role, size in held.all()]
        activations = TensorRole.ACTIVATIONS
        for unit, size in measured.run.stored_bytes.items() if optimizers else ():
            requests.append((activations, size, placements.for_unit(unit, activations, size)))
        check_fits(requests, room, self._config.on_tier_full, most=together)
        return placements


@dataclass(frozen=True, slots=True)
class Planning:
    """A policy that plans, with the machine that it plans for."""

    policy: PlanningPolicy
    name: str
    machine: Machine

    def decide(self, job: Job, room: Mapping[str, int], together: int) -> Decision:
        """Return the policy's decision about a job.

        Args:
            job: of the run.
            room: bytes that every tier can hold of it; the machine's own limits hold as well.
            together: bytes that all tiers can hold.

        Raises:
            ConfigError: the policy leaves a role out, or its splits are none.
            TierFullError: it does not fit.
        """
        limits = {tier.name: min(_usable(room[tier.name]), tier.capacity_bytes) for tier in self.machine.tiers}
        most = together if self.machine.host_bytes is None else min(together, self.machine.host_bytes)
        machine = self.machine.with_capacity(limits, most)
        decision = self.policy.decide(job, machine)
        missing = [role.value for role in job.free_classes() if role not in decision.splits]
        if missing:
            raise ConfigError(
                f"policy {self.name!r} decides nothing about {', '.join(missing)}: `decide` must place all"
            )
        try:
            for split in decision.splits.values():
                check_split(split, machine)
        except ValueError as error:
            raise ConfigError(f"policy {self.name!r}: {error}") from error
        return decision


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
    several = sum(not tier.emulated for tier in topology.tiers) > 1
    by_role = wanted is None and (config.policy == "by_role" or (config.policy == "auto" and not several))
    machine = None
    if config.machine is not None or not by_role:  # no need to look up speeds that nobody asks for
        machine = machine_of(topology, device, file=config.machine)
    if machine is not None:  # one process drives one of its devices
        machine = replace(machine, device=replace(machine.device, count=1))
    if wanted is None and config.policy in ("auto", "by_role"):
        if not by_role and machine is not None:
            return Planning(Bandwidth(), "bandwidth", machine)
        if not by_role:
            log.info("every kind of tensor has its home: speeds are not known, see `python -m lightning_cxl calibrate`")
        _warn_of_idle_machine(config, "there is one kind of memory, where" if not several else "with it")
        return None
    policy = get_policy(config.policy) if wanted is None else wanted
    name = config.policy if wanted is None else type(policy).__name__
    if not plans(policy):
        _warn_of_idle_machine(config, f"policy {name!r} is asked tensor by tensor, and")
        return cast(PlacementPolicy, policy)
    if machine is None and getattr(policy, "needs_speeds", True):
        raise ConfigError(
            f"policy {name!r} needs the speeds of all tiers ({', '.join(topology.names)}), and they are not known. Run "
            f"`python -m lightning_cxl calibrate`, or give a file with `machine=`, such as those in examples/machines."
        )
    return Planning(cast(PlanningPolicy, policy), name, machine or machine_without_speeds(topology, device))


def _warn_of_idle_machine(config: OffloadConfig, why: str) -> None:
    if config.machine is not None:
        warnings.warn(
            f"`machine={config.machine!r}` has no effect: {why} nothing is planned by speed. Choose a policy such as "
            f"'bandwidth'.",
            LightningCXLWarning,
            stacklevel=2,
        )


def _usable(nbytes: int) -> int:
    """Return what a plan may fill of a tier: pools have unused ends of slabs, and splits end in whole stripes."""
    return nbytes - min(nbytes // 8, _SLACK_BYTES)


def room_for(model: nn.Module, memory: HostMemory) -> tuple[dict[str, int], int]:
    """Return what each tier can hold of a run, and all together, including what the model's weights take already."""
    topology = memory.topology
    own = dict.fromkeys(topology.names, 0)
    others = []
    for parameter in filter(is_ordinary, model.parameters()):
        tier = memory.tier_at(parameter.data_ptr()) if parameter.numel() else None
        if tier is None:
            others.append(parameter)
        else:
            own[tier.name] += parameter.nbytes
    freed = dict.fromkeys(topology.names, 0)  # when weights in ordinary memory have moved
    for node, nbytes in anonymous_bytes(others, topology.tiers[0].node_ids[0]).items():
        if (tier := topology.node_tier(node)) is not None:
            freed[tier.name] += nbytes
    accounts, room = memory.stats()["tiers"], {}
    for name, free in memory.free_bytes().items():
        budget_left = accounts[name]["budget_bytes"] - accounts[name]["used_bytes"]
        room[name] = min(free + freed[name], budget_left) + own[name]
    return room, topology.host_available_bytes() + sum(freed.values()) + sum(own.values())
