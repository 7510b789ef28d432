"""`SlotRing`: a few pieces of device memory that the weights of units take turns in."""

from collections.abc import Collection

import torch

from lightning_cxl.streaming.fetch import Fetch
from lightning_cxl.streaming.unit_weights import UnitWeights
from lightning_cxl.transfer.engine import Transfer, TransferEngine


class Slot:
    """One piece of device memory, and the unit whose weights it holds."""

    def __init__(self, engine: TransferEngine, nbytes: int) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=engine.device)
        self.unit: UnitWeights | None = None
        self._engine = engine
        self._transfers: list[Transfer] = []
        self._versions: tuple[int, ...] = ()
        self._users = engine.mark()  # device work that uses the memory; at first, older work on it

    def fetch(self, unit: UnitWeights, versions: tuple[int, ...]) -> None:
        """Start copying the weights of `unit` here, which are at least as new as `versions`.

        The copy waits only for device work that uses this memory. Other device work runs at the same time.
        """
        before = [self._users, *self.drop()]  # these, if they have brought what was not needed
        self.unit, self._transfers = None, []
        for offset, flat, home in unit.pieces:
            into = self.memory[offset : offset + flat.numel()]
            self._transfers.append(home.fetch(self._engine, flat, into, before))
        self.unit, self._versions = unit, versions  # only now: a copy that cannot be started leaves nobody's weights
        unit.readers = self._transfers

    def drop(self) -> list[Transfer]:
        """Let no copy be started that has not been yet; return those of the engine's."""
        copies = []
        for transfer in self._transfers:
            if isinstance(transfer, Fetch):
                transfer.drop()
            else:
                copies.append(transfer)
        return copies

    def leave(self) -> None:
        """Note that all readers of the weights have been queued: the next copy into this slot starts after them."""
        self._users = self._engine.mark()

    def wait(self) -> None:
        """Let device work queued from here on read the weights.

        Raises:
            StorageError: they could not be read.
        """
        try:
            for transfer in self._transfers:
                transfer.wait()
        except BaseException:
            self.unit = None  # it has to be fetched again
            raise

    def is_image_of(self, unit: UnitWeights) -> bool:
        """Whether this has, or gets, the weights of `unit` as they are now."""
        return self.unit is unit and self._versions == unit.versions()


class SlotRing:
    """Hands out slots; the one that was touched longest ago is the first to be taken away.

    Args:
        engine: copies into them.
        num_slots: at least 2: one computes while the other is filled.
        nbytes: of the largest unit.
    """

    def __init__(self, engine: TransferEngine, num_slots: int, nbytes: int) -> None:
        self.nbytes = num_slots * nbytes
        """Device memory of all slots."""
        self._slots = [Slot(engine, nbytes) for _ in range(num_slots)]

    def find(self, unit: UnitWeights) -> Slot | None:
        """Return the slot that has or gets the present weights of `unit`."""
        return next((slot for slot in self._slots if slot.is_image_of(unit)), None)

    def fetch(self, unit: UnitWeights, versions: tuple[int, ...], keep: Collection[Slot]) -> Slot | None:
        """Start bringing the weights of `unit` into a slot that is not to be kept; None where all are."""
        slot = next((slot for slot in self._slots if slot not in keep), None)
        if slot is not None:
            slot.fetch(unit, versions)
            self.touch(slot)
        return slot

    def forget(self, keep: Collection[Slot]) -> None:
        """Mark every slot but those in `keep` as empty."""
        for slot in self._slots:
            if slot not in keep:
                slot.unit = None

    def clear(self) -> None:
        """Let go of the memory."""
        for slot in self._slots:
            slot.drop()
        self._slots.clear()

    def touch(self, slot: Slot) -> None:
        """Make this slot the last one to be taken away."""
        self._slots.remove(slot)
        self._slots.append(slot)
