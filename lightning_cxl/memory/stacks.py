"""The host memory of one process: every tier's stacks, spilling from one to the next, and the accounts."""

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch

from lightning_cxl.errors import ConfigError, LightningCXLError, SpillWarning, TierFullError
from lightning_cxl.memory.ledger import Ledger
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.memory.tier_stacks import MakeLeaf, Pinner, TierStacks, make_leaf, make_pinner
from lightning_cxl.tiers.placement import Placement, TensorRole
from lightning_cxl.tiers.topology import Tier, Topology
from lightning_cxl.units import format_bytes


class HostMemory:
    """Serves host buffers and tensors by `Placement`.

    Thread-safe. A forked child starts with empty stacks of its own. It sees the parent's weights and staging buffers,
    which user code may hand to it (`DataLoader` workers), but not the rest: the child would double the memory of
    everything the parent writes afterwards.

    Args:
        topology: the machine.
        budgets: most bytes to hold from the OS, per tier name; a tier without one may use its whole capacity.
        on_tier_full: ``"spill"`` to the next tier of the placement with one warning per role and tier, or ``"error"``.
        pin: honour ``Placement.pinned``; otherwise all memory is pageable.
        leaf: what a tier's memory comes from; for tests.
        pinner: how memory is page-locked; for tests.

    Raises:
        ConfigError: a budget is negative or names an unknown tier, or `on_tier_full` is neither word.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        budgets: Mapping[str, int] | None = None,
        on_tier_full: Literal["spill", "error"] = "spill",
        pin: bool = False,
        leaf: MakeLeaf | None = None,
        pinner: Pinner | None = None,
    ) -> None:
        if on_tier_full not in ("spill", "error"):
            raise ConfigError(f'on_tier_full must be "spill" or "error", got {on_tier_full!r}')
        self._budgets = dict(budgets or {})
        for name, budget in self._budgets.items():
            topology.tier(name)
            if budget < 0:
                raise ConfigError(f"the budget of tier `{name}` must not be negative, got {budget}")
        self.topology = topology
        self._on_tier_full = on_tier_full
        self._pin = pin
        self._leaf = leaf or partial(make_leaf, topology=topology)
        self._pinner = pinner or make_pinner(topology)
        self._warned: set[tuple[TensorRole, str]] = set()
        self._closed = False
        self._start()

    def allocate(self, nbytes: int, placement: Placement, role: TensorRole, *, alignment: int = 64) -> Buffer:
        """Return exactly `nbytes` (contents undefined) on the first tier of `placement` that holds them.

        Raises:
            TierFullError: no tier of the placement can, or the first cannot and ``on_tier_full="error"``.
            TierNotFoundError: the placement names a tier that does not exist.
        """
        if nbytes < 0:
            raise ValueError(f"cannot allocate {nbytes} bytes")
        if self._closed:
            raise LightningCXLError("this HostMemory is closed: allocate from the one of a running strategy")
        if self._pid != os.getpid():
            self._start()
        tiers = [self._tiers.get(name) or self._unknown(name) for name in placement.tiers]
        if nbytes == 0:
            return Buffer(0, 0, (), None)
        reason = ""  # as text: an exception kept here would keep this frame and so the buffer alive
        for index, stacks in enumerate(tiers):
            try:
                inner = self._allocate_on(stacks, nbytes, role, placement.pinned and self._pin, alignment)
            except TierFullError as error:
                reason = str(error)
                if self._on_tier_full == "error":
                    tiers = tiers[:1]
                    break
                continue
            buffer = self._ledger.record(inner, stacks.tier.name, role)
            if index:
                self._warn_spill(nbytes, role, tiers[0].tier.name, stacks.tier.name)
            return buffer
        raise TierFullError(self._full_message(nbytes, role, tiers, reason))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, placement: Placement, role: TensorRole) -> torch.Tensor:
        """Return an uninitialised contiguous tensor of exact size; see `allocate` for what it raises."""
        if any(size < 0 for size in shape):
            raise ValueError(f"a tensor cannot have the shape {tuple(shape)}")
        return self.allocate(prod(shape) * dtype.itemsize, placement, role).tensor(shape, dtype)

    def free_bytes(self) -> dict[str, int]:
        """Return what each tier could still hold; tiers on the same nodes each count what they share."""
        return {name: self._free(stacks) for name, stacks in self._tiers.items()}

    def stats(self) -> dict[str, Any]:
        """Return the accounts, JSON-able.

        ``tiers``: per tier ``capacity_bytes``, ``budget_bytes``, ``used_bytes`` (living buffers), ``peak_bytes`` (of
        those) and ``held_bytes`` (from the OS). ``roles`` and ``peak_roles``: bytes per role and tier, now and at most.
        """
        tiers = {}
        for name, stacks in self._tiers.items():
            used, peak = self._ledger.tier_bytes(name)
            tiers[name] = {
                "capacity_bytes": stacks.tier.capacity_bytes,
                "budget_bytes": stacks.budget.limit_bytes,
                "used_bytes": used,
                "peak_bytes": peak,
                "held_bytes": stacks.held_bytes(),
            }
        live, peaks = self._ledger.role_bytes()
        return {"tiers": tiers, "roles": live, "peak_roles": peaks}

    def tier_at(self, address: int) -> Tier | None:
        """Return the tier of the living buffer that has `address`, None when the memory is not ours."""
        name = self._ledger.tier_at(address)
        return None if name is None else self._tiers[name].tier

    def end_step(self) -> None:
        """Say that a training step is over, so that activation arenas can shrink."""
        for stacks in self._tiers.values():
            stacks.end_step()

    def trim(self) -> None:
        """Give everything unused back to the OS."""
        for stacks in self._tiers.values():
            stacks.trim()

    def close(self) -> None:
        """Serve nothing any more and give everything back: now, or when its last user dies. May be called again."""
        self._closed = True
        for stacks in self._tiers.values():
            stacks.close()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._ledger = Ledger()
        self._tiers = {
            tier.name: TierStacks(tier, self._leaf, self._budgets.get(tier.name, tier.capacity_bytes), self._pinner)
            for tier in self.topology.tiers
        }

    def _unknown(self, name: str) -> TierStacks:
        return self._tiers[self.topology.tier(name).name]  # raises, naming what exists

    def _neighbours(self, stacks: TierStacks) -> list[TierStacks]:
        """Return the tiers that share nodes with a tier, itself included."""
        nodes = set(stacks.tier.node_ids)
        return [other for other in self._tiers.values() if nodes.intersection(other.tier.node_ids)]

    def _free(self, stacks: TierStacks) -> int:
        return stacks.free_bytes(sum(other.held_bytes() for other in self._neighbours(stacks)))

    def _allocate_on(self, stacks: TierStacks, nbytes: int, role: TensorRole, pinned: bool, alignment: int) -> Buffer:
        stack = stacks.stack(role, pinned)
        try:
            return stack.allocate(nbytes, alignment=alignment)
        except TierFullError:
            # the tier's other stacks may keep memory that nobody uses; so may those of a tier on the same nodes, which
            # is no help when the budget is exhausted
            by_budget = stacks.held_bytes() + nbytes > stacks.budget.limit_bytes
            others = [stacks] if by_budget else self._neighbours(stacks)
            before = sum(other.held_bytes() for other in others)
            for other in others:
                other.trim()
            if sum(other.held_bytes() for other in others) == before:
                raise
            return stack.allocate(nbytes, alignment=alignment)

    def _warn_spill(self, nbytes: int, role: TensorRole, wanted: str, got: str) -> None:
        if (role, wanted) in self._warned:
            return
        self._warned.add((role, wanted))
        stacks = self._tiers[wanted]
        free, limit = format_bytes(self._free(stacks)), format_bytes(stacks.budget.limit_bytes)
        warnings.warn(
            f"{role.name} ({format_bytes(nbytes)}) went to tier `{got}`: `{wanted}` has {free} of {limit} free. "
            f"More may follow without a warning, the memory report counts them. Raise the budget of `{wanted}`, or set "
            f"on_tier_full='error' to refuse instead.",
            SpillWarning,
            stacklevel=4,
        )

    def _full_message(self, nbytes: int, role: TensorRole, tiers: Sequence[TierStacks], reason: str) -> str:
        full = ", nor on ".join(
            f"tier `{stacks.tier.name}`: {format_bytes(self._free(stacks))} of "
            f"{format_bytes(stacks.budget.limit_bytes)} free"
            for stacks in tiers
        )
        return (
            f"cannot place {role.name} ({format_bytes(nbytes)}) on {full}. Raise the budget of `{tiers[0].tier.name}`, "
            f"allow another tier, or see `python -m lightning_cxl env` for what this machine has. ({reason})"
        )
