"""``python -m lightning_cxl plan``: bytes of a job by tier, whether they fit, predicted seconds, and advice."""

import argparse
import bisect
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import torch

from lightning_cxl.commands import parsers
from lightning_cxl.config import SSD, OffloadConfig, read_ssd_options
from lightning_cxl.devices import devices_apart
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.inventory.dry_run import DryRun, measure
from lightning_cxl.inventory.plan import list_tensors
from lightning_cxl.inventory.tensors import Mesh, Workload
from lightning_cxl.machine.speeds import Machine, MachineSsd, load_machine, machine_of, machine_without_speeds
from lightning_cxl.machine.topology import TierKind, Topology
from lightning_cxl.planning import policies
from lightning_cxl.planning.decide import FreeMemory, settle_gradients, settle_state
from lightning_cxl.planning.job import COLLECTIVES, Job, StepTime, model_job
from lightning_cxl.sequences.chunked_loss import chunked_loss
from lightning_cxl.streaming.quantised import wide_experts
from lightning_cxl.text import format_bytes, table_lines, wrapped
from lightning_cxl.weights.hf import model_on_meta, with_lora

DOES_NOT_FIT = 3  # exit status
_RANK = 16  # of adapters that are advised


@dataclass(frozen=True, kw_only=True)
class Settings(parsers.PlanOptions):
    """The job, by the options of `plan`, and what a run would be given for it."""

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "accumulate_grad_batches", "lora", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.quantize is not None and self.lora is None:
            raise ConfigError("quantised weights cannot be trained: give adapters too, such as --lora 16")

    def streams(self, machine: Machine) -> bool:
        return not machine.device.is_host if self.stream_weights == "auto" else bool(self.stream_weights)

    def config(self, machine: Machine) -> OffloadConfig:
        if self.mesh(machine).is_sharded:
            if self.stream_weights is False and not machine.device.is_host:
                raise ConfigError("several devices keep shards of weights on the host: leave out --no-stream-weights")
            if self.quantize is not None:
                raise ConfigError(
                    "a plan of several devices cuts all weights, and each device needs a whole quantised base: plan "
                    "one device (--devices 1), and count its compute weights once for each"
                )
            if machine.ssd is not None and machine.ssd.versions > 1:
                raise ConfigError(
                    "checkpoint 'reference' of the tier `ssd` serves one device: checkpoints of several have the state "
                    "in them. Leave out --ssd-checkpoint, or `versions` of the machine"
                )
        overlaps: Any = {"auto": "auto", "none": False}.get(self.overlap, True)
        if overlaps is True and not (self.streams(machine) and self.activation_offload):
            raise ConfigError(
                f'overlap "{self.overlap}" needs weights that stream: set stream weights, or choose overlap "none"'
            )
        same = [each.name for each in fields(OffloadConfig) if each.name in self.__dataclass_fields__]
        given: dict[str, Any] = {name: getattr(self, name) for name in same}
        given["on_overflow"] = "ignore" if self.overlap == "backward" else "skip"
        return OffloadConfig(**given, overlap_step=overlaps)

    def workload(self, machine: Machine) -> Workload:
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
        self._adapted: dict[Any, Any] = {}  # models with adapters
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
        adapted = (settings.precision, settings.lora, settings.quantize)
        dtype = torch.bfloat16 if settings.precision == "bf16-true" else torch.float32
        if settings.lora is None:
            model = self._model.to(dtype)
        else:
            if adapted not in self._adapted:
                plain = model_on_meta(self.name).to(dtype)
                self._adapted[adapted] = with_lora(plain, settings.lora, settings.quantize)
            model = self._adapted[adapted]
        config, load = settings.config(machine), settings.workload(machine)
        key = (*adapted, settings.loss, load.batch, load.sequence, config.activation_offload, load.computes_on_host)
        if key not in self._measured:
            compute_loss = loss_on_meta(model, load.batch, load.sequence, chunked=settings.loss == "chunked")
            self._measured[key] = measure(model, config, load, compute_loss)
        plan = list_tensors(model, None, config, load, measured=self._measured[key])
        job = model_job(self.name, plan)
        room = policies.with_working_memory(job, machine)
        free = FreeMemory({tier.name: tier.capacity_bytes for tier in room.tiers}, room.memory_bytes).usable_bytes
        settled = settle_gradients(plan, free)
        if machine.ssd is not None:
            settled = settle_state(settled, free, machine.ssd, "spill")
        if settled is not plan:
            job = model_job(self.name, settled)
        is_absent = settings.state_on_device and not machine.device.is_host
        found = wide_experts(model), "the predicted step lacks the update on the device" if is_absent else None
        return replace(job, notes=(*job.notes, *filter(None, found)))


