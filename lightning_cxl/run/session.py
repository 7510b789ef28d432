"""For front ends. `Session`: the options, this machine's memory, and the runs in it. Models cut over processes.

Lightning has one run after the other. A loop of the user's own has one run for each model, side by side: in DPO, one
that is trained and one that is frozen.
"""

import logging
import textwrap
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_cxl import timing
from lightning_cxl.config import SSD, OffloadConfig
from lightning_cxl.errors import UnsupportedError
from lightning_cxl.inventory.tensors import Loop
from lightning_cxl.machine import recorder
from lightning_cxl.machine.binding import RankBinding, RankFacts, bind_rank
from lightning_cxl.machine.topology import Topology, memory_pressure
from lightning_cxl.memory.hook import active
from lightning_cxl.planning.policies import check_policy
from lightning_cxl.run.report_page import ROLE_HEADS, TIER_HEADS, Report, Samples, role_rows, tier_rows
from lightning_cxl.run.run import FinishedRun, Host, Run
from lightning_cxl.sharding.fsdp import cut, reshard
from lightning_cxl.sharding.processes import on_all_ranks
from lightning_cxl.shards import shard_of, sharded_like
from lightning_cxl.streaming.quantised import kept_whole, tensors_of
from lightning_cxl.streaming.units import find_units, owners_in
from lightning_cxl.text import format_bytes, table_lines
from lightning_cxl.weights.files import UnreadWeight
from lightning_cxl.weights.models import refuse_unready

log = logging.getLogger(__name__)

# Planned and measured bytes per tier and role: the dict behind `strategy.report()` and its one-screen text.

