"""`PlannedModel`: the jobs of one model under different settings; `faster_weights`: how several devices read them."""

from dataclasses import replace
from typing import Any

from lightning_cxl.commands.plan.meta_model import loss_on_meta, model_on_meta, set_precision, with_lora
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.activations import Measured, measure
from lightning_cxl.inventory.inventory import Inventory, list_tensors
from lightning_cxl.machine.machine import Machine
from lightning_cxl.planning.compare import compare, with_working_memory
from lightning_cxl.planning.free_memory import FreeMemory
from lightning_cxl.planning.jobs.model_job import ModelJob, model_job
from lightning_cxl.planning.settle_state import settle_state
from lightning_cxl.planning.ssd_room import MEMORY_LEFT_FREE, SsdRoom
from lightning_cxl.streaming.quantised import wide_experts


class PlannedModel:
    """One model without weights. What takes long, dry runs, is kept.

    Args:
        name: of the model, see `model_on_meta`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._model = model_on_meta(name)
        self._with_lora: dict[Any, Any] = {}
        self._measured: dict[Any, Measured] = {}

    def job(self, settings: Settings, machine: Machine) -> ModelJob:
        """Return the job under some settings, with state and weights on the tier `ssd` where memory cannot hold them.

        Raises:
            ConfigError: settings that do not go together.
        """
        self._check_length(settings.sequence)
        model = self._model_of(settings)
        config, load = settings.config(machine), settings.workload(machine)
        key = (
            settings.precision,
            load.batch,
            load.sequence,
            config.activation_offload,
            load.computes_on_host,
            settings.loss,
            settings.lora,
            settings.quantize,
        )
        if key not in self._measured:
            compute_loss = loss_on_meta(model, load.batch, load.sequence, chunked=settings.loss == "chunked")
            self._measured[key] = measure(model, config, load, compute_loss)
        inventory = list_tensors(model, None, config, load, measured=self._measured[key])
        planned = self._job(inventory)
        if machine.ssd is None:
            return planned
        room = with_working_memory(planned.job, machine)
        free = FreeMemory({tier.name: tier.capacity_bytes for tier in room.tiers}, room.memory_bytes)
        ssd = SsdRoom(machine.ssd.capacity_bytes, machine.ssd.versions, machine.ssd.num_drives, MEMORY_LEFT_FREE)
        return self._job(settle_state(inventory, free.usable_bytes, ssd, "spill"))

    def _check_length(self, sequence: int) -> None:
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(longest, int) and 0 < longest < sequence:
            raise ConfigError(
                f"{self.name!r} has positions for {longest:,} tokens (`max_position_embeddings` of its config), and a "
                f"sequence of {sequence:,} is asked for: give --seq {longest} or less, or the config of a model that "
                "is made for longer ones"
            )

    def _job(self, inventory: Inventory) -> ModelJob:
        planned, note = model_job(self.name, inventory), wide_experts(inventory.model)
        return replace(planned, notes=(*planned.notes, note)) if note else planned

    def _model_of(self, settings: Settings) -> Any:
        """Return the model in the types of some settings, with adapters where they have them."""
        if settings.lora is None:
            set_precision(self._model, settings.precision)
            return self._model
        key = (settings.precision, settings.lora, settings.quantize)
        if key not in self._with_lora:
            model = model_on_meta(self.name)
            set_precision(model, settings.precision)
            self._with_lora[key] = with_lora(model, settings.lora, settings.quantize)
        return self._with_lora[key]


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
