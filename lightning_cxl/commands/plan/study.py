"""`Study`: the jobs of one model under different settings, and what would make one fit that does not."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

from lightning_cxl.commands.plan.model_source import PlannedPrecision, loss_on_meta, model_on_meta, set_precision
from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.activations import Measured, measure
from lightning_cxl.inventory.inventory import list_tensors
from lightning_cxl.inventory.workload import Workload
from lightning_cxl.machine.machine import Machine
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.planning.compare import fits
from lightning_cxl.planning.jobs.model_job import ModelJob, model_job

MAX_CHANGES = 2
"""Settings that are changed together, at most, to find one that fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What is trained and how; the strategy's options have the same names."""

    batch: int = 1
    sequence: int = 4096
    precision: PlannedPrecision = "bf16-true"
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    master: Literal["split", "fp32"] = "split"
    accumulate: Literal["fp32", "bf16"] = "fp32"
    accumulate_grad_batches: int = 1
    overlap: Literal["auto", "none", "backward", "forward"] = "auto"
    """``"backward"`` is what ``on_overflow="ignore"`` allows; ``"auto"`` is what the strategy does by default."""
    activation_offload: bool = True
    stream_weights: bool | Literal["auto"] = "auto"
    loss: Literal["full", "chunked"] = "full"
    """``"chunked"``: the model computes its loss without ever holding all logits, as fused losses do."""

    def __post_init__(self) -> None:
        """Refuse counts below one."""
        for name in ("batch", "sequence", "accumulate_grad_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    def config(self, machine: Machine) -> OffloadConfig:
        """Return the strategy's options."""
        overlaps: bool | Literal["auto"] = "auto"
        if self.overlap == "none":
            overlaps = False
        elif self.overlap in ("backward", "forward"):
            streams = self.stream_weights if self.stream_weights != "auto" else not machine.device.is_host
            if not streams or not self.activation_offload:
                raise ConfigError(
                    f'overlap "{self.overlap}" needs weights that stream, and they do not: set stream weights, or '
                    'choose overlap "none"'
                )
            overlaps = True
        return OffloadConfig(
            activation_offload=self.activation_offload,
            stream_weights=self.stream_weights,
            overlap_step=overlaps,
            state=self.state,
            master=self.master,
            accumulate=self.accumulate,
            on_overflow="ignore" if self.overlap == "backward" else "skip",
        )

    def load(self, machine: Machine) -> Workload:
        """Return what a step works on."""
        return Workload(
            batch=self.batch,
            sequence=self.sequence,
            num_micro_batches=self.accumulate_grad_batches,
            mixed=self.precision == "bf16-mixed",
            computes_on_host=machine.device.is_host,
            updates_in_backward=self.overlap == "backward",
            num_devices=machine.device.count,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Something to do differently."""

    text: str
    settings: Settings
    machine: Machine


class Study:
    """One model, looked at under many settings. What takes long, dry runs, is kept.

    Args:
        name: of the model, see `model_on_meta`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._model = model_on_meta(name)
        self._measured: dict[Any, Measured] = {}

    def job(self, settings: Settings, machine: Machine) -> ModelJob:
        """Return the job under some settings.

        Raises:
            ConfigError: settings that do not go together.
        """
        set_precision(self._model, settings.precision)
        config, load = settings.config(machine), settings.load(machine)
        key = (
            settings.precision,
            load.batch,
            load.sequence,
            config.activation_offload,
            load.computes_on_host,
            settings.loss,
        )
        if key not in self._measured:
            compute_loss = loss_on_meta(self._model, load.batch, load.sequence, chunked=settings.loss == "chunked")
            self._measured[key] = measure(self._model, config, load, compute_loss)
        return model_job(self.name, list_tensors(self._model, None, config, load, measured=self._measured[key]))

    def what_fits(self, settings: Settings, machine: Machine, policy: str) -> list[Change]:
        """Return changes after which the job fits: single ones, else the pairs.

        Args:
            settings: that do not fit.
            machine: that they do not fit on.
            policy: that places.
        """
        for number in range(1, MAX_CHANGES + 1):
            found = []
            for chosen in combinations(list(_changes(settings, machine)), number):
                change = _together(settings, machine, chosen)
                if change is not None and self._fits(change, policy):
                    found.append(change)
            if found:
                return found
        return []

    def _fits(self, change: Change, policy: str) -> bool:
        try:
            return fits(self.job(change.settings, change.machine).job, change.machine, policy)
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
            "a loss that never holds all logits (--loss chunked), such as a fused cross-entropy", loss="chunked"
        )
    if settings.batch > 1:
        yield option(f"half the batch, {settings.batch // 2}", batch=settings.batch // 2)
    if settings.sequence > 1:
        yield option(f"half the sequence, {settings.sequence // 2}", sequence=settings.sequence // 2)
    if (more := _with_another_card(machine)) is not None:
        yield Change("another card like the last one", settings, more)


def _with_another_card(machine: Machine) -> Machine | None:
    cards = [tier for tier in machine.select(TierKind.CXL) if tier.backed_by is None]
    if not cards:
        return None
    name = next(f"cxl{i}" for i in range(len(machine.tiers) + 1) if f"cxl{i}" not in machine.names)
    together = None if machine.host_bytes is None else machine.host_bytes + cards[-1].capacity_bytes
    return replace(machine, tiers=(*machine.tiers, replace(cards[-1], name=name)), host_bytes=together)


def _together(settings: Settings, machine: Machine, chosen: tuple[Change, ...]) -> Change | None:
    """Return several changes as one; None if two of them change the same thing."""
    values: dict[str, Any] = {}
    for change in chosen:
        for name in Settings.__dataclass_fields__:
            value = getattr(change.settings, name)
            if value != getattr(settings, name):
                if name in values:
                    return None
                values[name] = value
        if change.machine is not machine:
            machine = change.machine
    return Change(" and ".join(change.text for change in chosen), replace(settings, **values), machine)
