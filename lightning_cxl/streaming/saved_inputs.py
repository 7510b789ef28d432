"""The tensors that a unit's forward was given, kept until its recompute: on a host tier, or by reference.

[Note: Life of a saved input]
* Stored (carries gradient, is big enough): copied to the tier while the unit's forward runs; the device waits for the
  copy at the unit's end, so code after the unit may overwrite or drop the tensor. A unit that overwrites its own input
  must not start before the copy is done; which inputs those are is learned from the unit's first call, where every copy
  is waited for, and a later surprise is an error (`UnitInput`). The bytes live as long as a graph needs them: a unit's
  call holds `StoredInput`, autograd's saved tensors hold the call.
* The newest call keeps a stored tensor itself as well, until the next call begins: what the last unit of a forward
  was given is on the device when backward begins, unless it has been changed since.
* One tensor given to several units is stored once: found again by identity (a weak reference, never an address) and
  version. An exact image is kept: same strides, same address modulo 64, so that a recompute runs the same kernels.
* On SSD where it belongs there: the copy lands in a host slot and is written. See [Note: Inputs on SSD].
* Held (masks, position embeddings, ids, small or sparse tensors): a detached alias, and its version is checked.
  Holding the tensor itself could close a cycle through the graph that no garbage collector sees.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from lightning_cxl.errors import UnsupportedError
from lightning_cxl.memory.host_memory import storage_extent
from lightning_cxl.streaming.on_ssd import InputOnSsd
from lightning_cxl.transfer.engine import Transfer, TransferEngine

# ----------------------------------------------------------------------------------------------------
# Versions of tensors: torch counts writes in place.


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the tensor's version counter; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def stale_error(
    what: str,
    version: int | None,
    expected: int | None,
    advice: str = "Run backward before changing it, or change a clone.",
) -> RuntimeError:
    """Return the error for a tensor that changed between forward and recompute; autograd has the same."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} is at "
        f"version {version}, the forward saw version {expected}. {advice}"
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have the same bits: NaN is equal to itself, 0 is not -0."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


_ALIGNMENT = 64  # bytes; what torch's own allocations and ours start at


class HostBytes(Protocol):
    """Memory that a tensor can be made over and that lives as long as that tensor, such as `memory.resource.Buffer`."""

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor over the first bytes."""


Allocate = Callable[[int, str], HostBytes]
"""Takes a number of bytes and the unit's name."""
PlaceOnSsd = Callable[[int, str], InputOnSsd | None]
"""Takes the same; None where the image belongs in memory."""


def all_in_memory(_nbytes: int, _unit: str) -> None:
    """Be a `PlaceOnSsd` where nothing lies on SSD."""


class SavedBytes:
    """Counts the bytes of living saved inputs. A dying one may be finalised anywhere, so it only appends to a deque."""

    def __init__(self) -> None:
        self.freed: deque[int] = deque()
        self._bytes = self._peak = self._count = 0

    def add(self, nbytes: int) -> None:
        self._drain()
        self._bytes += nbytes
        self._count += 1
        self._peak = max(self._peak, self._bytes)

    def stats(self) -> dict[str, int]:
        """Return ``saved_bytes`` and ``num_saved`` (living now) and ``peak_saved_bytes``."""
        self._drain()
        return {"saved_bytes": self._bytes, "peak_saved_bytes": self._peak, "num_saved": self._count}

    def _drain(self) -> None:
        while self.freed:
            self._bytes -= self.freed.popleft()
            self._count -= 1