_USED_OF_DEVICE = 0.95  # of its memory, by units that stay there: the rest is for gaps between tensors


def loss_on_meta(model: Any, batch: int, sequence: int, *, chunked: bool = False) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        with chunked_loss(model) if chunked else nullcontext():
            # without a cache, which is their default, these models search position ids for packed sequences: they have
            # no values here
            return model(input_ids=ids, labels=ids, use_cache=True).loss  # type: ignore[no-any-return]

    return loss


class Step(NamedTuple):
    text: str
    flags: str = ""  # the same as options of `plan`; empty for another machine
    values: Mapping[str, Any] = {}  # fields of `Settings`
    machine: Machine | None = None


class Way(NamedTuple):
    steps: tuple[Step, ...]  # after which a job fits, and takes:
    host_bytes: int
    device_bytes: int | None

    @property
    def text(self) -> str:
        return ", ".join(step.text for step in self.steps)

    def command(self, before: str) -> str:
        """Return the command that plans it, "" where options cannot say it: the last options of `before` win."""
        parts = [before, *(step.flags for step in self.steps)]
        of_file = "--ssd DIR" in parts and "--tiers" in before.split()
        return "" if of_file or not all(parts) else " ".join(parts)


@dataclass(frozen=True, slots=True)
class Findings:
    model: str
    settings: Settings
    machine: Machine
    job: Job
    policy: str  # the one that is shown in full
    plans: Mapping[str, policies.PolicyPlan]
    dram_only: StepTime | None  # predicted as if DRAM were large enough; None where speeds are not known
    host_bytes: int
    ways: Sequence[Way] = ()  # what would make it fit, where it does not
    command: str = ""

    @property
    def chosen(self) -> policies.PolicyPlan:
        return self.plans[self.policy]

    @property
    def fits(self) -> bool:
        return self.chosen.fits and policies.fits_device(self.job, self.machine)


def main(arguments: Sequence[str]) -> int:
    options = parsers.plan().parse_args(arguments)
    parsers.check_target(options.json)
    settings = Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})
    machine = _machine(options)
    machine = machine.with_devices(machine.device.count if options.devices is None else options.devices)
    pairs = zip(("", *arguments), arguments, strict=False)
    shown = [each for before, each in pairs if "--json" not in (before, each) and not each.startswith("--json=")]
    command = shlex.join(["python", "-m", "lightning_cxl", "plan", *shown])
    found = make_plan(PlannedModel(options.model), settings, machine, options.policy, command=command)
    print(as_text(found), file=sys.stderr if options.json == parsers.TO_STDOUT else sys.stdout)
    if options.json is not None:
        parsers.write_text(options.json, json.dumps(as_data(found), indent=1) + "\n")
    return 0 if found.fits else DOES_NOT_FIT


def make_plan(
    model: PlannedModel, settings: Settings, machine: Machine, policy: str = "auto", *, command: str = ""
) -> Findings:
    """Plan a job under all policies; `policy`, a name or the import path of a class, is the one shown in full."""
    if policy == "auto":  # what a run takes
        policy = "bandwidth" if machine.has_speeds else "by_role"
    settings = _with_units_on_device(model, settings, machine)
    job = model.job(settings, machine)
    plans = policies.compare(job, machine, dict.fromkeys([*policies.POLICIES, policy]))
    if plans[policy].needs_speeds:
        raise ConfigError(
            f"policy {policy!r} needs the speeds of this machine's memory, and they are not known: measure them with "
            "`python -m lightning_cxl calibrate`, name a file (--tiers, as in examples/machines), or another policy"
        )
    predicted, host = policies.dram_only_time(job, machine), _host_bytes(job, machine)
    found = Findings(model.name, settings, machine, job, policy, plans, predicted, host, command=command)
    if not found.fits:
        return replace(found, ways=what_fits(model, settings, machine, policy))
    return replace(found, job=replace(job, notes=(*job.notes, *_faster(model, found))))


