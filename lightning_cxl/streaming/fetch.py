"""`Fetch`: one copy of a record to the device, and what else the hop's thread runs. See [Note: Weights on SSD]."""

import threading
from typing import Protocol

import torch

from lightning_cxl.errors import StorageError
from lightning_cxl.memory.resource import Buffer
from lightning_cxl.storage.engine import StorageTransfer
from lightning_cxl.storage.record import Record
from lightning_cxl.transfer.engine import Transfer, TransferEngine


class HasRecord(Protocol):
    """What lies on SSD and is read for the device."""

    @property
    def record(self) -> Record:
        """The bytes."""

    @property
    def can_be_read(self) -> bool:
        """Whether the write of what is to be read has begun."""

    def fill(self, slot: Buffer) -> None:
        """Bring bytes that are not in the record to a slot that it was read into."""


class SlotKeeper(Protocol):
    """What a slot is kept for."""

    def done(self) -> bool:
        """Return whether the slot is free."""

    def wait_host(self) -> None:
        """Block until the slot is free."""


class Trip(Protocol):
    """What the hop's thread runs in turn: a `Fetch`, or what leaves for SSD."""

    slot: Buffer | None

    def start(self, engine: TransferEngine) -> SlotKeeper | None:
        """Start the last transfer of the trip, which keeps the slot; None where there is none."""

    def end(self, error: BaseException | None) -> None:
        """Learn that it was started, or why not."""


class Fetch:
    """One copy of a record to the device: asked for, read, started, waited for."""

    def __init__(self, home: HasRecord, destination: torch.Tensor, after: list[Transfer]) -> None:
        self.home = home
        self.slot: Buffer | None = None
        self.read: StorageTransfer | None = None
        self.refused: Exception | None = None
        """Why there is no read."""
        self._destination: torch.Tensor | None = destination
        self._after = after
        self._copy: Transfer | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # held while the copy is started
        self._is_dropped = False
        self._is_started = threading.Event()

    def wait(self) -> None:
        """Let device work queued from here on run after the copy; blocks the host until the copy has been started."""
        self._wait_until_started()
        assert self._copy is not None, "what was dropped is waited for"
        self._copy.wait()

    def wait_host(self) -> None:
        """Block until the copy is done, or where it was dropped, until it is known not to be started."""
        self._wait_until_started()
        if self._copy is not None:
            self._copy.wait_host()

    def done(self) -> bool:
        """Return whether the copy is done or has failed."""
        return self._is_started.is_set() and (self._copy is None or self._copy.done())

    def drop(self) -> None:
        """Let no copy be started from now on; one that has been started goes on."""
        with self._lock:
            self._is_dropped = True

    def start(self, engine: TransferEngine) -> Transfer | None:
        """Bring the bytes to the slot and start the copy; None where it was dropped. For the hop's thread."""
        if self.refused is not None:
            raise self.refused
        assert self.slot is not None
        assert self.read is not None
        self.read.wait_host()
        if not self._is_dropped:
            self.home.fill(self.slot)
        with self._lock:
            if not self._is_dropped and self._destination is not None:
                source = self.slot.tensor((self._destination.numel(),), torch.uint8)
                self._copy = engine.h2d(source, self._destination, after=self._after)
        return self._copy

    def end(self, error: BaseException | None) -> None:
        """Let those go on that wait for the start. For the hop's thread."""
        self._error = error
        self._destination, self._after, self.read, self.slot = None, [], None, None
        self._is_started.set()

    def _wait_until_started(self) -> None:
        self._is_started.wait()
        if self._error is not None:
            raise self._error.anew() if isinstance(self._error, StorageError) else self._error
