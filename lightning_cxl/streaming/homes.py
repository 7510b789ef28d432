"""`Home`: where the weights of a unit stay between its visits to the device, and how they get there."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from lightning_cxl.memory.resource import Buffer
from lightning_cxl.transfer.engine import Transfer, TransferEngine


class Home(Protocol):
    """Bytes that parameters show while their unit does not compute."""

    buffer: Buffer
    """Where the parameters' data lie."""

    def filling(self) -> AbstractContextManager[Buffer]:
        """Return a region in which all bytes are written, to the memory that it yields; they are the home's then."""

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Transfer:
        """Start copying to the device.

        Args:
            engine: of the run.
            flat: what the home shows.
            destination: on the device, as large.
            after: device work that uses the destination.
        """

    def settle(self) -> None:
        """Return when the parameters show what the latest update has made.

        Raises:
            StorageError: it could not be written.
        """

    def looked_at(self) -> None:
        """Learn that someone may write to the parameters from now on."""

    def looks_are_over(self) -> None:
        """Learn that whoever has looked writes no more, and that no update runs."""

    def update_begins(self) -> None:
        """Learn that an update writes what the parameters show next."""


class InMemory:
    """A piece of host memory.

    Args:
        buffer: of exactly the bytes that are needed.
        is_inherited: whether forked children have it, too.
    """

    def __init__(self, buffer: Buffer, *, is_inherited: bool = True) -> None:
        self.buffer = buffer
        self.is_inherited = is_inherited

    @contextmanager
    def filling(self) -> Iterator[Buffer]:
        """Yield the memory itself."""
        yield self.buffer

    def fetch(
        self, engine: TransferEngine, flat: torch.Tensor, destination: torch.Tensor, after: list[Transfer]
    ) -> Transfer:
        """Start the copy; see `Home.fetch`."""
        return engine.h2d(flat, destination, after=after)

    def settle(self) -> None:
        """Return at once: updates write here."""

    def looked_at(self) -> None:
        """Return at once."""

    def looks_are_over(self) -> None:
        """Return at once."""

    def update_begins(self) -> None:
        """Return at once."""