class StoredInput:
    """An exact image of one tensor on a host tier, or on SSD. See [Note: Life of a saved input]."""

    def __init__(
        self,
        tensor: torch.Tensor,
        engine: TransferEngine,
        allocate: Allocate,
        unit: str,
        saved: SavedBytes,
        place_on_ssd: PlaceOnSsd = all_in_memory,
    ) -> None:
        self._size, self._stride = tensor.shape, tensor.stride()
        self._lead = tensor.data_ptr() % _ALIGNMENT // tensor.element_size()
        extent = storage_extent(tensor)
        self.nbytes = (self._lead + extent) * tensor.element_size()
        self._numel, self._dtype = self._lead + extent, tensor.dtype
        flat = tensor.detach().as_strided((extent,), (1,), tensor.storage_offset())
        self._on_ssd = place_on_ssd(self.nbytes, unit)
        if self._on_ssd is not None:
            self.transfer = self._on_ssd.store(flat, self._lead)
        else:
            self._host = allocate(self.nbytes, unit).tensor((self._numel,), tensor.dtype)
            # no leaf (`can_store`): an operator has computed it on the current stream
            self.transfer = engine.d2h(flat, self._host[self._lead :], from_here=True)
        self.source = weakref.ref(tensor)
        self.version = version_of(tensor)
        self._address = tensor.data_ptr()
        self._saved = saved
        saved.add(self.nbytes)

    def __del__(self) -> None:
        """Take the bytes off the sum, unless construction failed before they were added."""
        saved = getattr(self, "_saved", None)
        if saved is not None:
            saved.freed.append(self.nbytes)

    def is_image_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this holds the values that `tensor` has now, as far as torch counts writes."""
        is_known = self.source() is tensor and self.version == version_of(tensor)
        return is_known and self._address == tensor.data_ptr()  # another one where `.data` has been replaced

    def has_bits_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the image equals `tensor`, which has its shape. On the host only."""
        return same_bits(tensor, self.shape_like_source(self.on_host()))

    @property
    def is_on_ssd(self) -> bool:
        """Whether it has no memory between forward and backward."""
        return self._on_ssd is not None

    def must_move(self, engine: TransferEngine) -> bool:
        """Return whether a recompute needs a copy of the image."""
        return self.is_on_ssd or not engine.computes_on_host

    def fetch(self, engine: TransferEngine) -> tuple[torch.Tensor, Transfer]:
        """Start bringing the image to the device; once the transfer is waited for, `shape_like_source` it."""
        destination = torch.empty(self._numel, dtype=self._dtype, device=engine.device)
        if self._on_ssd is not None:
            return destination, self._on_ssd.fetch(destination)
        return destination, engine.h2d(self._host, destination, after=(self.transfer, engine.mark()))

    def on_host(self) -> torch.Tensor:
        """Return the image itself, or a copy of one on SSD, for a device that computes on host memory.

        It must not be written to.
        """
        if self._on_ssd is not None:
            image = torch.empty(self._numel, dtype=self._dtype)
            self._on_ssd.fetch(image).wait_host()
            return image
        self.transfer.wait_host()
        return self._host

    def shape_like_source(self, image: torch.Tensor) -> torch.Tensor:
        """Return the tensor that `image`, or a copy of it, is the image of: without gradient, same strides."""
        return image.as_strided(self._size, self._stride, image.storage_offset() + self._lead)


class HeldInput:
    """A tensor kept by reference; an error if it has changed when it is needed again."""

    __slots__ = ("_alias", "_unit", "_version")

    def __init__(self, tensor: torch.Tensor, unit: str) -> None:
        self._alias = tensor.detach()
        self._version = version_of(tensor)
        self._unit = unit

    def get(self) -> torch.Tensor:
        version = version_of(self._alias)
        if version != self._version:
            what = f"an input of unit `{self._unit}`, shape {tuple(self._alias.shape)} and {self._alias.dtype},"
            raise stale_error(what, version, self._version)
        return self._alias