def _faster(model: PlannedModel, found: Findings) -> list[str]:
    """Return notes of settings that save time: what they take, and the step with them."""
    settings, machine, before = found.settings, found.machine, found.chosen.time
    if machine.device.is_host or before is None or found.job.device_bytes is None:
        return []
    others = {}
    if not (settings.state_on_device or settings.mesh(machine).is_sharded):
        others["state_on_device: true (--state-on-device)"] = replace(settings, state_on_device=True)
    if found.job.overlap == "forward" and settings.streams(machine):
        others['on_overflow="ignore" without clipping (--overlap backward)'] = replace(settings, overlap="backward")
    if settings.precision == "bf16-mixed":  # float32 weights stream
        true = replace(settings, precision="bf16-true", master="split")
        others["precision: bf16-true, with float32 master weights (--precision bf16-true)"] = true
    notes, room = [], _USED_OF_DEVICE * machine.device.memory_bytes
    for what, other in others.items():
        job = model.job(other, machine)
        after = policies.compare(job, machine, [found.policy])[found.policy].time
        if (job.device_bytes or 0) > room or after is None or after.seconds > 0.99 * before.seconds:
            continue
        more = (job.device_bytes or 0) - found.job.device_bytes
        taken = f"{format_bytes(abs(more)) if more else 'nothing'} {'less' if more < 0 else 'more'}"
        step = f"the step {after.seconds:.3f} s instead of {before.seconds:.3f} s"
        notes.append(f"{what} would take {taken} of {machine.device.name}, and {step}")
    return notes


