"""`RunPolicy`: the policy of a run, chosen before there is a model."""

import logging
import warnings
from dataclasses import dataclass, replace
from typing import cast

import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError, LightningCXLWarning
from lightning_cxl.inventory.inventory import Inventory
from lightning_cxl.machine.machine import Machine, check_split
from lightning_cxl.machine.speeds import machine_of, machine_without_speeds, with_new_tiers
from lightning_cxl.machine.topology import Topology
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.placement.policy import PlacementPolicy, RoleHomePolicy
from lightning_cxl.planning.free_memory import FreeMemory, usable
from lightning_cxl.planning.jobs.job import Job, MemoryClass
from lightning_cxl.planning.jobs.model_job import model_job
from lightning_cxl.planning.policies.api import Decision, PlanningPolicy
from lightning_cxl.planning.policies.bandwidth import Bandwidth
from lightning_cxl.planning.policies.decided import DecidedPolicy
from lightning_cxl.planning.policies.registry import get_policy, plans

log = logging.getLogger(__name__)


class RunPolicy:
    """Chooses the policy of a run, and lets it decide once the inventory is known.

    Args:
        config: of the run.
        topology: the machine.
        device: what computes.
        wanted: a policy object that wins over ``config.policy``; None for none.

    Raises:
        ConfigError: there is no such policy, or it needs speeds that are not known.
    """

    def __init__(self, config: OffloadConfig, topology: Topology, device: torch.device, wanted: object) -> None:
        self._homes = RoleHomePolicy(topology, cpu_computes=device.type == "cpu")
        self._topology = topology
        chosen = choose(wanted, config, topology, device)
        self._on_machine = chosen if isinstance(chosen, MachinePolicy) else None
        self.name = "by role" if chosen is None else getattr(chosen, "name", type(chosen).__name__)
        self.at_first: PlacementPolicy = self._homes if chosen is None or isinstance(chosen, MachinePolicy) else chosen
        """Asked before `decide`: where the policy plans, every role has its home until then."""

    def decide(self, inventory: Inventory, free: FreeMemory) -> PlacementPolicy:
        """Return what is asked about each tensor of the run.

        Args:
            inventory: of the run.
            free: what the run may fill.

        Raises:
            ConfigError: the policy leaves a role out, or its splits are none.
            TierFullError: it does not fit.
        """
        if self._on_machine is None:
            return self.at_first
        job = model_job(type(inventory.model).__name__, inventory).job
        if TensorRole.ACTIVATIONS not in job.free_classes():
            # how large they are may not be known yet; where they go is decided now
            unknown = MemoryClass(role=TensorRole.ACTIVATIONS, nbytes=0)
            job = replace(job, classes=(*job.classes, unknown))
        # since the policy was chosen, rules and decorators may have asked for one tier more
        policy = replace(self._on_machine, machine=with_new_tiers(self._on_machine.machine, self._topology))
        decision = policy.decide(job, free, self._topology)
        return DecidedPolicy(decision, self._topology.names, self._homes)


@dataclass(frozen=True, slots=True)
class MachinePolicy:
    """A policy that plans, with the machine that it plans for."""

    policy: PlanningPolicy
    name: str
    machine: Machine

    def decide(self, job: Job, free: FreeMemory, topology: Topology) -> Decision:
        """Return the policy's decision about a job.

        Args:
            job: of the run.
            free: what the run may fill; the machine's own limits hold as well.
            topology: the machine's. It gets the tier ``cxl`` where the policy names it and there is none.

        Raises:
            ConfigError: the policy leaves a role out, or its splits are none.
            TierFullError: it does not fit.
        """
        limits = {tier.name: min(usable(free.tiers[tier.name]), tier.capacity_bytes) for tier in self.machine.tiers}
        most = free.together if self.machine.host_bytes is None else min(free.together, self.machine.host_bytes)
        machine = self.machine.with_capacity(limits, most)
        decision = self.policy.decide(job, machine)
        missing = [role.value for role in job.free_classes() if role not in decision.splits]
        if missing:
            raise ConfigError(
                f"policy {self.name!r} decides nothing about {', '.join(missing)}: `decide` must place all"
            )
        try:
            for name in (name for split in decision.splits.values() for name in split):
                topology.tier(name)
            machine = with_new_tiers(machine, topology)
            for split in decision.splits.values():
                check_split(split, machine)
        except ValueError as error:
            raise ConfigError(f"policy {self.name!r}: {error}") from error
        return decision


def choose(
    wanted: object, config: OffloadConfig, topology: Topology, device: torch.device
) -> MachinePolicy | PlacementPolicy | None:
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
            return MachinePolicy(Bandwidth(), "bandwidth", machine)
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
    return MachinePolicy(cast(PlanningPolicy, policy), name, machine or machine_without_speeds(topology, device))


def _warn_of_idle_machine(config: OffloadConfig, why: str) -> None:
    if config.machine is not None:
        warnings.warn(
            f"`machine={config.machine!r}` has no effect: {why} nothing is planned by speed. Choose a policy such as "
            f"'bandwidth'.",
            LightningCXLWarning,
            stacklevel=2,
        )
