"""Weights of units live on the host and visit the device: fetched ahead of the unit that computes next.

[Note: Residency of a unit]
A streamed parameter shows (``p.data``) its home, a piece of host memory, except while its unit computes; then it shows
a slot on the device that holds a copy. Optimizers, checkpoints and the user's own code between units therefore always
find the weights on the host, and only the home is ever written.

* Enter: a unit's forward starts. Its slot is the one that has a copy of these very weights, or gets one now. A step, a
  loaded checkpoint or any other write makes copies old: versions count writes in place, and [Note: Awaited parameters]
  who may write through ``.data``. The device waits for the copy.
* Gradients so far are on the host, so the unit's own forward, which may be compiled, does not see them.
* A user's ``torch.autocast`` keeps 16-bit casts of float32 weights, found by the parameter, until its context ends: of
  all units, whatever the parameters show by then. They are dropped when a unit's own forward ends.
* Leave: the forward has returned. Queued kernels may still read the slot; a later copy into it starts after them (see
  [Note: Copies and streams]), so the host need not wait.
* In backward the recompute of an offloaded unit enters it again, and it stays entered, because its gradients are
  computed from views of the slot, until the recompute of another unit starts or `release` is called.
* A backward that is differentiated itself (``create_graph=True``: gradient penalties, forces, Hessians) saves weights
  in its own graph, which no recompute repeats. So its recomputes show a copy of the slot, which lives as long as the
  graph and has the parameter's version: one that is older than an update is an error, as in autograd.
* Ahead: while a unit computes, those that came after it the last time are fetched, as many as there are slots: all of
  them between steps, when none is taken. A wrong guess costs a copy, never a result. A unit whose update still runs is
  fetched when that is done, by the thread that ran it ([Note: Overlapped updates]); whoever enters it before waits.
* A slot that an entered unit shows is busy and is not taken away. With all of them busy a unit cannot be entered.

A unit whose forward must be differentiated without a recompute keeps views of the slot in its graph, which would show
other weights later. That is refused.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from lightning_cxl.errors import ConfigError, UnsupportedError
from lightning_cxl.streaming.on_ssd import Fetch
from lightning_cxl.streaming.stand_in import Compiler, StandIn, call_under
from lightning_cxl.streaming.unit_weights import Nobody, UnitListener, UnitWeights
from lightning_cxl.torch_private import caches_weights, is_in_transform, tree_leaves
from lightning_cxl.transfer.engine import Transfer, TransferEngine

# ----------------------------------------------------------------------------------------------------
# `SlotRing`: a few pieces of device memory that the weights of units take turns in.


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
    """Hands out slots; the one that was touched longest ago is the first to be taken away."""

    def __init__(self, engine: TransferEngine, num_slots: int, nbytes: int) -> None:
        self.nbytes = num_slots * nbytes
        """Device memory of all slots."""
        self._slots = [Slot(engine, nbytes) for _ in range(num_slots)]

    def find(self, unit: UnitWeights) -> Slot | None:
        return next((slot for slot in self._slots if slot.is_image_of(unit)), None)

    def fetch(self, unit: UnitWeights, versions: tuple[int, ...], keep: Collection[Slot]) -> Slot | None:
        """Start bringing the weights of `unit` into a slot that is not to be kept; None where all are."""
        slot = next((slot for slot in self._slots if slot not in keep), None)
        if slot is not None:
            slot.fetch(unit, versions)
            self.touch(slot)
        return slot

    def forget(self, keep: Collection[Slot]) -> None:
        for slot in self._slots:
            if slot not in keep:
                slot.unit = None

    def clear(self) -> None:
        for slot in self._slots:
            slot.drop()
        self._slots.clear()

    def touch(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._slots.append(slot)


MIN_SLOTS = 2
NUM_SLOTS = 3
"""One computes, one is fetched for what comes next, one was used last."""


class ParamStreamer:
    """Brings the weights of units to the device when they compute. See [Note: Residency of a unit].

    Args:
        phase: says why a unit's forward runs: ``"forward"`` (which a recompute will repeat), ``"recompute"``,
            ``"recompute in a graph"``, or None.
        num_slots: pieces of device memory, each as large as the largest unit.
    """

    def __init__(
        self,
        engine: TransferEngine,
        units: Sequence[UnitWeights],
        phase: Callable[[], str | None],
        *,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        if num_slots < MIN_SLOTS:
            raise ConfigError(f"{num_slots} slots: one unit computes while another is fetched, so give at least 2")
        self.phase = phase
        self._listener: UnitListener = Nobody()
        self.num_fetches = self.num_late = 0
        """Copies started; and those of them that were not asked for before their unit was entered."""
        self._engine = engine
        self._units = list(units)
        self._num_slots = num_slots
        self._ring = SlotRing(engine, num_slots, max(unit.nbytes for unit in units))
        # guards the ring and all below; held while copies are started, which takes long from pageable memory only
        self._lock = threading.Lock()
        self._entered: dict[int, tuple[UnitWeights, Slot]] = {}  # by id of the unit
        self._next: dict[_Visit, _Visit] = {}  # what followed what
        self._latest: _Visit | None = None
        self._attached: list[_StreamedForward] = []

    def attach(self, listener: UnitListener) -> None:
        """Let the weights of units come and go from now on, until `detach`.

        Args:
            listener: learns of recomputes, of units whose backward is over, and of who looks at parameters.
        """
        self._attached = [_StreamedForward(self, unit) for unit in self._units]
        self._listener = listener
        for unit in self._units:
            unit.attach(listener)

    def stats(self) -> dict[str, int]:
        """Return ``num_units``, ``host_bytes`` of their weights in memory, ``slot_bytes`` on the device, and copies."""
        return {
            "num_units": len(self._units),
            "host_bytes": sum(unit.memory_bytes for unit in self._units),
            "slot_bytes": self._ring.nbytes,
            "num_fetches": self.num_fetches,
            "num_late": self.num_late,
        }

    def enter(self, unit: UnitWeights) -> None:
        phase = self.phase()
        in_backward = _is_recompute(phase)
        unit.num_forwards += phase == "forward"
        if in_backward:
            self._listener.recompute_begins()
            self.release(keep=unit)
        unit.wait()
        for each in self._units:
            each.forget_looks()
        if id(unit) not in self._entered:
            unit.unwatch()
            unit.take_in()
        with self._lock:
            slot = self._occupy(unit)
            visit = _Visit(unit, in_backward)
            if self._latest is not None:
                self._next[self._latest] = visit
            self._latest = visit
        if slot is not None:
            try:
                slot.wait()
            except BaseException:
                with self._lock:
                    del self._entered[id(unit)]
                unit.watch()
                raise
            unit.enter(slot.memory)
        if phase == "recompute in a graph":
            unit.enter(self._entered[id(unit)][1].memory[: unit.nbytes].clone())
        self.fetch_ahead()

    def leave(self, unit: UnitWeights) -> None:
        with self._lock:
            entered = self._entered.pop(id(unit), None)
            if entered is None:
                return
            is_unchanged = entered[1].is_image_of(unit)  # before another thread may fill the slot
            entered[1].leave()
        try:
            unit.leave()
        finally:
            unit.watch()
        if not is_unchanged:
            raise UnsupportedError(
                f"unit `{unit.name}` wrote to its weights in its forward or backward: they visit the device as a copy, "
                "so the change would be lost. Leave the unit out of `units`, or write between steps."
            )

    def release(self, keep: UnitWeights | None = None) -> None:
        """Leave every unit except `keep`: the backward of these units is over."""
        with ExitStack() as leaving:  # last in, first out; one that fails does not keep the others from coming home
            for unit, _ in reversed(list(self._entered.values())):
                if unit is not keep:
                    leaving.callback(self._end, unit)

    def _end(self, unit: UnitWeights) -> None:
        self.leave(unit)
        self._listener.unit_is_over(unit)

    def fetch_ahead(self) -> None:
        """Start bringing the units that are expected next, as far as there are slots. Safe from any thread."""
        with self._lock:
            keep = {slot for _, slot in self._entered.values()}
            for unit in self._expected():
                slot = self._ring.find(unit)
                if slot is None:
                    # before the question: another thread may look, or begin an update, and what is copied is old then
                    versions = unit.versions()
                    if unit.is_updating() or unit.is_seen:
                        return
                    slot = self._ring.fetch(unit, versions, keep)
                    if slot is None:
                        return
                    self.num_fetches += 1
                keep.add(slot)

    def forget(self) -> None:
        """Fetch again what is entered next: weights may have been written in a way that leaves no trace."""
        with self._lock:
            self._ring.forget({slot for _, slot in self._entered.values()})
            self._latest = None  # and nothing ahead, until a unit is entered

    def detach(self) -> None:
        """Give the units their own forward back, with all weights at home, and the slots' memory. Idempotent."""
        with ExitStack() as leaving:
            leaving.callback(self._let_go)
            for unit, _ in list(self._entered.values()):
                leaving.callback(self.leave, unit)

    def _let_go(self) -> None:
        self._listener = Nobody()
        with self._lock:
            self._latest = None
            self._ring.clear()
        while self._attached:
            self._attached.pop().remove()
        for unit in self._units:
            unit.unwatch()
            unit.attach(self._listener)

    def _occupy(self, unit: UnitWeights) -> Slot | None:
        if id(unit) in self._entered:
            return None
        slot = self._ring.find(unit)
        if slot is None:
            slot = self._ring.fetch(unit, unit.versions(), {slot for _, slot in self._entered.values()})
            if slot is None:
                names = ", ".join(f"`{other.name}`" for other, _ in self._entered.values())
                raise UnsupportedError(
                    f"no slot for the weights of unit `{unit.name}`: {names} compute already. Units that compute "
                    "inside each other need more slots"
                )
            self.num_fetches += 1
            self.num_late += 1
        self._ring.touch(slot)
        self._entered[id(unit)] = unit, slot
        return slot

    def _expected(self) -> Iterator[UnitWeights]:
        """Yield different units that came after the latest one, the next first: as many as there are slots at most."""
        seen: set[int] = set()
        visit = self._latest
        for _ in range(2 * self._num_slots):  # a unit may come twice, at the turn from forward to backward
            visit = None if visit is None else self._next.get(visit)
            if visit is None or len(seen) == self._num_slots:
                return
            if id(visit.unit) not in seen:
                seen.add(id(visit.unit))
                yield visit.unit


