"""`faster_weights`: whether several devices gather weights or share one copy, by the predicted step."""

from dataclasses import replace

from lightning_cxl.commands.plan.planned_model import PlannedModel
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.machine.machine import Machine
from lightning_cxl.planning.compare import compare


def can_share(settings: Settings, machine: Machine) -> bool:
    """Return whether devices could read weights from one copy: a machine holds all of them, and has several devices."""
    return machine.device.count > 1 and (settings.num_nodes == 1 or settings.between_nodes == "replicate")


def faster_weights(model: PlannedModel, settings: Settings, machine: Machine, policy: str) -> Settings:
    """Return the settings that gather weights, unless the step is predicted to be shorter where devices share them.

    Args:
        model: to train.
        settings: of the job; `can_share` says yes.
        machine: to run on.
        policy: that places.
    """
    gathered = replace(settings, weights="gathered")
    shared = replace(settings, weights="shared")
    seconds = [_seconds(model, each, machine, policy) for each in (gathered, shared)]
    if seconds[1] is not None and (seconds[0] is None or seconds[1] < seconds[0]):
        return shared
    return gathered


def _seconds(model: PlannedModel, settings: Settings, machine: Machine, policy: str) -> float | None:
    time = compare(model.job(settings, machine).job, machine, [policy])[policy].time
    return None if time is None else time.seconds