def _with_units_on_device(model: PlannedModel, settings: Settings, machine: Machine) -> Settings:
    """Settle "auto": as many units as have room beside all else at its peak."""
    if settings.units_on_device != "auto":
        return settings

    def is_too_much(count: int) -> bool:
        job = model.job(replace(settings, units_on_device=count), machine)
        return job.device_bytes is None or job.device_bytes > _USED_OF_DEVICE * machine.device.memory_bytes

    none = replace(settings, units_on_device=0)
    if not settings.streams(machine) or none.mesh(machine).is_sharded:
        return none
    most = model.job(none, machine).num_units
    count = bisect.bisect_left(range(1, most), True, key=is_too_much) if is_too_much(most) else most
    return replace(settings, units_on_device=count)


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine of a file, or this one with what is free on it now."""
    given = {name: value for name in ("budget", "checkpoint") if (value := getattr(options, f"ssd_{name}")) is not None}
    if given and not options.ssd:
        raise ConfigError(f"--ssd-{next(iter(given))} needs --ssd, the folder of the tier")
    if options.tiers is not None:
        if options.ssd:
            raise ConfigError("--ssd is a folder of this machine: describe that of --tiers in its file, under `ssd`")
        return load_machine(options.tiers)
    ssd = read_ssd_options({"path": options.ssd, **given}) if options.ssd else None
    topology = Topology.detect() if ssd is None else Topology.detect().with_ssd(ssd)
    device = next((each.device.type for each in devices_apart()), "cpu")
    free = {tier.name: sum(topology.node_free_bytes(node) for node in tier.node_ids) for tier in topology.tiers}
    machine = machine_of(topology, device) or machine_without_speeds(topology, device)
    return machine.with_capacity(free, topology.host_available_bytes())  # tiers may share memory or a limit


def _host_bytes(job: Job, machine: Machine) -> int:
    """Return host memory in all, without the tier `ssd`; where the CPU computes, with its working memory."""
    return sum(job.bytes_of().values()) - job.ssd_bytes() + policies.working_bytes(job, machine)


def what_fits(model: PlannedModel, settings: Settings, machine: Machine, policy: str) -> list[Way]:
    """Return single changes that make the job fit, or else the fewest and cheapest together; adapters come last."""
    known: dict[tuple[str, ...], Way | None] = {}  # each may be a dry run

    def attempt(steps: Sequence[Step | None]) -> Way | None:
        taken = tuple(step for step in steps if step is not None)
        key = tuple(step.text for step in taken)
        if key not in known:
            known[key], job, changed, changed_machine = None, None, settings, machine
            for step in taken:
                changed, changed_machine = replace(changed, **step.values), step.machine or changed_machine
            with suppress(ConfigError, UnsupportedError):  # of settings that do not go together, or what is missing
                job = model.job(changed, changed_machine)
            if job is not None and policies.fits(job, changed_machine, policy):
                known[key] = Way(taken, _host_bytes(job, changed_machine), job.device_bytes)
        return known[key]

    def fewest(axes: Sequence[Sequence[Step]], *base: Step) -> Way | None:
        """Return the way of the cheapest axes together, each as weak as will do, without those that it does not need.

        An axis is the values of one option, the strongest last: where that does not help, the others do not either.
        """
        picked: list[Step | None] = []
        while attempt([*base, *picked]) is None:
            if len(picked) == len(axes):
                return None
            picked.append(axes[len(picked)][-1])
        for index in reversed(range(len(picked))):  # the most expensive first
            for weaker in (None, *axes[index][:-1]):
                less = [*picked[:index], weaker, *picked[index + 1 :]]
                if attempt([*base, *less]):
                    picked = less
                    break
        return attempt([*base, *picked])

    print("It does not fit; planning it with other settings ...", file=sys.stderr, flush=True)  # seconds each
    options, others = _options(settings, machine), _others(settings, machine)
    ways = [fewest([axis]) for axis in options]
    if not any(ways):
        ways = [fewest(options)]
    ways += [fewest([axis]) for axis in others]
    if not any(ways):
        ways = [fewest(options + others)]
    rank = settings.lora or _RANK
    lora = _step("lora", rank, f'adapters alone are trained, lora={{"r": {rank}}}')
    if settings.lora is None:
        ways.append(fewest(options + others, lora))
    if settings.quantize is None and not settings.mesh(machine).is_sharded:
        text = f'{lora.text}, on weights of 4 bit, quantization="4bit"'
        quantised = Step(text, f"{lora.flags} --quantize 4bit", {**lora.values, "quantize": "4bit"})
        ways.append(fewest(options + others, quantised))
    return [way for way in ways if way is not None]


def _step(name: str, value: Any, text: str = "", flag: str = "") -> Step:
    option = ("--no-" if value is False else "--") + (flag or name).replace("_", "-")
    shown = f'"{value}"' if isinstance(value, str) else value
    flags = option if isinstance(value, bool) else f"{option} {value}"
    return Step(text or f"{name}={shown}", flags, {name: value})


def _options(settings: Settings, machine: Machine) -> list[list[Step]]:
    """Return options that can be changed, the cheapest first; of each, its values, the strongest last."""
    chunked = "a loss that never holds all logits (`lightning_cxl.chunked_loss(model)` around the model's forward)"
    action = "ignore" if settings.mesh(machine).is_sharded else "error"
    backward = f'on_overflow="{action}" (gradients are used up in backward)'
    accumulates = settings.accumulate_grad_batches > 1
    hides = settings.streams(machine) and settings.overlap != "backward" and not accumulates
    cut = _step("between_nodes", "shard", "the model cut over all machines")
    formats = {"fp32": ["bf16", "8bit"], "bf16": ["8bit"], "8bit": []}[settings.state]
    axes = [
        (settings.state_on_device, [_step("state_on_device", False)]),
        (settings.units_on_device != 0, [_step("units_on_device", 0)]),
        (settings.loss == "full", [_step("loss", "chunked", chunked)]),
        (not settings.activation_offload, [_step("activation_offload", True)]),
        (settings.stream_weights is False and not machine.device.is_host, [_step("stream_weights", True)]),
        (settings.precision != "bf16-true", [_step("precision", "bf16-true")]),
        (settings.master == "fp32", [_step("master", "split")]),
        (hides, [_step("overlap", "backward", backward)]),
        (bool(formats), [_step("state", name) for name in formats]),
        (accumulates and settings.accumulate == "fp32", [_step("accumulate", "bf16")]),
        (settings.num_nodes > 1 and settings.between_nodes == "replicate", [cut]),
    ]
    return [steps for applies, steps in axes if applies]


def _others(settings: Settings, machine: Machine) -> list[list[Step]]:
    """Return what costs more than an option, as `_options` does: a drive, smaller inputs, another card."""
    axes: list[list[Step]] = []
    if machine.ssd is None:
        on_drives = replace(machine, ssd=MachineSsd(capacity_bytes=1 << 50))
        text = 'optimizer state and weights on a drive, tiers={"ssd": {"path": DIR}}'
        axes.append([Step(text, "--ssd DIR", machine=on_drives)])
    for name, flag in (("batch", "batch"), ("sequence", "seq")):
        sizes = [size for shift in (1, 2, 3) if (size := getattr(settings, name) >> shift)]
        axes.append([_step(name, size, f"{name} {size}", flag) for size in sizes])
    if cards := [tier for tier in machine.select(TierKind.CXL) if tier.backed_by is None]:
        name = next(f"cxl{i}" for i in range(len(machine.tiers) + 1) if f"cxl{i}" not in machine.names)
        together = None if machine.host_bytes is None else machine.host_bytes + cards[-1].capacity_bytes
        more = replace(machine, tiers=(*machine.tiers, replace(cards[-1], name=name)), host_bytes=together)
        axes.append([Step("another card like the last one", machine=more)])
    return [axis for axis in axes if axis]


def as_data(found: Findings) -> dict[str, Any]:
    """Return the findings as JSON-able data; seconds and tokens per second are predicted."""
    job, machine, device, time = found.job, found.machine, asdict(found.machine.device), found.chosen.time
    if not machine.has_speeds:  # placeholders
        device = {name: None if name.endswith("_per_s") or name == "flops" else v for name, v in device.items()}
    ssd = machine.ssd and {
        **asdict(machine.ssd),
        "used_bytes": job.ssd_bytes(machine.ssd.versions),
        "num_records": job.num_records,
        "read_bytes_per_step": job.moved_bytes("ssd_read"),
        "written_bytes_per_step": job.moved_bytes("ssd_write"),
    }
    return {
        "model": found.model,
        "settings": asdict(found.settings),
        "machine": {
            **{name: getattr(machine, name) for name in ("name", "source", "has_speeds")},
            "tiers": {t.name: {"kind": t.kind.value, "capacity_bytes": t.capacity_bytes} for t in machine.tiers},
            "device": device,
        },
        **{name: getattr(job, name) for name in ("num_parameters", "num_units", "num_tokens", "overlap")},
        "roles": {role.value: nbytes for role, nbytes in job.bytes_of().items()},
        "host_bytes": found.host_bytes,
        "host_bytes_left": machine.memory_bytes - found.host_bytes,
        "ssd": ssd,
        "device_bytes": job.device_bytes,
        "device_parts": dict(job.device_parts),
        "policy": found.policy,
        "fits": found.fits,
        "fits_device": policies.fits_device(job, machine),
        "what_fits": [
            {"text": way.text, "command": way.command(found.command)}
            | {name: getattr(way, name) for name in ("host_bytes", "device_bytes")}
            for way in found.ways
        ],
        "predicted_dram_only_seconds": found.dram_only and found.dram_only.seconds,
        "policies": {name: _policy_data(each, found) for name, each in found.plans.items()},
        "notes": list(job.notes),
        "ranks": {
            **asdict(job.mesh),
            "device_bytes_per_step": _per_device(job),
            "received_bytes_per_step": sum((each.nbytes for each in job.exchanges), 0.0),
            "predicted_busy_seconds": time and time.busy_seconds(),
            "predicted_bound_by": time and time.bound_by,
        },
    }


def _policy_data(plan: policies.PolicyPlan, found: Findings) -> dict[str, Any]:
    time, dram_only, predicted = plan.time, found.dram_only, None
    if time is not None and dram_only is not None:
        predicted = {
            "seconds": time.seconds,
            "tokens_per_s": found.job.num_tokens / time.seconds,
            "of_dram_only": dram_only.seconds / time.seconds,
            "hidden_seconds": time.hidden_seconds,
            "ssd_seconds": plan.ssd_seconds,
            "phases": {
                name: {"seconds": each.seconds, "bound_by": each.bound_by, "busy_seconds": dict(each.resources)}
                for name, each in time.phases().items()
            },
        }
    return {
        "fits": None if plan.needs_speeds else plan.fits,
        "needs_speeds": plan.needs_speeds,
        "error": plan.error,
        "bytes": {role.value: dict(tiers) for role, tiers in plan.bytes_on.items()},
        "reasons": {role.value: reason for role, reason in plan.reasons.items()},
        "predicted": predicted,
    }


def _per_device(job: Job) -> dict[str, float]:
    received = {each.name: each.nbytes for each in job.exchanges}
    return {
        "copies to the device": job.moved_bytes("h2d"),
        "copies from the device": job.moved_bytes("d2h"),
        **{name: received.get(name, 0.0) for name in COLLECTIVES},
    }


def as_text(found: Findings) -> str:
    """Return the findings as text that fits on one screen; sentences are wrapped at the terminal's width."""
    makers = (_head, _roles, _drives, _device, _ranks, _policies, _verdict)
    return "\n\n".join("\n".join(block) for make in makers if (block := make(found)))


