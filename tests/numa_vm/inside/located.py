"""Where the kernel says that the pages of buffers are, and whether that is where they were asked to be."""

import weakref
from collections.abc import Iterator
from typing import NamedTuple

from lightning_cxl import Topology
from lightning_cxl.memory.placement import Placement, TensorRole
from lightning_cxl.memory.resource import HUGE_PAGE_BYTES, Buffer
from lightning_cxl.native._numa import page_nodes

STRIPE_BYTES = HUGE_PAGE_BYTES


def bytes_by_tier(buffer: Buffer, topology: Topology) -> dict[str, int]:
    """Return the bytes of a buffer per tier, asked from the kernel."""
    found: dict[str, int] = {}
    for node, nbytes in page_nodes(buffer.address, buffer.nbytes).items():
        tier = topology.node_tier(node)
        assert tier is not None, f"{nbytes} bytes are on node {node}, which no tier has"
        found[tier.name] = found.get(tier.name, 0) + nbytes
    return found


def check_spans(buffer: Buffer) -> None:
    """Every page is on the node that the buffer's spans name, and the spans leave nothing out."""
    position = 0
    for span in buffer.spans:
        assert span.offset == position
        assert page_nodes(buffer.address + span.offset, span.nbytes) == {span.node_id: span.nbytes}
        position += span.nbytes
    assert position == buffer.nbytes


def check_placement(buffer: Buffer, placement: Placement, topology: Topology) -> None:
    """The tiers that a placement names hold their shares of a buffer, and no other tier holds a byte."""
    found = bytes_by_tier(buffer, topology)
    split = placement.split()
    assert set(found) <= set(split), f"{placement.describe()}: {found}"
    if buffer.nbytes >= 8 * STRIPE_BYTES or len(split) == 1:  # of small ones several together make up the shares
        for tier, share in split.items():
            assert abs(found.get(tier, 0) - share * buffer.nbytes) <= STRIPE_BYTES, f"{placement.describe()}: {found}"


class Noted(NamedTuple):
    """A living buffer, and what was asked for it."""

    buffer: Buffer
    placement: Placement
    role: TensorRole


class Recorder:
    """Keeps track of the buffers that host memory hands out, without keeping them alive."""

    def __init__(self) -> None:
        self._noted: list[tuple[weakref.ref[Buffer], Placement, TensorRole]] = []

    def add(self, buffer: Buffer, placement: Placement, role: TensorRole) -> Buffer:
        self._noted.append((weakref.ref(buffer), placement, role))
        return buffer

    def living(self) -> Iterator[Noted]:
        for reference, placement, role in self._noted:
            buffer = reference()
            if buffer is not None and buffer.nbytes:
                yield Noted(buffer, placement, role)

    def role_at(self, address: int) -> TensorRole:
        """Return what the living buffer with an address is for."""
        (role,) = (each.role for each in self.living() if 0 <= address - each.buffer.address < each.buffer.nbytes)
        return role

    def check(self, topology: Topology) -> dict[str, dict[str, int]]:
        """Check every living buffer; return their bytes per role and tier, asked from the kernel."""
        roles: dict[str, dict[str, int]] = {}
        for noted in self.living():
            check_spans(noted.buffer)
            check_placement(noted.buffer, noted.placement, topology)
            tiers = roles.setdefault(noted.role.value, {})
            for tier, nbytes in bytes_by_tier(noted.buffer, topology).items():
                tiers[tier] = tiers.get(tier, 0) + nbytes
        return roles
