"""``python -m lightning_cxl plan``: its options, and one run of it."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from lightning_cxl.commands import parsers
from lightning_cxl.commands.measuring.files import TO_STDOUT, check_target, write_text
from lightning_cxl.commands.measuring.pictures import check_matplotlib
from lightning_cxl.commands.plan.advice import what_fits
from lightning_cxl.commands.plan.findings import Findings, as_data
from lightning_cxl.commands.plan.planned_model import PlannedModel, can_share, faster_weights
from lightning_cxl.commands.plan.ranks import ranks_data
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.commands.plan.text import as_text
from lightning_cxl.devices.device_type import devices_apart
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.machine import Machine
from lightning_cxl.machine.machine_file import load_machine
from lightning_cxl.machine.speeds import machine_of, machine_without_speeds
from lightning_cxl.machine.topology import Topology
from lightning_cxl.planning.compare import compare, dram_only_time
from lightning_cxl.planning.policies.registry import POLICIES
from lightning_cxl.ssd_options import SsdOptions, read_ssd_options

DOES_NOT_FIT = 3
"""Exit status."""


def main(arguments: Sequence[str]) -> int:
    """Plan a job as the options say and print it.

    Returns:
        The exit status.

    Raises:
        ConfigError: options that cannot be honoured.
    """
    options = parsers.plan().parse_args(arguments)
    check_target(options.json)
    check_target(options.plot)
    if options.plot is not None:
        check_matplotlib()
    settings = Settings(
        batch=options.batch,
        sequence=options.seq,
        precision=options.precision,
        state=options.state,
        master=options.master,
        accumulate=options.accumulate,
        accumulate_grad_batches=options.accumulate_grad_batches,
        overlap=options.overlap,
        activation_offload=options.activation_offload,
        stream_weights=options.stream_weights,
        loss=options.loss,
        lora=options.lora,
        quantize=options.quantize,
        num_nodes=options.num_nodes,
        between_nodes=options.between_nodes,
        weights="shared" if options.weights == "shared" else "gathered",
        no_sync=options.no_sync,
    )
    ssd = _ssd(options)
    machine = _this_machine(ssd) if options.tiers is None else load_machine(options.tiers)
    machine = machine.with_devices(machine.device.count if options.devices is None else options.devices)
    model, either = PlannedModel(options.model), options.weights == "auto"
    command = shlex.join(["python", "-m", "lightning_cxl", "plan", *arguments])
    found = look(model, settings, machine, options.policy, either=either, command=command)
    print(as_text(found), file=sys.stderr if options.json == TO_STDOUT else sys.stdout)
    if options.json is not None:
        write_text(options.json, json.dumps({**as_data(found), "ranks": ranks_data(found)}, indent=1) + "\n")
    if options.plot is not None:
        from lightning_cxl.commands.plan.picture import draw

        draw(found, options.plot)
    return 0 if found.fits else DOES_NOT_FIT


def look(
    model: PlannedModel,
    settings: Settings,
    machine: Machine,
    policy: str = "auto",
    *,
    either: bool = False,
    command: str = "",
) -> Findings:
    """Return everything there is to say about a job.

    Args:
        model: to train.
        settings: of the job.
        machine: to run on.
        policy: shown in full; built-in, or the import path of a class. ``"auto"`` is what a run takes: ``"bandwidth"``
            where speeds are known, else ``"by_role"``. With one kind of memory all are the same.
        either: several devices may share weights, too, if the step is predicted to be shorter then.
        command: what was typed, for advice.

    Raises:
        ConfigError: no such policy, one that needs speeds that are not known, or settings that do not go together.
    """
    if policy == "auto":
        policy = "bandwidth" if machine.has_speeds else "by_role"
    if either and can_share(settings, machine):
        settings = faster_weights(model, settings, machine, policy)
    planned = model.job(settings, machine)
    plans = compare(planned.job, machine, dict.fromkeys([*POLICIES, policy]))
    if plans[policy].needs_speeds:
        raise ConfigError(
            f"policy {policy!r} needs the speeds of this machine's memory, and they are not known: measure them with "
            f"`python -m lightning_cxl calibrate`, describe a machine in a file (--tiers; examples are in "
            f"examples/machines), or choose another policy"
        )
    dram_only = dram_only_time(planned.job, machine)
    found = Findings(model.name, settings, machine, planned, policy, plans, dram_only, (), command)
    return found if found.fits else replace(found, ways=what_fits(model, settings, machine, policy))


def _ssd(options: argparse.Namespace) -> SsdOptions | None:
    """Return what the options say about the tier `ssd`.

    Raises:
        ConfigError: they do not go together.
    """
    given = {"budget": options.ssd_budget, "checkpoint": options.ssd_checkpoint}
    given = {name: value for name, value in given.items() if value is not None}
    if not options.ssd:
        if given:
            raise ConfigError(f"--ssd-{next(iter(given))} needs --ssd, the folder of the tier")
        return None
    if options.tiers is not None:
        raise ConfigError("--ssd is a folder of this machine: of the machine of --tiers, describe it there under `ssd`")
    return read_ssd_options({"path": options.ssd, **given})


def _this_machine(ssd: SsdOptions | None) -> Machine:
    """Return this machine with what is free on it now; tiers that share memory or a limit hold that much together."""
    topology = Topology.detect()
    topology = topology if ssd is None else topology.with_ssd(ssd)
    found = devices_apart()
    device = found[0].device.type if found else "cpu"
    free = {tier.name: sum(topology.node_free_bytes(node) for node in tier.node_ids) for tier in topology.tiers}
    machine = machine_of(topology, device, capacity_bytes=free)
    machine = machine or machine_without_speeds(topology, device).with_capacity(free)
    return machine.with_capacity({}, topology.host_available_bytes())
