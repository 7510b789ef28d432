"""The options of offloading: `OffloadConfig`, and where each value came from."""

import contextlib
import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lightning_cxl.errors import ConfigError
from lightning_cxl.text import parse_bytes

SSD = "ssd"  # name of the one tier that has a path
SsdCheckpoint = Literal["copy", "reference"]
_EXAMPLE = '{"ssd": {"path": "/nvme/run", "budget": "1TiB"}}'
_OPTIONS = ("path", "budget", "checkpoint")


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """Where the tier `ssd` lies, and how much of it may be used."""

    paths: tuple[Path, ...]  # one folder per drive; every record is cut evenly over them
    budget_bytes: int | None = None
    """Most bytes on all drives together. None: what is free there."""
    checkpoint: SsdCheckpoint = "copy"
    """``"copy"``: a checkpoint has the state in it. ``"reference"``: it names the version of the state on the drives,
    which is kept until the next checkpoint."""
    is_part: bool = False
    """Whether the folders are those of one of several processes, below the ones that the user has named."""

    @property
    def versions(self) -> int:
        """How often every byte lies on the drives: a version that a checkpoint refers to stays beside the new one."""
        return 2 if self.checkpoint == "reference" else 1


def read_ssd_options(value: object) -> SsdOptions:
    if isinstance(value, Mapping) and "key" in value:  # first: the other messages show the value
        raise ConfigError(
            'tiers: "ssd" has no option "key" any more: this package does not encrypt. Put the folder on a filesystem '
            "that is encrypted, with LUKS (`cryptsetup`) or `fscrypt`, and leave the key out"
        )
    if not isinstance(value, Mapping) or "path" not in value:
        raise ConfigError(f'tiers: "ssd" needs a path, the folder of its files, as in {_EXAMPLE}; got {value!r}')
    unknown = sorted(str(name) for name in value if name not in _OPTIONS)
    if unknown:
        raise ConfigError(
            f'tiers: "ssd" has no option {", ".join(map(repr, unknown))}; its options are {", ".join(_OPTIONS)}'
        )
    checkpoint = value.get("checkpoint", "copy")
    if checkpoint not in ("copy", "reference"):
        raise ConfigError(f'tiers: checkpoint of "ssd" must be "copy" or "reference", got {checkpoint!r}')
    budget = None if value.get("budget") is None else _budget(SSD, value["budget"])
    return SsdOptions(_paths(value["path"]), budget, checkpoint)


def _paths(value: object) -> tuple[Path, ...]:
    paths = []
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        if not isinstance(each, str) or not each:
            raise ConfigError(f'tiers: path of "ssd" must be a folder, or a list with one on each drive, got {value!r}')
        paths.append(Path(os.path.abspath(os.path.expanduser(each))))
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError(f'tiers: path of "ssd" must name at least one folder, and none twice, got {value!r}')
    return tuple(paths)


