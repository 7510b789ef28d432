"""The simulated links (`simulation.links`) of a planned machine."""

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.machine.speeds import Machine, MachineTier
from simulation.links import Link, Links


def links_of(machine: Machine) -> Links:
    """Return links on which single copies and Adam updates take what `lightning_cxl.planning.job` predicts.

    Three things are left out: the cache, what it takes in of a copy's writes, and `Machine.write_contention`.

    Raises:
        UnsupportedError: a tier is backed by another one; simulated tiers do not share bandwidth.
    """
    for tier in machine.tiers:
        if tier.backed_by is not None:
            raise UnsupportedError(
                f"tier `{tier.name}` of machine `{machine.name}` is backed by `{tier.backed_by}`, and simulated tiers "
                f"do not share bandwidth: leave it out, or give it memory of its own"
            )
    device = machine.device
    return Links(
        device=Link(device.h2d_bytes_per_s, device.d2h_bytes_per_s, device.copy_latency_s, duplex=2),
        tiers={tier.name: _link(tier) for tier in machine.tiers},
    )


def _link(tier: MachineTier) -> Link:
    """Return a link over which Adam's mix, 16 bytes read and 12 written, flows at the tier's rate for it."""
    read, write = tier.device_read_bytes_per_s, tier.device_write_bytes_per_s
    duplex = tier.adam_bytes_per_s * (16 / read + 12 / write) / 28
    # a link is at least as fast for a mix as for one direction, and at most as fast as both together
    return Link(read, write, duplex=min(max(duplex, 1.0), 2.0))
