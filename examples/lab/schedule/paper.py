"""The models, layouts, machines and claims of arXiv 2507.03305, and what an update of ours and of theirs streams."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from footprint import (
    PUBLISHED,
    ZERO_OFFLOAD_LAYOUT,
    Layout,
    ModelShape,
    split_masters,
    split_masters_layout,
    zero_offload,
)
from simulation.links import HostTraffic, Links
from simulation.machine_links import links_of

from lightning_cxl.machine.speeds import Machine, Split, load_machine
from lightning_cxl.memory.placement import TensorRole
from lightning_cxl.planning.job import Job

GIB = 2**30
Splits = Mapping[TensorRole, Split]

MODELS = (PUBLISHED["qwen2.5-7b"], PUBLISHED["mistral-nemo-12b"])
CLAIMS = """the paper (abstract of version 2): latency-first has 97 to 99 % of DRAM alone with one card, about 100 %
  with two, and up to 21 % more than naive interleaving (its machines, contexts of 4K to 32K)"""
THROUGHPUT_GOALS = {1: 0.97, 2: 0.99}
"""Of DRAM alone, by the number of cards: the paper's claims."""
DRAM: Split = {"dram0": 1.0}
_FOLDER = Path(__file__).resolve().parents[2] / "machines"
_MACHINES = {1: "paper_a.yaml", 2: "paper_a_two_cards.yaml"}
_ENOUGH_BYTES = 1 << 60


@dataclass(frozen=True)
class NamedLayout:
    """Bytes per parameter of every role, and which of them an update reads and writes."""

    name: str
    roles: Layout
    job: Callable[[ModelShape, int, int], Job]
    """Shape, sequences and tokens of each to the job."""


PAPER_LAYOUT = NamedLayout("20 B/parameter", ZERO_OFFLOAD_LAYOUT, zero_offload)
OUR_LAYOUT = NamedLayout("14 B/parameter", split_masters_layout(), split_masters)


def paper_machine(num_cards: int, flops_per_s: float, dram_bytes: int | None = None) -> Machine:
    """Return the paper's machine with one card or two; without a card, DRAM is large enough for everything.

    Args:
        num_cards: 0, 1 or 2.
        flops_per_s: of the device; the paper does not say.
        dram_bytes: another size of DRAM than the paper's.
    """
    machine = _load(_MACHINES[max(1, num_cards)])
    machine = replace(machine, device=replace(machine.device, flops=flops_per_s))
    size = dram_bytes if num_cards else _ENOUGH_BYTES
    return machine if size is None else machine.with_capacity({"dram0": size})


@cache
def _load(name: str) -> Machine:
    return load_machine(_FOLDER / name)


def paper_links(num_cards: int) -> Links:
    """Return the links of the paper's machine with one card or two; without a card, one is there and not used."""
    return links_of(paper_machine(num_cards, 1.0))


def update_traffic(layout: NamedLayout, splits: Splits, num_parameters: float) -> dict[str, HostTraffic]:
    """Return what the update of some parameters reads and writes, by tier."""
    traffic: dict[str, HostTraffic] = {}
    for role, each in layout.roles.items():
        moved = HostTraffic(each.read, each.written) * num_parameters
        for tier, share in splits[role].items():
            traffic[tier] = traffic.get(tier, HostTraffic()) + moved * share
    return traffic
