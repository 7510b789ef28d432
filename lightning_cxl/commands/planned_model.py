"""A causal language model without weights, and its jobs under different settings, for `plan`.

transformers is imported when a model is built, not with this package.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_cxl.config import OffloadConfig
from lightning_cxl.errors import ConfigError
from lightning_cxl.inventory.dry_run import DryRun, measure
from lightning_cxl.inventory.inventory import list_tensors
from lightning_cxl.inventory.workload import Mesh, Workload
from lightning_cxl.machine.machine import Machine
from lightning_cxl.planning.compare import with_working_memory
from lightning_cxl.planning.decide import FreeMemory
from lightning_cxl.planning.job import Job, model_job
from lightning_cxl.planning.settle_state import settle_state
from lightning_cxl.sequences.chunked_loss import chunked_loss
from lightning_cxl.streaming.quantised import wide_experts
from lightning_cxl.weights.hf import Quantizer, quantization_fields, with_adapters, without_code
from lightning_cxl.weights.load import empty_weights
from lightning_cxl.weights.model_names import SHAPES, is_cached, published, require_model

PlannedPrecision = Literal["32-true", "bf16-true", "bf16-mixed"]
"""The Trainer's precisions that can be planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The job, by the options of `plan`; those that the strategy has, too, have the same names there."""

    batch: int = 1
    sequence: int = 4096
    precision: PlannedPrecision = "bf16-true"
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    master: Literal["split", "fp32"] = "split"
    accumulate: Literal["fp32", "bf16"] = "fp32"
    accumulate_grad_batches: int = 1
    overlap: Literal["auto", "none", "backward", "forward"] = "auto"
    """``"backward"`` needs ``on_overflow="ignore"``; ``"auto"`` is what the strategy does by default."""
    activation_offload: bool = True
    stream_weights: bool | Literal["auto"] = "auto"
    loss: Literal["full", "chunked"] = "full"
    lora: int | None = None
    """Rank of adapters on all linear layers of the blocks, which alone are trained; None: all weights are."""
    quantize: Literal["4bit", "8bit"] | None = None
    """Format of the weights below adapters."""
    num_nodes: int = 1
    between_nodes: Literal["replicate", "shard"] = "shard"
    no_sync: bool = False

    def __post_init__(self) -> None:
        """Refuse counts below one, and quantised weights that would be trained."""
        for name in ("batch", "sequence", "accumulate_grad_batches", "lora", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.quantize is not None and self.lora is None:
            raise ConfigError("quantised weights cannot be trained: give adapters too, such as --lora 16")

    def streams(self, machine: Machine) -> bool:
        """Return whether weights of units stream."""
        return not machine.device.is_host if self.stream_weights == "auto" else self.stream_weights

    def config(self, machine: Machine) -> OffloadConfig:
        """Return the strategy's options."""
        if self.mesh(machine).is_sharded:
            if self.stream_weights is False and not machine.device.is_host:
                raise ConfigError(
                    "several devices keep their shards of weights on the host: leave out --no-stream-weights"
                )
            if self.quantize is not None:
                raise ConfigError(
                    "a plan of several devices takes all weights for cut, and each device needs a whole quantised base "
                    "in the memory of its machine: plan one device (--devices 1), and count its compute weights once "
                    "for each"
                )
            if machine.ssd is not None and machine.ssd.versions > 1:
                raise ConfigError(
                    "checkpoint 'reference' of the tier `ssd` serves one device: checkpoints of several have the state "
                    "in them. Leave out --ssd-checkpoint, or `versions` of the machine"
                )
        overlaps: bool | Literal["auto"] = {"auto": "auto", "none": False}.get(self.overlap, True)  # type: ignore[assignment]
        if overlaps is True and not (self.streams(machine) and self.activation_offload):
            raise ConfigError(
                f'overlap "{self.overlap}" needs weights that stream, and they do not: set stream weights, or '
                'choose overlap "none"'
            )
        return OffloadConfig(
            activation_offload=self.activation_offload,
            stream_weights=self.stream_weights,
            overlap_step=overlaps,
            state=self.state,
            master=self.master,
            accumulate=self.accumulate,
            on_overflow="ignore" if self.overlap == "backward" else "skip",
        )

    def workload(self, machine: Machine) -> Workload:
        """Return the workload of one step."""
        return Workload(
            batch=self.batch,
            sequence=self.sequence,
            num_micro_batches=self.accumulate_grad_batches,
            mixed=self.precision == "bf16-mixed",
            computes_on_host=machine.device.is_host,
            updates_in_backward=self.overlap == "backward",
            mesh=self.mesh(machine),
            no_sync=self.no_sync,
        )

    def mesh(self, machine: Machine) -> Mesh:
        """Return the ranks on `num_nodes` machines like this one."""
        return Mesh(
            num_devices=machine.device.count,
            num_machines=self.num_nodes,
            replicates=self.num_nodes > 1 and self.between_nodes == "replicate",
        )


class PlannedModel:
    """A model on the meta device. Dry runs take long, so their results are kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._model = model_on_meta(name)
        self._adapted: dict[Any, Any] = {}
        self._measured: dict[Any, DryRun] = {}

    def job(self, settings: Settings, machine: Machine) -> Job:
        """Return the job under `settings`, with state and weights on the tier `ssd` where memory cannot hold them."""
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(longest, int) and 0 < longest < settings.sequence:
            raise ConfigError(
                f"{self.name!r} has positions for {longest:,} tokens (`max_position_embeddings` of its config), and a "
                f"sequence of {settings.sequence:,} is asked for: give --seq {longest} or less, or the config of a "
                "model that is made for longer ones"
            )
        model, config, load = self._model_of(settings), settings.config(machine), settings.workload(machine)
        key: tuple[object, ...] = (
            settings.precision,
            settings.lora,
            settings.quantize,
            settings.loss,
            load.batch,
            load.sequence,
        )
        key = (*key, config.activation_offload, load.computes_on_host)
        if key not in self._measured:
            compute_loss = loss_on_meta(model, load.batch, load.sequence, chunked=settings.loss == "chunked")
            self._measured[key] = measure(model, config, load, compute_loss)
        inventory = list_tensors(model, None, config, load, measured=self._measured[key])
        job = model_job(self.name, inventory)
        if machine.ssd is not None:
            room = with_working_memory(job, machine)
            free = FreeMemory({tier.name: tier.capacity_bytes for tier in room.tiers}, room.memory_bytes)
            job = model_job(self.name, settle_state(inventory, free.usable_bytes, machine.ssd, "spill"))
        note = wide_experts(model)
        return replace(job, notes=(*job.notes, note)) if note else job

    def _model_of(self, settings: Settings) -> Any:
        key = (settings.precision, settings.lora, settings.quantize)
        dtype = torch.bfloat16 if settings.precision == "bf16-true" else torch.float32
        if settings.lora is None:
            return self._model.to(dtype)
        if key not in self._adapted:
            self._adapted[key] = with_lora(model_on_meta(self.name).to(dtype), settings.lora, settings.quantize)
        return self._adapted[key]


def model_on_meta(name: str) -> Any:
    """Return a model of transformers whose parameters and buffers have no memory, in training mode.

    Args:
        name: a folder with a ``config.json``, a shape's name, or a hub id.
    """
    from transformers import AutoModelForCausalLM

    config = _config(name)
    try:
        with empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever transformers trips over in a config that has been written by hand
        raise ConfigError(f"{name!r} makes no causal language model: {reason(error)}") from error
    return model.to("meta").train()


def with_lora(model: Any, rank: int, quantize: str | None) -> Any:
    """Return the model that trains adapters on all linear layers of its blocks, as the main job makes it.

    Args:
        model: on the meta device, in the types that it trains in. INOUT.
        quantize: format of the weights below, "4bit" or "8bit"; None: they stay as they are.
    """
    if quantize is not None:
        # numbers above the threshold are kept apart; without values their count is not known
        fields = {**quantization_fields(quantize, model.dtype), "llm_int8_threshold": 0.0}
        quantizer = Quantizer(fields, None)
        quantizer.replace_layers(model)
        quantizer.fill_on_meta(model)
    adapted = with_adapters(model, {"r": rank, "target_modules": "all-linear"})
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # peft has made these float32: the Trainer converts them when it begins
            parameter.data = parameter.data.to(model.dtype)
    return adapted.train()


def loss_on_meta(model: Any, batch: int, sequence: int, *, chunked: bool = False) -> Callable[[], torch.Tensor]:
    """Return a function that computes the model's loss of a batch of token ids without values."""

    def full() -> torch.Tensor:
        ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        # the cache is what these models make in training by default; without it they look for packed sequences in
        # position ids, which have no values here
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=True).loss
        return loss

    def in_chunks() -> torch.Tensor:
        with chunked_loss(model):
            return full()

    return in_chunks if chunked else full


def reason(error: Exception) -> str:
    """Return an exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _config(name: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    shape, is_folder = published(name), Path(name).is_dir()
    if shape is not None and not is_folder:
        fields = dict(shape.config)
        return CONFIG_MAPPING[fields.pop("model_type")](**fields)
    require_model(name, f", no known shape ({', '.join(SHAPES)})")
    try:
        config = without_code(AutoConfig.from_pretrained, name, local_files_only=is_folder or is_cached(name))
    except Exception as error:  # as above
        where = f"the config.json in {name!r}" if is_folder else f"the config of {name!r}"
        raise ConfigError(f"{where} cannot be used: {reason(error)}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"the weights of {name!r} are quantised, and `plan` quantises itself (--lora R --quantize 4bit): name the "
            "model that they were made from. A run plans itself when it begins, too, and its report shows it"
        )
    return config
