"""`Visits`: where optimizer state and weights are updated, as the optimizer sees it. See [Note: State on SSD]."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.optim.state_visits import StateRecord, Visit
from lightning_cxl.storage.visitor import Visitor


class Visits(Protocol):
    """Says where state and weights are updated."""

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        """Return the record in which some of the tensors lie; None where all are in memory."""

    def expect(self, records: Sequence[Visitor]) -> None:
        """Start reading records that are visited next in this order, as far as there are slots."""

    def visit(self, records: Sequence[Visitor]) -> AbstractContextManager[Visit]:
        """Return a region in which records are in slots; they are written behind it."""

    def wait(self) -> None:
        """Return when the drives have the state of the last update."""

    def check(self) -> None:
        """Read all state and compare its checksums."""

    def view(self, record: StateRecord) -> Buffer:
        """Return memory that shows a record as it is now."""

    def show_weights(self) -> None:
        """Return when parameters show what visits have made of them."""


class NoVisits:
    """All state and all weights are in memory."""

    def find(self, tensors: Iterable[torch.Tensor]) -> Visitor | None:
        """Return None."""
        return None

    def expect(self, records: Sequence[Visitor]) -> None:
        """Return at once."""

    def visit(self, records: Sequence[Visitor]) -> AbstractContextManager[Visit]:
        """Refuse: there is no record."""
        raise AssertionError("nothing lies on SSD")

    def wait(self) -> None:
        """Return at once."""

    def check(self) -> None:
        """Return at once."""

    def view(self, record: StateRecord) -> Buffer:
        """Refuse: there is no record."""
        raise AssertionError("nothing lies on SSD")

    def show_weights(self) -> None:
        """Return at once."""