def _head(found: Findings) -> list[str]:
    job, machine, chosen, ssd = found.job, found.machine, found.settings, found.machine.ssd
    adapters = f"adapters of rank {chosen.lora} on {chosen.quantize or 'frozen'} weights, " if chosen.lora else ""
    counts = ((chosen.accumulate_grad_batches, "micro-batches"), (machine.device.count, "devices"))
    times = "".join(f" x {count} {what}" for count, what in (*counts, (chosen.num_nodes, "machines")) if count > 1)
    tiers = ", ".join(f"{tier.name} {format_bytes(tier.capacity_bytes)}" for tier in machine.tiers)
    if machine.memory_bytes < sum(tier.capacity_bytes for tier in machine.tiers):
        tiers += f", {format_bytes(machine.memory_bytes)} together"
    if ssd is not None:
        tiers += f"; ssd {format_bytes(ssd.capacity_bytes)}{f' on {ssd.num_drives} drives' * (ssd.num_drives > 1)}"
    flops = f", {machine.device.flops / 1e12:.3g} TFLOP/s in training" if machine.has_speeds else ""
    return [
        *wrapped(
            f"Plan: {found.model}, {job.num_parameters:,} parameters in {job.num_units} units; {adapters}"
            f"{chosen.precision}, {chosen.state} state, {chosen.master} masters; "
            f"{chosen.batch} x {chosen.sequence} tokens{times}"
        ),
        *wrapped(f"Machine: {machine.name}: {tiers}; {machine.device.name}{flops}"),
        *(wrapped(f"  speeds: {machine.source}") if machine.source else []),
    ]