_WIDTH = 110
_MAX_REASONS = 8


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as text of at most about forty lines of at most 110 columns."""
    lines = [f"CXL offload on {report['device']}, {report['state']}"]
    if (ranks := report.get("ranks")) is not None:
        lines[0] += ", rank {rank} of {num_ranks}, local rank {local_rank} of {num_local_ranks}".format_map(ranks)
        lines.append("bytes are of this rank; capacities are of the machine, parameters of the whole model")
    lines += table_lines(TIER_HEADS, tier_rows(report))
    if rows := role_rows(report):
        total, most = (
            sum(nbytes for tiers in report[key].values() for tier, nbytes in tiers.items() if tier != SSD)
            for key in ("planned_roles", "peak_roles")
        )
        of_plan = f" ({100 * most / total:.0f} %)" if total else ""
        lines += ["", *table_lines(ROLE_HEADS, rows, left=2)]
        lines.append(
            f"in all, each role at its peak: planned {format_bytes(total)}, peak {format_bytes(most)}{of_plan}"
        )
    lines += ["", f"policy: {report['policy']}"]
    for role, reasons in list(report["reasons"].items())[:_MAX_REASONS]:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        text = textwrap.shorten(f"{role}: {reasons[0]}", _WIDTH - 2 - len(more), placeholder=" ...")
        lines.append(f"  {text}{more}")
    lines.append(f"parameters: {report['num_parameters']:,} ({report['num_trainable']:,} trained)")
    units = report["units"]
    if not units:
        lines.append("units: none (activations stay where the model puts them)")
    elif len(units) == 1:
        lines.append(f"units: {units[0]}")
    else:
        where = "inputs kept on the activation tier, recomputed in backward"
        lines.append(f"units: {len(units)} blocks, {units[0]} to {units[-1]}, {where}")
    if streamed := report["streamed"]:
        lines.append(
            f"streamed weights: {format_bytes(streamed['host_bytes'])} of {streamed['num_units']} units through "
            f"{format_bytes(streamed['slot_bytes'])} on the device, {streamed['num_fetches']} copies, "
            f"{streamed['num_late']} not fetched ahead"
        )
    if moved := report["ssd"]:
        read, written = (f"{moved[f'{way}_bytes_per_step'] / 1e9:.3g} GB {way}" for way in ("read", "written"))
        lines.append(
            f"tier ssd, {moved['num_steps']:,.0f} steps of {moved['step_seconds']:.2f} s: {read} and {written} per step"
        )
    lines += [f"optimizer: {text}" for text in report["optimizers"]]
    lines += [f"note: {text}" for text in report["notes"]]
    return "\n".join(lines)


class Session:
    """Memory and the runs in it; see [Note: Order of life]. A copy or a pickle has the options alone.

    Args:
        **options: the fields of `OffloadConfig`; ``policy`` may also be an object with the method of `PlanningPolicy`.
    """

    def __init__(self, **options: Any) -> None:
        given = options.get("policy", "auto")
        self._policy = None if isinstance(given, str) else options.pop("policy")
        self.config, self.origins = OffloadConfig.resolve(**options)
        check_policy(self.config.policy if self._policy is None else self._policy)
        self._binding: RankBinding | None = None
        self._ranks: dict[str, int] | None = None
        self._forget()

    def _forget(self) -> None:
        self.host: Host | None = None  # memory and policy of the next or present run
        self.runs: list[Run] = []  # the runs that are going on, in the order in which they began
        self._finished: FinishedRun | None = None
        self._begun: dict[str, float] = {}  # totals when the first run began
        self._seen: tuple[dict[str, float], list[timing.Span], Samples] = ({}, [], [])  # of the last run
        self._measured: dict[str, float] = {}  # totals when `metrics` was asked last, or the first run began
        self._recorder: recorder.Recorder | None = None
        self._last_report: dict[str, Any] | None = None
        # open while the memory of this session is what `lightning_cxl.empty` uses; undoes what a front end has done
        self.active = ExitStack()

    def host_on(self, device: torch.device) -> Host:
        if self.host is None:
            self.host = Host(self.config, device, policy=self._policy, binding=self._binding)
        return self.host

    def bind(
        self,
        rank: int,
        num_ranks: int,
        local_rank: int,
        num_local_ranks: int,
        device: torch.device,
        gather: Callable[[RankFacts], Sequence[RankFacts]],
    ) -> None:
        """Give this process its part of a machine that it shares with others, before anything is placed."""
        if self._binding is None:
            topology = Topology.detect(on_missing_tier=self.config.on_missing_tier)
            self._binding = bind_rank(rank, local_rank, num_local_ranks, device, self.config, topology, gather)
            self._ranks = {"rank": rank, "num_ranks": num_ranks, "local_rank": local_rank}
            self._ranks["num_local_ranks"] = num_local_ranks

    def open(self, device: torch.device) -> None:
        self._last_report = None
        host, other = self.host_on(device), active()
        if other is not None and other.memory is not host.memory:
            used = sum(tier["used_bytes"] for tier in other.memory.stats()["tiers"].values())
            log.warning(
                f"another training is open, and holds {format_bytes(used)} of host memory until "
                "`accelerator.free_memory()`, `fabric.strategy.teardown()` or `trainer.end()`"
            )
        self.active.enter_context(host.activate())
        if self.config.report is not None:
            host.engine.watch()
        if self._recorder is None:
            self._recorder = recorder.start(host.topology, host.memory.stats, host.engine.use_in_this_thread)

    def start(self, model: nn.Module, optimizers: Sequence[Optimizer], loop: Loop) -> Run:
        """List and decide everything, then build the run; optimizers are not adopted yet. See [Note: One plan]."""
        assert self.host is not None, "opened before"
        refuse_unready(model)
        if optimizers:
            self._finished = None  # its masters are of other optimizers; they make room
        plan = self.host.plan(model, optimizers, loop)
        if not self.runs:  # plans are of runs: while a model is made, tied weights are there twice until they are tied
            self.host.memory.begin()
        run = Run(self.host, self.host.decide(plan), loop)
        self._measured = self._measured or self._totals()
        self._begun = self._begun or self._measured
        self.runs.append(run)
        self.active.enter_context(run.activate())
        return run

    @property
    def run(self) -> Run | None:
        return self.runs[-1] if self.runs else None

    @property
    def trained(self) -> Run | FinishedRun | None:
        """The run whose optimizers the front end has: the present one if it trains, else the last that did."""
        return next((run for run in reversed(self.runs) if run.optimizers), self._finished)

    def close(self, *, after_error: bool = False) -> None:
        """Free everything but weights and optimizer state, which belong to the user. Idempotent."""
        if self.host is not None:
            self._seen = ({}, [], [])
            with suppress(RuntimeError):  # of a device that has failed
                self._seen = self._see()
        runs, self.runs = self.runs, []
        host, self.host = self.host, None
        self._measured = self._begun = {}
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            if host is not None:
                cleanup.callback(host.close)
            if self._recorder is not None:
                cleanup.callback(self._recorder.close, after_error=after_error)
                self._recorder = None
            for run in runs:
                cleanup.callback(run.close, after_error=after_error)
            cleanup.callback(self.active.close)
            for run in runs:
                self._finished = run.finished() if run.optimizers else self._finished
            if host is not None:
                self._last_report = _report(host, runs, "finished")
        if host is not None and self.config.report is not None and any(run.optimizers for run in runs):
            name = "run" if self._ranks is None else f"rank-{self._ranks['rank']}"
            try:
                Path(self.config.report).mkdir(parents=True, exist_ok=True)
                self.report(host.device).save(Path(self.config.report) / f"{name}.html")
            except Exception as error:  # whatever it is, the training has ended well
                log.warning(f"the report was not written: {error!r}")

    def drop_finished(self) -> None:
        """Free the master weights of the run that trained last: its front end saves nothing after a run."""
        self._finished = None

    def __getstate__(self) -> dict[str, Any]:
        return {"config": self.config, "origins": self.origins, "_policy": self._policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._binding = self._ranks = None
        self._forget()

    def report(self, device: torch.device) -> Report:
        """Return bytes planned, used and at the peak, per tier and role, JSON-able; the last run's when it is over.

        ``report().save("run.html")`` writes a page of it, with the last step and the last minute of memory.

        Keys: ``tiers`` {name: {capacity_bytes, budget_bytes, used_bytes, peak_bytes, held_bytes}},
        ``ranks`` (which of how many this process is; None where it is alone; bytes are of this rank), ``roles``,
        ``peak_roles`` and ``planned_roles`` {role: {tier: bytes}}, ``config``, ``optimizers``, ``units``, ``streamed``,
        ``ssd`` (what a step moves from and to the tier `ssd`), ``policy``, ``reasons``
        {role: [text]}, ``notes``.
        """
        report = self._last_report
        if report is None or self.host is not None:
            report = _report(self.host_on(device), self.runs, "running")
        content = {**report, "ranks": self._ranks, "config": self.config.describe(self.origins)}
        return Report(content, *(self._seen if self.host is None else self._see()))

    def _see(self) -> tuple[dict[str, float], list[timing.Span], Samples]:
        samples = [] if self._recorder is None else self._recorder.samples()
        if self.host is not None:
            self.host.engine.synchronize()  # what the device has done is noted when it is done
        return self._since(self._begun), timing.last_step(self._begun.get("step_s", 0.0)), samples

    def _totals(self) -> dict[str, float]:
        if self.host is not None:
            self.host.engine.count_stalls()
        num_steps = sum(run.guard.num_steps / max(1, len(run.optimizers)) for run in self.runs)
        ssd = next((run.on_ssd.store.stats() for run in self.runs if run.on_ssd is not None), {})
        moved = {f"ssd_{key}": value for key, value in ssd.items() if key in ("read_bytes", "written_bytes")}
        return {"steps": num_steps, "step_s": time.perf_counter()} | moved | timing.totals() | memory_pressure()

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger, of the steps since the last call; empty where none is over.

        Of one step on average: ``step_s``, ``update_s`` (updates of weights, in any thread), ``stall_update_s``,
        ``stall_gradients_s`` and ``stall_ssd_s`` (what the training waited for), ``save_s``, ``ssd_read_bytes`` and
        ``ssd_written_bytes``. ``update_hidden_pct``: the part of updates that ran behind the training. ``h2d_GBps`` and
        ``d2h_GBps``: bytes copied to and from the device, by the time of the steps. Since the last call:
        ``spilled_bytes``, ``moved_pages``. Now: ``<tier>_bytes`` used, ``pinned_bytes``, ``memory_pressure_pct``. Each
        name begins with ``cxl/``.
        """
        if self.host is None or not self._measured:
            return {}
        now, before = self._totals(), self._measured
        if not 0 <= now["steps"] - before["steps"] < 1:  # less than none: a model of several is trained no more
            self._measured = now
        found = self._since(before, now)
        return {f"cxl/{key}": float(value) for key, value in found.items()}

    def _since(self, before: Mapping[str, float], now: Mapping[str, float] | None = None) -> dict[str, float]:
        """Return what the steps since some totals took, on average, and what there is now; empty without a step."""
        if not before:
            return {}
        now = now or self._totals()
        more = {key: value - before.get(key, 0.0) for key, value in now.items()}
        num_steps = more.pop("steps", 0.0)
        if self.host is None or num_steps < 1:
            return {}
        seconds, updates = more["step_s"], more.get("update_s", 0.0)
        found = {key: value / num_steps for key, value in more.items() if key.endswith("_s") or key.startswith("ssd_")}
        if updates:
            found["update_hidden_pct"] = 100 * max(0.0, 1 - more.get("stall_update_s", 0.0) / updates)
        found |= {f"{way}_GBps": more.get(f"{way}_bytes", 0.0) / seconds / 1e9 for way in ("h2d", "d2h")}
        found |= {key: more[key] for key in ("spilled_bytes", "moved_pages") if key in more}
        found |= {key: now[key] for key in ("pinned_bytes", "memory_pressure_pct") if key in now}
        tiers = self.host.memory.stats()["tiers"]
        found |= {f"{name}_bytes": tier["used_bytes"] for name, tier in tiers.items()}
        return found

    def describe(self, name: str, device: torch.device) -> str:
        if self.host is None and self._last_report is None:
            return f"{name}, not set up yet: {self.config}"
        return format_report(self.report(device))

    def describe_options(self, name: str) -> str:
        given = {key: getattr(self.config, key) for key, origin in self.origins.items() if origin != "default"}
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _report(host: Host, runs: Sequence[Run], state: str) -> dict[str, Any]:
    last = ([run for run in runs if run.optimizers] or list(runs))[-1:]  # what is on the tier `ssd` is of this one
    report = host.report(state, last[0].on_ssd if last else None)
    report |= {"planned_roles": {}, "reasons": {}, "num_parameters": 0, "num_trainable": 0}
    report |= {"streamed": {}, "optimizers": [], "units": []}
    for run in runs:
        for key, value in run.report().items():
            report[key] = _added(report[key], value, twice=key == "optimizers")
    return report