Origin = Literal["argument", "environment", "default"]
OnTierFull = Literal["spill", "error"]
_PREFIX = "LIGHTNING_CXL_"
_OTHER_VARIABLES = ("isa", "cache")
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """How training state is spread over the host's memory tiers.

    Every field can also be given as environment variable ``LIGHTNING_CXL_<FIELD>``, see `resolve`. The
    strategies show this list as their own arguments.

    Args:
        tiers: Byte budget per tier: ``{"cxl": "64GiB"}`` or ``{"cxl": {"budget": "64GiB"}}``. A tier that is not named
            is limited by its free memory alone. The tier ``ssd`` is there only where it is named, with the folder of
            its files, or several on several drives: ``{"ssd": {"path": "/nvme/run", "budget": "1TiB", "checkpoint":
            "copy"}}``.
        tier_rules: Module name pattern -> tier, or -> ``{"weights" | "gradients" | "optimizer_state" | "activations":
            tier}``. The last matching rule wins; a pattern also matches what the named module contains.
        policy: Places what no rule or decorator does: ``"dram_only"``, ``"interleave"``, ``"latency_first"`` or
            ``"bandwidth"``, or the import path of a class of your own; the strategies also take an object with the
            method of `PlanningPolicy`. ``"auto"`` is ``"bandwidth"`` where there is
            more than one kind of memory and speeds are known; elsewhere ``"by_role"``: every kind of tensor has a
            preferred tier.
        machine: YAML file with speeds of this machine's tiers, which win over its calibration and the firmware's
            ratings.
        batch_tokens: Tokens of one micro-batch, sequences times their length: lets policies that plan keep room for
            activations and weigh copies against compute. None: both are left out.
        activation_offload: Keep only each unit's input, on its activation tier, and compute the unit again in the
            backward pass.
        units: The modules that are offloaded as one: ``"auto"`` (the model's repeated blocks), or module name patterns
            or class names.
        stream_weights: Keep the weights of units in host memory and bring each unit to the device when it computes;
            needs `activation_offload`. ``"auto"`` does so when the device has memory of its own.
        units_on_device: How many units keep their weights on the device instead, those first that no step writes: what
            has room there need not be copied. `plan --units-on-device auto` says how many have. With one process.
        state_on_device: Keep the state of `CPUAdam` of trained weights that stay on the device there as well, and
            update them there: embeddings, the head, norms, and `units_on_device`. It takes 12 bytes of the device per
            parameter, 8 of float32 weights. What a decorator or rule asks a tier for stays on the host. With one
            process.
        overlap_step: Run `CPUAdam` unit after unit behind the next forward, and behind the backward where nothing can
            call the step off: ``on_overflow="ignore"`` or, with one process, ``"error"``, no clipping, no loss scaling,
            no hook that looks at gradients. ``"auto"`` does so when the device is apart from the host. Losses are the
            same.
        cpu_adam: Replace ``torch.optim.Adam`` and ``AdamW`` by the compiled `CPUAdam`.
        state: How `CPUAdam` keeps momentum and variance: 8, 4 or about 2 bytes per parameter. ``"8bit"`` leaves
            embeddings and norms in float32; all but ``"fp32"`` do so with parameters under 4,096 elements.
        master: How `CPUAdam` keeps the master weights of bfloat16 weights: as their lower 16 bits (2 bytes per
            parameter), or as float32 copies (4). Both train the same, bit for bit.
        accumulate: In which precision bfloat16 gradients of several micro-batches are added up for `CPUAdam`;
            ``"bf16"`` rounds stochastically and saves 2 bytes per parameter.
        on_overflow: When a gradient is infinite or not a number: leave the step out and warn, end the run, or do not
            look. ``"skip"`` needs all gradients before the first update.
        max_overflows: Steps left out in a row after which the run stops. A loss scaler needs up to about 16 at the
            start.
        num_threads: Threads of the optimizer's kernels. None: every CPU that this process may use; two fewer, at least
            one, where they run behind what a device does, for the threads that keep it busy.
        numa_binding: Where a process that shares its machine with others runs and allocates. ``"auto"``: on cores of
            its own of the socket of its device, with memory near these first, where there are several processes and
            several sockets; a process that its launcher has bound keeps its CPUs. ``"node"``, ``"socket"``,
            ``"exclusive"`` and ``"core-complex"`` are the modes of ``torchrun --numa-binding``, for GPUs. False:
            wherever the system puts it.
        on_missing_tier: Without CXL memory in the machine: back tier ``cxl`` by DRAM, with one warning, when something
            asks for it by name; or refuse to start.
        on_tier_full: When a tier's budget or memory is used up: go on with the next tier and warn once, or refuse.
        pin_memory: Page-lock host memory that a device copies to or from; ``"auto"``: where the device has memory of
            its own.
        replicate_machines: With several machines: every machine holds all of the training state, sharded over its
            ranks, so weights are gathered inside it and only gradients cross between machines. False: the state is
            sharded over all ranks.
        report: Folder for a page about each run, written when it ends: ``run.html``, or one for each rank.
    """

    tiers: Mapping[str, Mapping[str, int | str | Sequence[str]] | int | str] = field(default_factory=dict)
    tier_rules: Mapping[str, Mapping[str, str] | str] = field(default_factory=dict)
    policy: str = "auto"
    machine: str | None = None
    batch_tokens: int | None = None
    activation_offload: bool = True
    units: str | Sequence[str] = "auto"
    stream_weights: bool | Literal["auto"] = "auto"
    units_on_device: int = 0
    state_on_device: bool = False
    overlap_step: bool | Literal["auto"] = "auto"
    cpu_adam: bool = True
    state: Literal["fp32", "bf16", "8bit"] = "fp32"
    master: Literal["split", "fp32"] = "split"
    accumulate: Literal["fp32", "bf16"] = "fp32"
    on_overflow: Literal["skip", "error", "ignore"] = "skip"
    max_overflows: int = 20
    num_threads: int | None = None
    numa_binding: Literal["auto", False, "node", "socket", "exclusive", "core-complex"] = "auto"
    on_missing_tier: Literal["fallback", "error"] = "fallback"
    on_tier_full: OnTierFull = "spill"
    pin_memory: bool | Literal["auto"] = "auto"
    replicate_machines: bool = False
    report: str | None = None

    def __post_init__(self) -> None:
        self.budgets()
        self.ssd()
        if not isinstance(self.tier_rules, Mapping):
            raise ConfigError(f"tier_rules must map module name patterns to tiers, got {short(self.tier_rules)}")
        for pattern, wanted in self.tier_rules.items():
            tiers = list(wanted.values()) if isinstance(wanted, Mapping) else [wanted]
            if not isinstance(pattern, str) or not tiers or not all(isinstance(tier, str) and tier for tier in tiers):
                raise ConfigError(
                    f"tier_rules: {pattern!r}: {short(wanted)} must be a tier name or map weights, gradients, "
                    "optimizer_state or activations to tier names"
                )
        if not isinstance(self.policy, str) or not self.policy:
            raise ConfigError(f"policy must be a policy's name or the import path of a class, got {short(self.policy)}")
        for name, what in (("machine", "a YAML file"), ("report", "a folder")):
            if (path := getattr(self, name)) is not None and not isinstance(path, str):
                raise ConfigError(f"{name} must be the path of {what} or None, got {short(path)}")
        for name, hint in get_type_hints(type(self)).items():
            if choices := _choices(hint):
                value = getattr(self, name)  # compares types, too: 1 == True
                if not any(value == choice and type(value) is type(choice) for choice in choices):
                    raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {short(value)}")
        if self.stream_weights is True and not self.activation_offload:
            raise ConfigError(
                "stream_weights=True needs activation_offload=True: a unit whose weights have left is recomputed"
            )
        if self.overlap_step is True and (self.stream_weights is False or not self.cpu_adam):
            raise ConfigError("overlap_step=True needs stream_weights and cpu_adam: it is for streamed units")
        if self.state != "fp32" and not self.cpu_adam:
            raise ConfigError(
                f"state={self.state!r} needs cpu_adam=True: it is an option of `CPUAdam`, which replaces torch's Adam "
                "and AdamW. With cpu_adam=False every optimizer keeps its state as it likes"
            )
        for name, counted, least in (
            ("batch_tokens", "tokens", 1), ("max_overflows", "steps", 1), ("num_threads", "threads", 1),
            ("units_on_device", "units", 0),
        ):  # fmt: skip
            value, may_be_none = getattr(self, name), name in ("batch_tokens", "num_threads")
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
            if not is_count and not (may_be_none and value is None):
                wanted = ("a positive number" if least else "a number") + f" of {counted}" + " or None" * may_be_none
                raise ConfigError(f"{name} must be {wanted}, got {value!r}")
        names = [self.units] if isinstance(self.units, str) else self.units
        if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) and n for n in names):
            raise ConfigError(
                f'units must be "auto", a module name pattern or class name, or several, got {short(self.units)}'
            )

    def budgets(self) -> dict[str, int]:
        """Return the byte budget of every tier of memory that has one."""
        if not isinstance(self.tiers, Mapping):
            raise ConfigError(f'tiers must map names to budgets, such as {{"cxl": "64GiB"}}, got {short(self.tiers)}')
        return {name: _budget(name, value) for name, value in self.tiers.items() if name != SSD}

    def ssd(self) -> SsdOptions | None:
        return read_ssd_options(self.tiers[SSD]) if SSD in self.tiers else None

    @property
    def refers_to_ssd(self) -> bool:
        options = self.ssd()
        return options is not None and options.checkpoint == "reference"

    def streams_weights(self, computes_on_host: bool) -> bool:
        """Return whether the weights of units stream, if the model has units."""
        choice = not computes_on_host if self.stream_weights == "auto" else self.stream_weights
        return choice and self.activation_offload

    def overlaps_step(self, computes_on_host: bool) -> bool:
        """Return whether updates of streamed units run behind what the device does."""
        choice = not computes_on_host if self.overlap_step == "auto" else self.overlap_step
        return choice and self.cpu_adam

    def describe(self, origins: Mapping[str, Origin]) -> dict[str, dict[str, Any]]:
        """Return every field as ``{"value": ..., "origin": ...}`` for a report; `origins` as `resolve` returns them."""
        return {f.name: {"value": getattr(self, f.name), "origin": origins[f.name]} for f in fields(self)}

    @classmethod
    def resolve(cls, **explicit: Any) -> tuple["OffloadConfig", dict[str, Origin]]:
        """Build the configuration from arguments, environment and defaults, in that precedence.

        Where every field is given, as LightningCLI does, one equal to its default counts as not given.
        Environment: numbers, names and ``true``/``false`` as they are; lists as ``a,b``; mappings as
        ``cxl=64GiB,dram=8GiB`` or in JSON.

        Returns:
            The configuration, and for every field where its value came from.

        Raises:
            ConfigError: an unknown argument, or a value that cannot be honoured.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(explicit) - set(names))
        if "share_weights" in unknown or f"{_PREFIX}SHARE_WEIGHTS" in os.environ:
            raise ConfigError(
                "option share_weights was removed: leave it out. A model that FSDP2 cuts has one copy of its weights "
                "on each machine"
            )
        if unknown:
            near = _nearest(unknown[0], names)
            asked = f": did you mean {near}?" if near else f"; the options are: {', '.join(names)}"
            raise ConfigError(f"unknown option {', '.join(map(repr, unknown))}{asked}")
        variables = [name.upper() for name in (*names, *_OTHER_VARIABLES)]
        for variable in os.environ:
            name = variable.removeprefix(_PREFIX)
            if name not in (variable, *variables) and (near := _nearest(name, variables)):
                raise ConfigError(f"environment variable {variable} is no option: did you mean {_PREFIX}{near}?")
        default = cls()
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        all_given = len(explicit) == len(names)
        for name in names:
            origins[name] = "default"
            if name in explicit and not (all_given and explicit[name] == getattr(default, name)):
                values[name], origins[name] = explicit[name], "argument"
            elif _PREFIX + name.upper() in os.environ:
                values[name], origins[name] = _read_environment(name), "environment"
        return cls(**values), origins


def show_options(kind: type) -> None:
    """Put the fields of `OffloadConfig` in place of ``**options``: in the signature of a class, and in its docstring.

    LightningCLI, `help` and notebooks read them; so names, types, defaults and texts are written down only once.
    """
    arguments = (OffloadConfig.__doc__ or "").partition("    Args:\n")[2].rstrip()
    kind.__doc__ = re.sub(r"^ +\*\*options: .*\n", lambda _: f"{arguments}\n", kind.__doc__ or "", flags=re.MULTILINE)
    init: Any = kind.__init__  # type: ignore[misc]
    types, defaults = get_type_hints(OffloadConfig), OffloadConfig()
    options = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=getattr(defaults, f.name), annotation=types[f.name])
        for f in fields(OffloadConfig)
    ]
    own = [p for p in signature(init, eval_str=True).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
    init.__signature__ = Signature([*own, *options])


def _nearest(name: str, names: Sequence[str]) -> str:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.82)), "")


def _budget(name: object, value: object) -> int:
    if not isinstance(name, str) or not name:
        raise ConfigError(f'tiers must map tier names to budgets, such as {{"cxl": "64GiB"}}, got the name {name!r}')
    if isinstance(value, Mapping):
        if set(value) != {"budget"}:
            raise ConfigError(
                f'tiers: {name!r} has one option, "budget", got {sorted(map(str, value))}. Only "ssd" has a path'
            )
        value = value["budget"]
    if not isinstance(value, (int, float, str)):
        raise ConfigError(f'tiers: the budget of {name!r} must be bytes or a size such as "64GiB", got {short(value)}')
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ConfigError(f"tiers: the budget of {name!r}: {error}") from None


def _choices(hint: Any) -> tuple[object, ...]:
    """Return the values that an option may have; empty where its type does not list them."""
    if hint is bool:
        return (True, False)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(choice for part in get_args(hint) for choice in _choices(part))


def _read_environment(name: str) -> object:
    variable, text = _PREFIX + name.upper(), os.environ[_PREFIX + name.upper()].strip()
    try:
        if name in ("tiers", "tier_rules"):
            if text.startswith("{"):
                return json.loads(text)
            pairs = [part.partition("=") for part in text.split(",") if part.strip()]
            if not all(separator for _, separator, _ in pairs):
                raise ValueError("write name=value,name=value or JSON")
            return {key.strip(): value.strip() for key, _, value in pairs}
        if name == "units":
            return text if "," not in text else [part.strip() for part in text.split(",")]
        if name in ("num_threads", "max_overflows", "batch_tokens"):
            return int(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {variable}={text!r} cannot be read: {error}") from None
    return True if text.lower() in _TRUE else False if text.lower() in _FALSE else text


def cache_folder() -> Path:
    """Return the folder of our caches: environment variable LIGHTNING_CXL_CACHE, else ``~/.cache/lightning_cxl``."""
    root = os.environ.get("LIGHTNING_CXL_CACHE")
    return Path(root).expanduser() if root else Path.home() / ".cache" / "lightning_cxl"


def private_folder(name: str) -> Path:
    """Return a folder in the cache that nobody else may enter: it holds texts and chats. It is made if need be."""
    folder = cache_folder() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(PermissionError):  # it is somebody else's, who has let us in
        folder.chmod(0o700)
    return folder