def _roles(found: Findings) -> list[str]:
    plan, job = found.chosen, found.job
    tiers = (*found.machine.names, SSD)[: None if job.ssd_bytes() else -1] if plan.bytes_on else ()
    rows = []
    for role, nbytes in job.bytes_of().items():
        on = plan.bytes_on.get(role, {})
        rows.append((role.value, format_bytes(nbytes), *(format_bytes(on[t]) if on.get(t) else "-" for t in tiers)))
    used = [format_bytes(plan.used_bytes(name)) for name in tiers]
    rows.append(("in all", format_bytes(sum(job.bytes_of().values())), *used))
    lines = table_lines((f"policy {found.policy}", "bytes", *tiers), rows)
    for reason in dict.fromkeys(plan.reasons.values()):
        roles = ", ".join(role.value for role, each in plan.reasons.items() if each == reason)
        lines += wrapped(f"  {roles}: {reason}")
    if working := policies.working_bytes(job, found.machine):
        total = format_bytes(found.host_bytes)
        lines.append(f"host memory in all: {total}, with {format_bytes(working)} that the CPU works in")
    return lines


def _drives(found: Findings) -> list[str]:
    job, machine, ssd = found.job, found.machine, found.machine.ssd
    if ssd is None or not job.moved_bytes("ssd_write"):
        return []
    roles = ", ".join(each.role.value for each in job.classes if each.tier == SSD)
    lines = wrapped(
        f"tier ssd: memory cannot hold all of {roles}: {format_bytes(job.ssd_bytes(ssd.versions))} of "
        f"{format_bytes(ssd.capacity_bytes)}{', optimizer state in two versions' if ssd.versions > 1 else ''}; memory "
        f"left over: {format_bytes(max(0, machine.memory_bytes - found.host_bytes))} of "
        f"{format_bytes(machine.memory_bytes)}; {job.moved_bytes('ssd_write') / 1e9:.3g} GB written per step"
    )
    if machine.has_speeds and not ssd.has_speeds:
        lines += wrapped("  no seconds are predicted: `python -m lightning_cxl calibrate --ssd DIR` measures drives")
    return lines


