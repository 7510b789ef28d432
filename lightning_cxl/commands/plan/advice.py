"""`what_fits`: ways to a job that fits where one does not: single changes that do, or else the fewest and cheapest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_cxl.commands.plan.planned_model import PlannedModel
from lightning_cxl.commands.plan.settings import Settings
from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.machine.machine import Machine, MachineSsd
from lightning_cxl.machine.topology import TierKind
from lightning_cxl.planning.compare import fits, working_bytes

_LARGE_BYTES = 1 << 50
_MOST_HALVES = 3
_RANK = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One change of a job or its machine."""

    text: str
    flags: str = ""
    """The same as options of `plan`; "" for another machine."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Settings`."""
    machine: Machine | None = None


@dataclass(frozen=True, slots=True)
class Way:
    """Steps after which a job fits, and what it takes then."""

    steps: tuple[Step, ...]
    host_bytes: int
    device_bytes: int | None

    @property
    def text(self) -> str:
        """What to do."""
        return ", ".join(step.text for step in self.steps)

    def command(self, before: str) -> str:
        """Return the command that plans it; "" where the machine is another one, which options cannot say.

        Args:
            before: the command that planned what does not fit; its last options win.
        """
        flags = [step.flags for step in self.steps]
        of_file = "--ssd DIR" in flags and "--tiers" in before.split()
        return "" if of_file or not all((before, *flags)) else " ".join((before, *flags))


def what_fits(model: PlannedModel, settings: Settings, machine: Machine, policy: str) -> list[Way]:
    """Return ways to make the job fit, the cheapest first; adapters, which train something else, come last.

    Args:
        model: to train.
        settings: that do not fit.
        machine: that they do not fit on.
        policy: that places.
    """
    found: dict[tuple[str, ...], Way | None] = {}

    def attempt(steps: tuple[Step, ...]) -> Way | None:
        key = tuple(step.text for step in steps)
        if key not in found:
            found[key] = _attempt(model, settings, machine, policy, steps)
        return found[key]

    def weakest(axis: Sequence[Step]) -> Way | None:
        # the strongest first: where it does not help, the others need no look, and each look may be a dry run
        return next(way for step in axis if (way := attempt((step,)))) if attempt((axis[-1],)) else None

    options, others = _options(settings, machine.device.is_host), _others(settings, machine)
    ways = [weakest(axis) for axis in options]
    if not any(ways):
        ways = [_fewest(attempt, (), options)]
    ways += [weakest(axis) for axis in others]
    axes = options + others
    if not any(ways):
        ways = [_fewest(attempt, (), axes)]
    ways += [attempt((base,)) or _fewest(attempt, (base,), axes) for base in _adapters(settings, machine)]
    return [way for way in ways if way is not None]


def _attempt(
    model: PlannedModel, settings: Settings, machine: Machine, policy: str, steps: Sequence[Step]
) -> Way | None:
    for step in steps:
        settings = replace(settings, **step.values)
        machine = step.machine or machine
    try:
        job = model.job(settings, machine).job
    except (ConfigError, UnsupportedError):
        return None  # settings that do not go together, or need what is not installed
    host_bytes = sum(job.bytes_of().values()) - job.ssd_bytes + working_bytes(job, machine)
    return Way(tuple(steps), host_bytes, job.device_bytes) if fits(job, machine, policy) else None


def _fewest(
    attempt: Callable[[tuple[Step, ...]], Way | None], base: tuple[Step, ...], axes: Sequence[Sequence[Step]]
) -> Way | None:
    """Return the way of the cheapest axes together, without what is not needed of them; None if all do not suffice."""

    def together(picked: Sequence[Step | None]) -> Way | None:
        return attempt((*base, *(step for step in picked if step is not None)))

    picked: list[Step | None] = []
    for axis in axes:
        picked.append(axis[-1])
        if way := together(picked):
            break
    else:
        return None
    for index in reversed(range(len(picked))):  # the most expensive first
        for weaker in (None, *axes[index][:-1]):
            without = [*picked[:index], weaker, *picked[index + 1 :]]
            if less := together(without):
                picked, way = without, less
                break
    return way


