"""`SsdRoom`: how much the tier `ssd` may hold, and whether records fit."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_cxl.errors import TierFullError
from lightning_cxl.inventory.records import PlannedRecord
from lightning_cxl.machine.topology import Topology
from lightning_cxl.ssd_options import SsdOptions
from lightning_cxl.units import format_bytes

MEMORY_LEFT_FREE = 0.15
"""Part of memory, for what no inventory lists: temporaries of torch, gaps in the C library's heap. More state on drives
costs less than a run that the kernel kills."""


@dataclass(frozen=True, slots=True)
class SsdRoom:
    """The tier `ssd`, as plans fill it."""

    capacity_bytes: int
    """On all drives together."""
    versions: int = 1
    """How often each record of state is on the drives."""
    num_drives: int = 1
    """Over which each record is cut."""
    memory_left_free: float = 0.0
    """Fraction of memory that stays free where state goes to drives because memory cannot hold it."""

    @classmethod
    def of(cls, topology: Topology, options: SsdOptions) -> "SsdRoom":
        """Return the room of a topology that has the tier."""
        assert topology.ssd is not None
        return cls(topology.ssd.capacity_bytes, options.versions, len(options.paths), MEMORY_LEFT_FREE)

    def bytes_of(self, record: PlannedRecord) -> int:
        """Return what a record takes on the drives, all versions together."""
        versions = self.versions if record.is_state else 1  # checkpoints copy weights, and have no inputs
        return versions * record.nbytes_on(self.num_drives)

    def check(self, records: Iterable[PlannedRecord]) -> None:
        """Refuse records that the tier cannot hold; see `check_bytes`."""
        self.check_bytes(sum(map(self.bytes_of, records)))

    def check_bytes(self, needed: int) -> None:
        """Refuse bytes, of all versions together, that the tier cannot hold.

        Raises:
            TierFullError: says how much is needed, and how much there is.
        """
        if needed > self.capacity_bytes:
            twice = ', with optimizer state twice because of checkpoint="reference"' if self.versions > 1 else ""
            raise TierFullError(
                f"tier `ssd` has {format_bytes(self.capacity_bytes)}, and what goes there needs "
                f"{format_bytes(needed)}{twice}. Raise its budget in `tiers`, free space on its drives, place less "
                f'there, or keep smaller state: state="bf16" or "8bit"'
            )