class UnitInput:
    """One tensor among a call's arguments: watched during the forward, given to recomputes. See [Note: Life of a ...].

    Args:
        cautious: the unit is known to change this input in place, or nothing is known about it yet.
    """

    __slots__ = (
        "_alias",
        "_is_changed",
        "_is_safe",
        "_kept",
        "_near",
        "_on_the_way",
        "_requires_grad",
        "_spare",
        "_unit",
        "_version",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        kept: StoredInput | HeldInput,
        unit: str,
        *,
        cautious: bool,
    ) -> None:
        self._kept = kept
        self._unit = unit
        self._requires_grad = tensor.requires_grad
        self._version = version_of(tensor)
        self._alias: torch.Tensor | None = tensor.detach()  # shares the version counter
        self._spare: torch.Tensor | None = None
        self._on_the_way: tuple[torch.Tensor, Transfer] | None = None
        self._near: torch.Tensor | None = None  # the tensor itself, while no other unit has run
        self._is_changed = True  # for all we know, until the forward has returned
        self._is_safe = cautious
        if isinstance(kept, StoredInput):
            if cautious:
                kept.transfer.wait()
            self._is_safe = cautious or kept.transfer.done()
        elif cautious:
            with torch.no_grad():
                self._spare = self._alias.clone()

    def observe(self) -> bool:
        """Return whether the forward, which has just returned, changed the tensor in place."""
        assert self._alias is not None
        self._is_changed = version_of(self._alias) != self._version
        return self._is_changed

    def shares_memory_with(self, other: "UnitInput") -> bool:
        """Return whether both are views of one storage; to be asked before `release`."""
        assert self._alias is not None and other._alias is not None
        if self._alias.layout is not torch.strided or other._alias.layout is not torch.strided:
            return False
        return self._alias.untyped_storage().data_ptr() == other._alias.untyped_storage().data_ptr()

    def release(self, engine: TransferEngine) -> None:
        """Keep what a recompute needs and drop the rest."""
        assert self._alias is not None
        if self._is_changed and not self._is_safe:
            raise UnsupportedError(
                f"unit `{self._unit}` changed an input in place (shape {tuple(self._alias.shape)}) in this call, but "
                f"not in its first, before its values were saved. Let it work on a clone, or leave the unit out of "
                "`units`."
            )
        if self._is_changed and self._spare is not None:
            self._kept = HeldInput(self._spare, self._unit)
        if isinstance(self._kept, StoredInput):
            self._kept.transfer.wait()
            self._near = None if self._is_changed or engine.computes_on_host else self._alias
        self._alias = self._spare = None

    def let_go(self) -> None:
        """Leave a stored tensor to its image."""
        self._near = None

    def prefetch(self, engine: TransferEngine) -> None:
        """Start bringing a stored tensor to the device, unless it need not move or is on the way."""
        if self._near is not None and version_of(self._near) == self._version:
            return
        if isinstance(self._kept, StoredInput) and self._kept.must_move(engine) and self._on_the_way is None:
            self._on_the_way = self._kept.fetch(engine)

    def load(self, engine: TransferEngine) -> torch.Tensor:
        tensor = self._values(engine).detach()
        if self._requires_grad:
            tensor.requires_grad_()
        # a private copy, no leaf: a leaf that requires gradient must not be changed in place, nor must the saved bytes
        return tensor.clone() if self._is_changed else tensor

    def _values(self, engine: TransferEngine) -> torch.Tensor:
        if isinstance(self._kept, HeldInput):
            return self._kept.get()
        if not self._kept.must_move(engine):
            return self._kept.shape_like_source(self._kept.on_host())
        near, self._near = self._near, None
        if near is not None and version_of(near) == self._version:
            return near
        self.prefetch(engine)
        assert self._on_the_way is not None
        (image, transfer), self._on_the_way = self._on_the_way, None
        transfer.wait()
        return self._kept.shape_like_source(image)


def can_store(tensor: torch.Tensor, device: torch.device, min_bytes: int) -> bool:
    """Return whether an input belongs on the tier: it carries gradient and an image of it is exact and not wasteful."""
    if type(tensor) is not torch.Tensor or not tensor.requires_grad or tensor.is_leaf or not tensor.is_floating_point():
        return False
    if tensor.device != device or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    nbytes = tensor.numel() * tensor.element_size()
    return 0 < nbytes >= min_bytes and storage_extent(tensor) <= 2 * tensor.numel()
