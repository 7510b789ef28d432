"""The share of one process in the tier `ssd`: folders of its own on the drives, and a part of what these may hold."""

from dataclasses import replace

from lightning_cxl.ssd_options import SsdOptions


def share_ssd(options: SsdOptions, rank: int, num_local_ranks: int, capacity_bytes: int) -> SsdOptions:
    """Return the options of the tier `ssd` for one of several processes.

    Their folders lie below those of the user, so that no two processes open one file, also where several machines see
    the same folder.

    Args:
        options: of the user, for all processes of a machine together.
        rank: of the process, among those of all machines.
        num_local_ranks: processes of this machine.
        capacity_bytes: what they may store together, measured once for all of them.
    """
    paths = tuple(path / f"rank-{rank}" for path in options.paths)
    share = capacity_bytes // num_local_ranks
    return replace(options, paths=paths, budget_bytes=share, is_part=True)
