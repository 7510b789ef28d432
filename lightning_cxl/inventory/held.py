"""`held_tensors`: what a run keeps in host memory, tensor by tensor, as the engine itself reserves it."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import AdamW, Optimizer

from lightning_cxl.config import OffloadConfig
from lightning_cxl.gradients.leaving import MAX_STAGED
from lightning_cxl.inventory.sensitive import sensitive_parameters
from lightning_cxl.inventory.wanted import Wanted, grouped, wanted_tensors
from lightning_cxl.inventory.workload import Overlap, Workload
from lightning_cxl.optim.forms import Forms
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.streaming.unit_weights import piece_nbytes, streamable
from lightning_cxl.streaming.units import NamedUnits, find_units
from lightning_cxl.updates.unit_updates import MAX_UNITS_IN_FLIGHT

TierOf = Callable[[torch.Tensor | str, TensorRole], str | None]
"""The tier that a decorator or rule asks for, for a role of a parameter or for the activations of a unit, by name."""
Pieces = tuple[str, nn.Module, list[list[nn.Parameter]]]
"""A unit's name and module, and its streamed parameters, those that belong on the same tier together."""
GRADIENTS = (TensorRole.COMPUTE_GRADS, TensorRole.MASTER_GRADS)


@dataclass(frozen=True, slots=True)
class Staged:
    """Gradients that land in staging memory before they are where they stay."""

    at_once: list[Wanted]
    nbytes: int
    """Of all micro-batches."""


@dataclass(frozen=True, slots=True)
class Held:
    """Host memory of a run, without activations."""

    weights: list[Wanted]
    state: list[Wanted]
    """Masters, gradients and moments of every parameter."""
    at_once: list[Wanted]
    """Of those, what exists at a time."""
    staged: Staged
    pieces: list[Pieces]
    """Units that stream."""
    unit_of: Mapping[int, str]
    """Unit of each streamed parameter, by the parameter's id."""
    overlap: Overlap

    def all(self) -> list[Wanted]:
        """Return everything that exists at a time."""
        return [*self.weights, *self.at_once, *_widened(self.state, self.unit_of), *self.staged.at_once]


def held_tensors(
    model: nn.Module,
    config: OffloadConfig,
    load: Workload,
    tier_of: TierOf,
    optimizers: Sequence[Optimizer] | None = None,
) -> Held:
    """Return what a run of a model keeps.

    Args:
        model: on any device, the meta device too.
        config: the user's choices.
        load: of one step.
        tier_of: decorators and rules.
        optimizers: as the user made them; one AdamW over all trained parameters when None.
    """
    if optimizers is None:
        optimizers = [AdamW([p for p in model.parameters() if p.requires_grad])]
    streams = config.streams_weights(load.computes_on_host)
    chosen = list(streamable(model, units_of(model, config) if streams else []))
    pieces = [
        (unit, module, grouped(own, lambda p: tier_of(p, TensorRole.COMPUTE_WEIGHTS))) for unit, module, own in chosen
    ]
    unit_of = {id(parameter): unit for unit, _, own in chosen for parameter in own}
    forms = Forms(config.cpu_adam, config.state, config.master, sensitive_parameters(model).__contains__)
    forms.consider(optimizers)
    accumulates = load.num_micro_batches > 1
    state = wanted_tensors(
        optimizers,
        forms,
        config,
        accumulates=accumulates,
        on_host=lambda p: load.computes_on_host or id(p) in unit_of,
    )
    overlap: Overlap = "none"
    if pieces and config.overlaps_step(load.computes_on_host):
        overlap = "backward" if load.updates_in_backward else "forward"
    return Held(
        wanted_weights(model, pieces, computes_on_host=load.computes_on_host),
        state,
        gradients_at_once(state, unit_of) if overlap == "backward" and not accumulates else state,
        _staged(state, unit_of, load),
        pieces,
        unit_of,
        overlap,
    )


def units_of(model: nn.Module, config: OffloadConfig) -> NamedUnits:
    """Return the units that are offloaded."""
    return find_units(model, config.units) if config.activation_offload else []


def gradient_groups(wanted: Iterable[Wanted], unit_of: Mapping[int, str]) -> list[list[Wanted]]:
    """Return what is wanted for gradients in groups as they leave the device, the largest first.

    Args:
        wanted: of any role.
        unit_of: see `Held`.
    """
    groups: dict[object, list[Wanted]] = {}
    for each in wanted:
        if each.role in GRADIENTS:
            groups.setdefault(unit_of.get(id(each.parameter), id(each.parameter)), []).append(each)
    return sorted(groups.values(), key=parameter_bytes, reverse=True)


def parameter_bytes(group: Iterable[Wanted]) -> int:
    """Return the bytes of the parameters themselves, each in its own type."""
    return sum(each.parameter.nbytes for each in group)


def _widened(wanted: Iterable[Wanted], unit_of: Mapping[int, str]) -> list[Wanted]:
    """Return the largest first gradients of a step that are still there while sums become wider (`GradientSums`)."""
    wider = [each for each in wanted if each.nbytes > each.parameter.nbytes]
    largest = next(iter(gradient_groups(wider, unit_of)), [])
    return [each._replace(nbytes=each.parameter.nbytes) for each in largest]


def _staged(wanted: Iterable[Wanted], unit_of: Mapping[int, str], load: Workload) -> Staged:
    """Return what `LeavingGradients` lets land elsewhere: all but the first gradient of a step, unless it widens."""
    if load.computes_on_host:
        return Staged([], 0)
    total, landing = 0, []
    for parameter, role, nbytes in wanted:
        if role in GRADIENTS:
            is_first_kept = nbytes == parameter.nbytes or load.num_micro_batches > 1
            num_landed = load.num_micro_batches - is_first_kept
            total += num_landed * parameter.nbytes
            if num_landed:
                landing.append(Wanted(parameter, role, parameter.nbytes))
    groups = gradient_groups(landing, unit_of)[:MAX_STAGED]
    return Staged([each._replace(role=TensorRole.STAGING) for group in groups for each in group], total)


def wanted_weights(model: nn.Module, pieces: Sequence[Pieces], *, computes_on_host: bool) -> list[Wanted]:
    """Return the host memory that a model's weights take.

    Args:
        model: every parameter is looked at.
        pieces: of the units that stream.
        computes_on_host: what does not stream is in host memory, too.
    """
    role = TensorRole.COMPUTE_WEIGHTS
    streamed = {id(parameter) for _, _, groups in pieces for group in groups for parameter in group}
    rest = [p for p in model.parameters() if computes_on_host and not is_lazy(p) and id(p) not in streamed]
    return [Wanted(group[0], role, piece_nbytes(module, group)) for _, module, groups in pieces for group in groups] + [
        Wanted(parameter, role, parameter.nbytes) for parameter in rest
    ]


def gradients_at_once(wanted: Iterable[Wanted], unit_of: Mapping[int, object]) -> list[Wanted]:
    """Return what is wanted, of the gradients of units only those that exist at a time behind the backward.

    Args:
        wanted: everything.
        unit_of: unit of each streamed parameter, by the parameter's id.
    """
    kept: list[Wanted] = []
    of_unit: dict[int, list[Wanted]] = {}
    for each in wanted:
        unit = unit_of.get(id(each.parameter)) if each.role in GRADIENTS else None
        (kept if unit is None else of_unit.setdefault(id(unit), [])).append(each)
    largest = heapq.nlargest(
        MAX_UNITS_IN_FLIGHT + 1, of_unit.values(), key=lambda group: sum(each.nbytes for each in group)
    )
    return kept + [each for group in largest for each in group]