def _options(settings: Settings, is_host: bool) -> list[list[Step]]:
    """Return options that can be changed, the cheapest first; of each, the values from the weakest to the strongest."""
    streams = not is_host if settings.stream_weights == "auto" else settings.stream_weights
    axes: list[list[Step]] = []

    def may(condition: bool, *steps: Step) -> None:
        if condition and steps:
            axes.append(list(steps))

    chunked = "a loss that never holds all logits (`lightning_cxl.chunked_loss(model)` around the model's forward)"
    may(settings.loss == "full", Step(chunked, "--loss chunked", {"loss": "chunked"}))
    offload = Step("activation_offload=True", "--activation-offload", {"activation_offload": True})
    may(not settings.activation_offload, offload)
    stream = Step("stream_weights=True", "--stream-weights", {"stream_weights": True})
    may(not is_host and settings.stream_weights is False, stream)
    narrow = Step('precision="bf16-true"', "--precision bf16-true", {"precision": "bf16-true"})
    may(settings.precision != "bf16-true", narrow)
    may(settings.master == "fp32", Step('master="split"', "--master split", {"master": "split"}))
    backward = Step(
        'on_overflow="ignore" (gradients are used up in backward)', "--overlap backward", {"overlap": "backward"}
    )
    may(streams and settings.overlap != "backward" and settings.accumulate_grad_batches == 1, backward)
    formats = {"fp32": ["bf16", "8bit"], "bf16": ["8bit"], "8bit": []}[settings.state]
    may(True, *(Step(f'state="{name}"', f"--state {name}", {"state": name}) for name in formats))
    sums = Step('accumulate="bf16"', "--accumulate bf16", {"accumulate": "bf16"})
    may(settings.accumulate_grad_batches > 1 and settings.accumulate == "fp32", sums)
    in_parts = {"between_nodes": "shard", "weights": "gathered"}
    cut = Step("the model cut over all machines", "--between-nodes shard --weights gathered", in_parts)
    may(settings.num_nodes > 1 and settings.between_nodes == "replicate", cut)
    return axes


def _others(settings: Settings, machine: Machine) -> list[list[Step]]:
    """Return what costs more than an option, as `_options` does: a drive, smaller inputs, more memory."""
    axes: list[list[Step]] = []
    on_drives = replace(machine, ssd=MachineSsd(capacity_bytes=_LARGE_BYTES))
    drive = Step('optimizer state and weights on a drive, tiers={"ssd": {"path": DIR}}', "--ssd DIR", machine=on_drives)
    if machine.ssd is None:
        axes.append([drive])
    for name, flag in (("batch", "--batch"), ("sequence", "--seq")):
        sizes = [getattr(settings, name) >> shift for shift in range(1, _MOST_HALVES + 1)]
        axes.append([Step(f"{name} {size}", f"{flag} {size}", {name: size}) for size in sizes if size])
    more = _with_another_card(machine)
    if more is not None:
        axes.append([Step("another card like the last one", machine=more)])
    return [axis for axis in axes if axis]


def _adapters(settings: Settings, machine: Machine) -> list[Step]:
    """Return what trains less than the settings."""
    rank = settings.lora or _RANK
    lora = Step(f'adapters alone are trained, lora={{"r": {rank}}}', f"--lora {rank}", {"lora": rank})
    quantised = Step(
        f'{lora.text}, on weights of 4 bit, quantization="4bit"',
        f"{lora.flags} --quantize 4bit",
        {"lora": rank, "quantize": "4bit"},
    )
    steps = [lora] if settings.lora is None else []
    return [*steps, quantised] if settings.quantize is None and not settings.mesh(machine).is_sharded else steps


def _with_another_card(machine: Machine) -> Machine | None:
    cards = [tier for tier in machine.select(TierKind.CXL) if tier.backed_by is None]
    if not cards:
        return None
    name = next(f"cxl{i}" for i in range(len(machine.tiers) + 1) if f"cxl{i}" not in machine.names)
    together = None if machine.host_bytes is None else machine.host_bytes + cards[-1].capacity_bytes
    return replace(machine, tiers=(*machine.tiers, replace(cards[-1], name=name)), host_bytes=together)
