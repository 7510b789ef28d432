"""`RecordIndex`: in which record a tensor lies."""

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator

import torch

from lightning_cxl.storage.visitor import Visitor, is_in


class RecordIndex:
    """Records by the addresses of their windows, which do not overlap."""

    def __init__(self) -> None:
        self._records: list[Visitor] = []  # in the order of their windows' addresses

    def __iter__(self) -> Iterator[Visitor]:
        return iter(self._records)

    def add(self, record: Visitor) -> None:
        """Find a record from now on."""
        insort(self._records, record, key=_address)

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""
        found = {record for tensor in tensors if (record := self._at(tensor.data_ptr())) is not None}
        assert len(found) <= 1, "state of one parameter lies in several records"
        return next(iter(found), None)

    def _at(self, address: int) -> Visitor | None:
        index = bisect_right(self._records, address, key=_address) - 1
        record = self._records[index] if index >= 0 else None
        return record if record is not None and is_in(record.window, address) else None


def _address(record: Visitor) -> int:
    return record.window.address
