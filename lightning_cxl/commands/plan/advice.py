"""`what_fits`: changes, each on its own, after which a job fits that does not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_cxl.commands.plan.planned_model import PlannedModel
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.errors import ConfigError
from lightning_cxl.machine.machine import Machine, MachineSsd
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.planning.compare import fits

_LARGE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do differently."""

    text: str
    settings: Settings
    machine: Machine


def what_fits(model: PlannedModel, settings: Settings, machine: Machine, policy: str) -> list[Change]:
    """Return the changes after which the job fits; each was tried.

    Args:
        model: to train.
        settings: that do not fit.
        machine: that they do not fit on.
        policy: that places.
    """
    return [change for change in _changes(settings, machine) if _fits(model, change, policy)]


def _fits(model: PlannedModel, change: Change, policy: str) -> bool:
    try:
        return fits(model.job(change.settings, change.machine).job, change.machine, policy)
    except ConfigError:
        return False  # settings that do not go together


def _changes(settings: Settings, machine: Machine) -> Iterator[Change]:
    """Yield what can be changed one at a time."""
    is_host = machine.device.is_host

    def option(text: str, **values: Any) -> Change:
        return Change(text, replace(settings, **values), machine)

    if settings.precision != "bf16-true":
        yield option('precision="bf16-true"', precision="bf16-true")
    if settings.state == "fp32":
        yield option('state="bf16"', state="bf16")
    if settings.state != "8bit":
        yield option('state="8bit"', state="8bit")
    if settings.master == "fp32":
        yield option('master="split"', master="split")
    if settings.accumulate_grad_batches > 1 and settings.accumulate == "fp32":
        yield option('accumulate="bf16"', accumulate="bf16")
    streams = not is_host if settings.stream_weights == "auto" else settings.stream_weights
    if streams and settings.overlap != "backward" and settings.accumulate_grad_batches == 1:
        yield option('on_overflow="ignore" (gradients are used up in backward)', overlap="backward")
    if not settings.activation_offload:
        yield option("activation_offload=True", activation_offload=True)
    if not is_host and settings.stream_weights is False:
        yield option("stream_weights=True", stream_weights=True)
    if settings.loss == "full":
        yield option(
            "a loss that never holds all logits: `with lightning_cxl.chunked_loss(model):` around the model's forward, "
            "as the main job has it (--loss chunked)",
            loss="chunked",
        )
    if settings.num_nodes > 1 and settings.between_nodes == "replicate":
        in_parts = {"between_nodes": "shard", "weights": "gathered"}
        yield option("the model cut over all machines (--between-nodes shard)", **in_parts)
    if settings.batch > 1:
        yield option(f"half the batch, {settings.batch // 2}", batch=settings.batch // 2)
    if settings.sequence > 1:
        yield option(f"half the sequence, {settings.sequence // 2}", sequence=settings.sequence // 2)
    if machine.ssd is None:
        on_drives = replace(machine, ssd=MachineSsd(capacity_bytes=_LARGE_BYTES))
        yield Change(
            'optimizer state and weights on a drive, tiers={"ssd": {"path": ...}} (--ssd DIR)', settings, on_drives
        )
    if (more := _with_another_card(machine)) is not None:
        yield Change("another card like the last one", settings, more)


def _with_another_card(machine: Machine) -> Machine | None:
    cards = [tier for tier in machine.select(TierKind.CXL) if tier.backed_by is None]
    if not cards:
        return None
    name = next(f"cxl{i}" for i in range(len(machine.tiers) + 1) if f"cxl{i}" not in machine.names)
    together = None if machine.host_bytes is None else machine.host_bytes + cards[-1].capacity_bytes
    return replace(machine, tiers=(*machine.tiers, replace(cards[-1], name=name)), host_bytes=together)