def _added(before: Any, more: Any, *, twice: bool = False) -> Any:
    """Return sums of numbers, also in dicts, and the texts of both lists, each once unless `twice`."""
    if isinstance(more, dict):
        return before | {key: _added(before[key], value) if key in before else value for key, value in more.items()}
    if isinstance(more, list):
        return [*before, *(text for text in more if twice or text not in before)]
    return before + more


# For front ends that train a model in several processes: cut it, follow it with optimizers, gather whole weights.


def cut_for(
    session: Session, model: nn.Module, mesh: DeviceMesh, device: torch.device, root: nn.Module | None = None
) -> nn.Module:
    """Cut a model over all processes, and return the root. See [Note: Sharded models]."""
    if session.config.refers_to_ssd:
        raise UnsupportedError(
            "checkpoint='reference' of tier 'ssd' serves one process in this version: a checkpoint of "
            f"{mesh.size()} is one that any number of them reads, and has the state in it. Set checkpoint='copy'"
        )
    units, engine = find_units(model, session.config.units), session.host_on(device).engine
    whole = kept_whole(model)
    for name, parameter in list(whole.items()):
        if isinstance(parameter, UnreadWeight):  # no process reads its rows alone: [Note: Deferred reading]
            read = whole[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            for module in model.modules():  # a tied one has several
                module._parameters.update({own: read for own, each in module._parameters.items() if each is parameter})
    if whole:
        _refuse_different(whole, model)
    return cut(model, units, mesh, engine, root, whole.values())


def _refuse_different(whole: Mapping[str, nn.Parameter], model: nn.Module) -> None:
    """Refuse weights that all processes should have alike and have not: each would train adapters of another base."""
    module_of = owners_in(model)

    def checksum(parameter: nn.Parameter) -> int:
        found = 0
        for tensor in tensors_of(module_of[id(parameter)], parameter).values():
            values: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            found = zlib.crc32(values, found)
        return found

    def checksums() -> dict[str, int]:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            return dict(zip(whole, pool.map(checksum, whole.values()), strict=True))

    of_rank = on_all_ranks(checksums)
    for name, expected in of_rank[0].items():
        other = next((rank for rank, found in enumerate(of_rank) if found.get(name) != expected), None)
        if other is not None:
            raise UnsupportedError(
                f"`{name}` of the quantised base has other values on rank {other} than on rank 0, and every process "
                "needs the same: load it on all of them from the same files"
            )


def cut_state(saved: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a state dict of whole weights for `load_state_dict` of a model that is cut: its parameters cut alike."""
    reshard(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    fitting = {name: value for name, value in saved.items() if name in own and value.shape == own[name].shape}
    return {**saved, **{n: sharded_like(shard_of(value, own[n]), own[n]) for n, value in fitting.items()}}


@contextmanager
def taking_whole(model: nn.Module) -> Iterator[None]:
    """Return a region in which `load_state_dict` of a model that is cut takes whole weights, the same everywhere."""

    def cut_given(module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
        own = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
        given.update({prefix + name: value for name, value in cut_state(own, module).items()})

    handle = model.register_load_state_dict_pre_hook(cut_given)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def whole_state(model: nn.Module, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
    """Return whole weights of a model that is cut, on the first process; all processes call it, others get nothing."""
    reshard(model)
    owners = {name: id(each) for name, each in model.named_parameters(remove_duplicate=False)}
    found: dict[str, Any] = {}
    first_name: dict[int | str, str] = {}
    for name, value in model.state_dict().items():
        if not wanted(name):
            continue
        first = first_name.setdefault(owners.get(name, name), name)  # tied ones stay one tensor
        if first == name and isinstance(value, DTensor):
            value = value.full_tensor()  # one after the other, so that a device holds one of them
        if dist.get_rank() == 0:
            of_host = value.cpu() if isinstance(value, torch.Tensor) and first == name else value
            found[name] = found[first] if first != name else of_host
    return found


def follow(names: Mapping[int, str], model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    now = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"][:] = [now[names[id(p)]] if id(p) in names else p for p in group["params"]]