class _Visit(NamedTuple):
    unit: UnitWeights
    in_backward: bool


def _is_recompute(phase: str | None) -> bool:
    return phase in ("recompute", "recompute in a graph")


class _StreamedForward(StandIn):
    def __init__(self, streamer: ParamStreamer, unit: UnitWeights) -> None:
        if isinstance(unit.module.__dict__.get("forward"), _StreamedForward):
            raise ConfigError(f"unit `{unit.name}` is attached already: detach it first")
        super().__init__(unit.module)
        self._streamer = streamer
        self._unit = unit

    def run(self, compiler: Compiler, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        streamer, unit = self._streamer, self._unit
        phase = streamer.phase()
        if caches_weights(unit.module) or (torch.is_grad_enabled() and is_in_transform()):
            raise UnsupportedError(
                f"unit `{unit.name}` runs in a transform of torch.func, or in `parametrize.cached()`: either keeps "
                "weights that are on the device for this call only. Use `torch.autograd`, leave `cached()` out, or set "
                "`stream_weights=False`"
            )
        try:
            streamer.enter(unit)
            with unit.gradients_aside():
                output = call_under(compiler, self.original, args, kwargs)
        finally:  # a recompute may end in an exception of checkpoint(), which has all it needs then
            torch.clear_autocast_cache()
            if not _is_recompute(phase):
                streamer.leave(unit)
        if phase is None and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(output)):
            raise UnsupportedError(
                f"the forward of unit `{unit.name}` would be differentiated without a recompute, after its weights "
                "have left the device: it is not attached to offloaded activations, or got a key/value cache that "
                "cannot be replayed. Evaluate under torch.no_grad(), pass use_cache=False, or set stream_weights=False"
            )
        return output
