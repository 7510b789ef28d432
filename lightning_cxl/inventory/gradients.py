"""Which gradients are on the host at a time: all, those of a few units, and those that have landed elsewhere first."""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from lightning_cxl.gradients.offload import MAX_STAGED
from lightning_cxl.inventory.tensors import GRADIENTS, HostTensor
from lightning_cxl.inventory.workload import Workload
from lightning_cxl.placement.placement import TensorRole
from lightning_cxl.updates.step import MAX_UNITS_IN_FLIGHT


class Staged(NamedTuple):
    """Gradients that land in staging memory before they are where they stay."""

    at_once: list[HostTensor]
    """What exists at a time."""
    nbytes: int
    """Of all micro-batches."""


def leaving_groups(tensors: Iterable[HostTensor]) -> list[list[HostTensor]]:
    """Return the gradients among the tensors in groups as they leave the device, the largest group first."""
    groups: dict[object, list[HostTensor]] = {}
    for each in tensors:
        if each.role in GRADIENTS:
            groups.setdefault(each.unit or id(each.parameter), []).append(each)
    return sorted(groups.values(), key=parameter_bytes, reverse=True)


def parameter_bytes(group: Iterable[HostTensor]) -> int:
    """Return the bytes of the parameters themselves, each in its own type."""
    return sum(each.parameter_nbytes for each in group)


def gradients_at_once(tensors: Iterable[HostTensor]) -> list[HostTensor]:
    """Return the tensors, of the gradients of units only those that exist at a time when updates run in backward."""
    kept: list[HostTensor] = []
    of_unit: dict[str, list[HostTensor]] = {}
    for each in tensors:
        (of_unit.setdefault(each.unit, []) if each.unit and each.role in GRADIENTS else kept).append(each)
    largest = heapq.nlargest(
        MAX_UNITS_IN_FLIGHT + 1, of_unit.values(), key=lambda group: sum(each.nbytes for each in group)
    )
    return kept + [each for group in largest for each in group]


def widened_gradients(tensors: Iterable[HostTensor]) -> list[HostTensor]:
    """Return the largest first gradients of a step that are still there while sums become wider (`GradientSums`)."""
    wider = [each for each in tensors if each.nbytes > each.parameter_nbytes]
    largest = next(iter(leaving_groups(wider)), [])
    return [each._replace(nbytes=each.parameter_nbytes) for each in largest]


def staged_gradients(tensors: Iterable[HostTensor], workload: Workload) -> Staged:
    """Return what `LeavingGradients` lets land elsewhere: all but the first gradient of a step, unless it widens.

    Where the host computes, only gradients of units that stream leave.
    """
    total, landing = 0, []
    for each in tensors:
        if each.role in GRADIENTS and (each.unit or not workload.computes_on_host):
            is_first_kept = each.nbytes == each.parameter_nbytes or workload.num_arrivals > 1
            num_landed = workload.num_arrivals - is_first_kept
            total += num_landed * each.parameter_nbytes
            if num_landed:
                landing.append(each._replace(nbytes=each.parameter_nbytes))
    groups = leaving_groups(landing)[:MAX_STAGED]
    return Staged([each._replace(role=TensorRole.STAGING) for group in groups for each in group], total)
