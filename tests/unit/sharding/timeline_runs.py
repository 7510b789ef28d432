"""What a rank sees on its timeline: what runs while the device computes, and when the host is through."""

from typing import NamedTuple

from tests import apart
from tests.apart import fsdp_runs
from tests.unit.sharding.host_updates import HostUpdates

COMPUTE = 0
"""The stream of forward and backward."""


class Seen(NamedTuple):
    """Of one forward and backward."""

    hidden: dict[str, float]
    """Which part of the time of all copies of a kind the device computed meanwhile."""
    host_share: float
    """Which part of the whole time had passed when the host had asked for everything."""


def one_step(name: str, delays: dict[str, float]) -> Seen:
    """Look at the second step: the first one makes streams and memory."""
    case = fsdp_runs.CASES[name]
    model = fsdp_runs.shard(case, "apart")
    updates = HostUpdates(model, fsdp_runs.adamw)
    fsdp_runs.steps(case, model, updates, "apart", 1)
    data = fsdp_runs.batch(case, 1, "apart")
    apart.set_delay(**delays)
    with apart.timeline() as entries:
        model(**data).loss.backward()
    apart.set_delay()
    updates.step()
    compute = [entry for entry in entries if entry.kind == "kernel" and entry.stream == COMPUTE]
    hidden = {}
    for kind in ("h2d", "d2h"):
        copies = [entry for entry in entries if entry.kind == kind]
        meanwhile = sum(apart.overlap(copy, kernel) for copy in copies for kernel in compute)
        hidden[kind] = meanwhile / sum(copy.end - copy.start for copy in copies)
    begin, end = entries[0].start, max(entry.end for entry in entries)
    return Seen(hidden, (max(entry.queued for entry in entries) - begin) / (end - begin))
