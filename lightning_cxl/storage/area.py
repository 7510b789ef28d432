"""`Area`: space on the drives of a store for records that come and go."""

from collections import deque

from lightning_cxl.memory.pool import BlockList
from lightning_cxl.storage.drive import BLOCK_BYTES
from lightning_cxl.storage.record import Record, part_nbytes
from lightning_cxl.storage.store import Store


class Area:
    """Gives records places in space that is reserved once, and more where they need more. Not thread-safe.

    Its records have one version and belong to no generation. They are read and written by the store like all others.

    Args:
        store: has the drives.
        name: of the records that the space is reserved as.
        nbytes: reserved now, so that a full drive shows; 0: nothing yet.
        num_drives: of the store.

    Raises:
        TierFullError, StorageError: there is no room.
    """

    def __init__(self, store: Store, name: str, nbytes: int, num_drives: int) -> None:
        self._store = store
        self._name = name
        self._num_drives = num_drives
        self._blocks = BlockList()  # of offsets on every drive
        self._num_reserved = 0
        self._last_range = 0
        self._end = 0  # of the last range
        self._left: deque[Record] = deque()  # given back; their transfers may not be done
        if nbytes:
            self._grow(nbytes)

    def take(self, nbytes: int) -> Record:
        """Return a record to which nothing was written.

        Raises:
            TierFullError: the store's budget has no room for it.
            StorageError: a drive has no room for it.
        """
        part = part_nbytes(nbytes, self._num_drives)
        self._free(waits=False)
        while (offset := self._blocks.allocate(part, BLOCK_BYTES, lowest=True)) is None:
            if self._left:  # more space is taken only where waiting does not help
                self._free(waits=True)
            else:
                self._grow(nbytes)
        return Record(f"{self._name} at {offset}", nbytes, self._num_drives, (offset,), keeps=False)

    def give_back(self, record: Record) -> None:
        """Take a record's place back; nobody starts a transfer of it any more. Any thread may call this at any time."""
        self._left.append(record)

    def _free(self, *, waits: bool) -> None:
        """Free the places of records whose transfers are done; with `waits` that of the oldest one at least."""
        for _ in range(len(self._left)):
            record = self._left.popleft()
            transfers = [*record.reads, *filter(None, [record.last_write])]
            for transfer in transfers if waits else ():
                transfer.wait_done()  # nobody needs these bytes
            waits = False
            if all(transfer.done() for transfer in transfers):
                self._blocks.free(record.versions[0])
            else:
                self._left.append(record)

    def _grow(self, nbytes: int) -> None:
        self._num_reserved += 1
        space = self._store.reserve(f"{self._name} {self._num_reserved}", nbytes, keeps=False)
        begin = space.versions[0]
        if begin == self._end:
            self._blocks.extend_range(self._last_range, space.part_nbytes)
        else:
            self._blocks.add_range(begin, space.part_nbytes)
            self._last_range = begin
        self._end = begin + space.part_nbytes