def _device(found: Findings) -> list[str]:
    job, device = found.job, found.machine.device
    if job.device_bytes is None:
        return []
    text = "the CPU's working memory" if device.is_host else f"{device.name} at its peak"
    text += f": {format_bytes(job.device_bytes)}"
    if device.memory_bytes and not device.is_host:
        verdict = "fits" if policies.fits_device(job, found.machine) else "DOES NOT FIT"
        text += f" of {format_bytes(device.memory_bytes)}: {verdict}"
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in job.device_parts.items())
    if staying := found.settings.units_on_device:
        parts += f"; {staying} of {job.num_units} units stay there (`units_on_device: {staying}`)"
    return [text, *wrapped(f"  {parts}")]


def _ranks(found: Findings) -> list[str]:
    mesh, machine = found.job.mesh, found.machine
    if not mesh.is_sharded:
        return []
    count = mesh.num_devices
    cut = "every machine holds the whole model" if mesh.replicates else "the model is cut over all of them"
    moved = {name: nbytes for name, nbytes in _per_device(found.job).items() if nbytes}
    rows = [(name, format_bytes(round(each)), format_bytes(round(each * count))) for name, each in moved.items()]
    lines = wrapped(f"{mesh.num_ranks} ranks, {count} on each machine: {cut}")
    lines += table_lines(("in one step", "each device", f"{count} devices"), rows)
    lines += wrapped(f"  host memory: {format_bytes(found.host_bytes)} of each machine, once for all of its ranks")
    if machine.links.peer_bytes_per_s is None and count > 1 and not machine.device.is_host:
        lines += wrapped(
            "  links between devices are not known: what they exchange is counted as going through host memory. Say "
            "how fast they are under `links` in a machine file (--tiers)"
        )
    return lines


def _policies(found: Findings) -> list[str]:
    """Return a row of predicted times per policy, why others do not fit, and the phases of the chosen one."""
    dram_only, tokens = found.dram_only, found.job.num_tokens
    # with one tier all policies do the same
    plans = found.plans if len(found.machine.tiers) > 1 else {found.policy: found.chosen}
    lines: list[str] = []
    if dram_only is not None:
        rows = []
        for name, time in (*((name, plan.time) for name, plan in plans.items()), ("were DRAM large enough", dram_only)):
            if time is None:  # it does not fit, see below
                continue
            phases = (f"{each.seconds:.3f}" for each in time.phases().values())
            speed = (f"{time.seconds:.3f}", f"{tokens / time.seconds:,.0f}", f"{dram_only.seconds / time.seconds:.1%}")
            rows.append((name, *phases, *speed))
        phases = (f"{name} s" for name in dram_only.phases())
        lines = table_lines(("predicted", *phases, "step s", "tokens/s", "of DRAM only"), rows)
    for name, plan in plans.items():
        lines += wrapped(f"{name} does not fit: {plan.error}") if plan.error else []
    if dram_only is None:
        lines += wrapped("predicted seconds are not known: `python -m lightning_cxl calibrate` measures this machine")
    elif found.chosen.time:
        lines += wrapped(f"predicted, {found.policy}: {found.chosen.time.describe()}")
    return lines


def _verdict(found: Findings) -> list[str]:
    device, job = found.machine.device, found.job
    notes = list(job.notes)
    if found.settings.precision == "32-true" and found.machine.has_speeds:
        notes.append("the device's flops are those of bfloat16 products: float32 computes longer than predicted")
    if found.fits:
        known = device.is_host or (job.device_bytes is not None and device.memory_bytes)
        lines = ["It fits." if known else f"It fits the host; whether it fits {device.name} is not known."]
    else:
        where = [f"host memory (policy {found.policy})"] if found.chosen.error else []
        where += [] if policies.fits_device(job, found.machine) else [f"{device.name}'s memory"]
        ways = "What would make it fit, each way on its own:" if found.ways else "Nothing helps: use a smaller model."
        lines = [f"It does not fit {' nor '.join(where)}.", ways]
    for way in found.ways:
        taken = f"{format_bytes(way.host_bytes)} of host memory"
        if not device.is_host and way.device_bytes is not None:
            taken += f", {format_bytes(way.device_bytes)} of {device.name}"
        lines += wrapped(f"  {way.text}: {taken}")
        lines += [f"    {command}"] if (command := way.command(found.command)) else []
    return lines + [line for note in notes for line in wrapped(f"note: {note}")]
