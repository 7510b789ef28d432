"""The models, memory classes and placements of arXiv 2507.03305, and ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_cxl.planner.footprint import SHAPES, ZERO_OFFLOAD_LAYOUT, Layout, ModelShape, split_masters_layout
from lightning_cxl.planner.links import links_of
from lightning_cxl.planner.machine_file import load_machine
from lightning_cxl.tiers.placement import TensorRole
from lightning_cxl.tiers.policy import PlacementRequest, RoleHomePolicy
from lightning_cxl.tiers.topology import Topology
from lightning_cxl.transfer.links import Links, Traffic

GIB = 2**30
Shares = Mapping[str, float]
Plan = Callable[[TensorRole, int], Shares]
"""Role and number of the unit to the fraction of each tier."""

_R = TensorRole
DRAM: Shares = {"dram0": 1.0}


MODELS = (SHAPES["qwen2.5-7b"], SHAPES["mistral-nemo-12b"])
_MACHINES = Path(__file__).resolve().parents[2] / "machines"


@dataclass(frozen=True)
class NamedLayout:
    """Bytes per parameter of every role, and which of them an update reads and writes."""

    name: str
    roles: Layout


PAPER_LAYOUT = NamedLayout("20 B/parameter", ZERO_OFFLOAD_LAYOUT)
OUR_LAYOUT = NamedLayout("14 B/parameter", split_masters_layout())

# the order of the authors' greedy: levels 1 to 4, and within a level as in their code
_GREEDY_ORDER = (
    _R.MOMENTUM, _R.VARIANCE, _R.MASTER_GRADS, _R.MASTER_WEIGHTS, _R.COMPUTE_WEIGHTS, _R.ACTIVATIONS, _R.COMPUTE_GRADS,
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What a policy may use."""

    dram_bytes: int
    num_cards: int
    card_bytes: int = 256 * GIB

    @property
    def cards(self) -> list[str]:
        return [f"cxl{index}" for index in range(self.num_cards)]


def paper_links(num_cards: int) -> Links:
    """Return the links of the paper's machine with one card or two; without a card, one is there and not used."""
    return links_of(load_machine(_MACHINES / ("paper_a_two_cards.yaml" if num_cards == 2 else "paper_a.yaml")))


def classes_of(shape: ModelShape, layout: NamedLayout, activation_bytes: int) -> dict[TensorRole, int]:
    """Return the bytes of every memory class."""
    stored = {role: round(each.stored * shape.num_parameters) for role, each in layout.roles.items()}
    return {**stored, _R.ACTIVATIONS: activation_bytes}


def dram_only(classes: Mapping[TensorRole, int], machine: Machine, num_units: int) -> Plan:
    """Return a plan as if DRAM were large enough."""
    return lambda role, unit: DRAM


def naive_interleave(classes: Mapping[TensorRole, int], machine: Machine, num_units: int) -> Plan:
    """Return a plan that interleaves the pages of everything over all nodes."""
    shares = _equal(["dram0", *machine.cards])
    return lambda role, unit: shares


def latency_first(classes: Mapping[TensorRole, int], machine: Machine, num_units: int) -> Plan:
    """Return the authors' greedy: class after class into DRAM; the one that does not fit is interleaved equally."""
    free, shares = machine.dram_bytes, {}
    for role in _GREEDY_ORDER:
        nbytes = classes.get(role, 0)
        if nbytes <= free:
            shares[role], local = DRAM, nbytes
        elif free > 0:
            local = min(free, nbytes // (1 + machine.num_cards))
            rest = _equal(machine.cards, 1 - local / nbytes)
            shares[role] = {"dram0": local / nbytes, **rest}
        else:
            shares[role], local = _equal(machine.cards), 0
        free -= local
    return lambda role, unit: shares[role]


def role_homes(classes: Mapping[TensorRole, int], machine: Machine, num_units: int) -> Plan:
    """Return what the package's default policy does, asked unit by unit in the order in which a run allocates.

    A request that its first tier has no room for goes to the next one, as the allocator does. Tier `cxl` is all cards.
    """
    topology = Topology.fake([machine.dram_bytes], [machine.card_bytes] * machine.num_cards)
    policy = RoleHomePolicy(topology, pin=True)
    free = {tier.name: tier.capacity_bytes for tier in topology.tiers}
    cards, homes = _equal(machine.cards), {}
    first, last = [_R.COMPUTE_WEIGHTS], [_R.ACTIVATIONS]
    state = [role for role in _GREEDY_ORDER if role in classes and role not in first + last]
    for roles in (first, state, last):
        for unit in range(num_units):
            for role in roles:
                nbytes = classes[role] // num_units
                placement = policy.place(PlacementRequest(role, nbytes), free)
                tier = next(name for name in placement.tiers if free[name] >= nbytes)
                free[tier] -= nbytes
                homes[role, unit] = DRAM if tier == "dram" else cards
    return lambda role, unit: homes[role, unit]


def balanced(layout: NamedLayout, classes: Mapping[TensorRole, int], machine: Machine, num_units: int) -> Plan:
    """Return a plan under which an update is done with DRAM and the cards at the same time.

    Weights and activations go to the cards, gradients to DRAM. Of every other class the same part is in DRAM: so much
    that both take equally long, weights and gradients included, or what DRAM has room for.
    """
    fixed: dict[TensorRole, Shares] = {
        _R.COMPUTE_WEIGHTS: _equal(machine.cards),
        _R.ACTIVATIONS: _equal(machine.cards),
        _R.COMPUTE_GRADS: DRAM,
    }
    split = [role for role in classes if role not in fixed]
    room = (machine.dram_bytes - classes[_R.COMPUTE_GRADS]) / sum(classes[role] for role in split)
    links = paper_links(machine.num_cards)

    def plan(local: float, role: TensorRole, unit: int) -> Shares:
        return fixed.get(role, {"dram0": local, **_equal(machine.cards, 1 - local)})

    def lead_s(local: float) -> float:
        """Return by how much DRAM takes longer than a card; linear."""
        traffic = update_traffic(layout, partial(plan, local), 0, 1.0)
        seconds = {tier: links.host_route({tier: each}).seconds(each.nbytes) for tier, each in traffic.items()}
        return seconds["dram0"] - seconds[machine.cards[0]]

    local = min(1.0, room, -lead_s(0.0) / (lead_s(1.0) - lead_s(0.0)))
    return partial(plan, local)


def update_traffic(layout: NamedLayout, plan: Plan, unit: int, num_parameters: float) -> dict[str, Traffic]:
    """Return what the update of one unit reads and writes, by tier."""
    traffic: dict[str, Traffic] = {}
    for role, each in layout.roles.items():
        moved = Traffic(each.read, each.written) * num_parameters
        for tier, share in plan(role, unit).items():
            traffic[tier] = traffic.get(tier, Traffic()) + moved * share
    return traffic


def _equal(tiers: list[str], total: float = 1.0) -> Shares:
    return {tier: total / len(tiers) for tier in tiers}
