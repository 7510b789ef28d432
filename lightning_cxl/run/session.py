"""`Session`: what a front end has of us: the options, this machine's memory, and the runs in it.

Lightning has one run after the other. A loop of the user's own has one run for each model, side by side: in DPO, one
that is trained and one that is frozen.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.inventory.workload import Loop
from lightning_cxl.machine.binding import Gather, RankBinding, bind_rank
from lightning_cxl.machine.topology import Topology
from lightning_cxl.planning.policies import check_policy
from lightning_cxl.run.host import Host
from lightning_cxl.run.report import format_report, merged
from lightning_cxl.run.run import FinishedRun, Run
from lightning_cxl.run.unclosed import close_garbage
from lightning_cxl.storage.rank_folders import remove_left
from lightning_cxl.weights.load import refuse_unready


class Session:
    """Memory and the runs in it; see [Note: Order of life]. A copy or a pickle has the options alone.

    Args:
        **options: the fields of `OffloadConfig`; ``policy`` may also be an object with the method of `PlacementPolicy`
            or of `PlanningPolicy`.

    Raises:
        ConfigError: an option with an impossible value.
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
        self.host: Host | None = None
        """Memory and policy of the next or present run."""
        self.runs: list[Run] = []
        """The runs that are going on, in the order in which they began."""
        self._finished: FinishedRun | None = None
        self._last_report: dict[str, Any] | None = None
        self.active = ExitStack()
        """Open while the memory of this session is what `lightning_cxl.empty` uses; what a front end puts on it is
        undone when the run is over."""

    def host_on(self, device: torch.device) -> Host:
        """Return memory and policy of the next or present run; built at first use, replaced after `close`."""
        if self.host is None:
            self.host = Host(self.config, device, policy=self._policy, binding=self._binding)
        return self.host

    def bind(
        self, rank: int, num_ranks: int, local_rank: int, num_local_ranks: int, device: torch.device, gather: Gather
    ) -> None:
        """Give this process its part of a machine that it shares with others, before anything is placed.

        Args:
            rank: of this process, among those of all machines.
            num_ranks: how many there are on all machines.
            local_rank: of this process, among those of its machine.
            num_local_ranks: how many there are on its machine.
            device: that this process computes on.
            gather: returns what each of them gives.

        Raises:
            ConfigError, TierNotFoundError: see `bind_rank`.
        """
        if self._binding is None:
            if local_rank == 0 and (ssd := self.config.ssd()) is not None:
                remove_left(ssd.paths)  # no process of this run stores anything before all have gathered
            topology = Topology.detect(on_missing_tier=self.config.on_missing_tier)
            self._binding = bind_rank(
                local_rank, num_local_ranks, device, self.config, topology, gather=gather, rank=rank
            )
            self._ranks = {"rank": rank, "num_ranks": num_ranks, "local_rank": local_rank}
            self._ranks["num_local_ranks"] = num_local_ranks

    def open(self, device: torch.device) -> None:
        """Let `lightning_cxl.empty` use the memory of this session from now on."""
        self._last_report = None
        self.active.enter_context(self.host_on(device).activate())

    def start(self, model: nn.Module, optimizers: Sequence[Optimizer], loop: Loop) -> Run:
        """List and decide everything, then build the run; optimizers are not adopted yet. See [Note: One inventory].

        Raises:
            ConfigError: the model has no values, or the policy leaves something out.
            TierFullError: it does not fit.
        """
        assert self.host is not None, "opened before"
        close_garbage()  # its memory is needed
        refuse_unready(model)
        if optimizers:
            self._finished = None  # its masters are of other optimizers; they make room
        inventory = self.host.inventory(model, optimizers, loop)
        if not self.runs:  # plans are of runs: while a model is made, tied weights are there twice until they are tied
            self.host.memory.begin()
        run = Run(self.host, inventory, self.host.decide(inventory), loop)
        self.runs.append(run)
        self.active.enter_context(run.activate())
        return run

    @property
    def run(self) -> Run | None:
        """The run that began last, of those that are going on."""
        return self.runs[-1] if self.runs else None

    @property
    def trained(self) -> Run | FinishedRun | None:
        """The run whose optimizers the front end has: the present one if it trains, else the last that did."""
        return next((run for run in reversed(self.runs) if run.optimizers), self._finished)

    def close(self, *, after_error: bool = False) -> None:
        """Free everything but weights and optimizer state, which belong to the user. Idempotent."""
        runs, self.runs = self.runs, []
        host, self.host = self.host, None
        with ExitStack() as cleanup:  # last in, first out; one that fails does not keep the others from running
            if host is not None:
                cleanup.callback(host.close)
            for run in runs:
                cleanup.callback(run.close, after_error=after_error)
            cleanup.callback(self.active.close)
            for run in runs:
                self._finished = run.finished() if run.optimizers else self._finished
            if host is not None:
                self._last_report = _report(host, runs, "finished")

    def drop_finished(self) -> None:
        """Free the master weights of the run that trained last: its front end saves nothing after a run."""
        self._finished = None

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the run that is going on: it belongs to this process."""
        return {"config": self.config, "origins": self.origins, "_policy": self._policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin anew, with the same options."""
        self.__dict__.update(state)
        self._binding = self._ranks = None
        self._forget()

    # -- what it did -------------------------------------------------------------------------------------------------

    def report(self, device: torch.device) -> dict[str, Any]:
        """Return bytes planned, used and at the peak, per tier and role, JSON-able; the last run's when it is over.

        Keys: ``tiers`` {name: {capacity_bytes, budget_bytes, used_bytes, peak_bytes, held_bytes}},
        ``ranks`` (which of how many this process is; None where it is alone; bytes are of this rank), ``roles``,
        ``peak_roles`` and ``planned_roles`` {role: {tier: bytes}}, ``config``, ``optimizers``, ``units``, ``streamed``,
        ``ssd`` (what a step moves from and to the tier `ssd`), ``policy``, ``reasons``
        {role: [text]}, ``notes``.
        """
        report = self._last_report
        if report is None or self.host is not None:
            report = _report(self.host_on(device), self.runs, "running")
        return {**report, "ranks": self._ranks, "config": self.config.describe(self.origins)}

    def describe(self, name: str, device: torch.device) -> str:
        """Return the report as one screen of text; `name` is of the object that users see."""
        if self.host is None and self._last_report is None:
            return f"{name}, not set up yet: {self.config}"
        return format_report(self.report(device))

    def describe_options(self, name: str) -> str:
        """Return a class name and the options that are not at their default."""
        given = {key: getattr(self.config, key) for key, origin in self.origins.items() if origin != "default"}
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _report(host: Host, runs: Sequence[Run], state: str) -> dict[str, Any]:
    return merged([run.report(state) for run in runs]) if runs else host.report(state)
