"""`InPlaceInput`: an input that lies on its tier already and is kept by reference, without a copy.

[Note: Inputs kept in place]
A device that computes on host memory is given inputs that may lie on their tier already: all memory of a machine with
one kind of memory does. A copy of such an input takes time and memory, and has one use: it has the old values when the
model changes the tensor in place after the unit (``y = block(x); x.add_(y)``). So an input is copied until a backward
has shown that nobody changes it:

* Position by position among the tensors of a unit's calls. `UnitForward.lasting` knows for each position whether the
  input had, at every recompute so far, the version that the forward had seen. Only then the next ones stay in place.
* One that is changed is an error at its recompute, like a tensor that autograd has saved, never a wrong gradient; its
  position is copied from then on. The same holds where the unit itself changes it, see [Note: Life of a saved input].
* Only a tensor that has its storage for itself stays: of a small view all of the storage would be kept. And only
  ordinary memory: what lies in other memory, such as a file's, has an owner who may write to it unseen.
* Bytes in place count for the report like copied ones, but for no budget: nothing is taken from the system for them.
  A tier with a budget of the user's gets copies, which keep to it.
"""

import weakref
from collections.abc import Callable

import torch

from lightning_cxl.streaming.saved_inputs import HeldInput, SavedBytes, storage_extent
from lightning_cxl.streaming.versions import version_of

KeepInPlace = Callable[[torch.Tensor, int, str], object | None]
"""Takes a tensor, its bytes and the unit's name. Returns what counts these bytes as long as it lives, or None where
the tensor does not lie on the unit's tier."""


class InPlaceInput(HeldInput):
    """An input of units that is its own image on the tier. See [Note: Inputs kept in place].

    Args:
        tensor: the input.
        unit: name, for errors.
        count: counts the bytes as long as it lives.
        saved: counts them, too.
    """

    __slots__ = ("__weakref__", "_count", "_nbytes", "_saved", "_source")

    def __init__(self, tensor: torch.Tensor, unit: str, count: object, saved: SavedBytes) -> None:
        super().__init__(tensor, unit)
        self._source = weakref.ref(tensor)
        self._count = count
        self._saved = saved
        self._nbytes = input_bytes(tensor)
        saved.add(self._nbytes)

    def __del__(self) -> None:
        """Take the bytes off the sum."""
        self._saved.freed.append(self._nbytes)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this keeps `tensor` with the values that it has now."""
        return self._source() is tensor and self._version == version_of(tensor)


def input_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    return storage_extent(tensor) * tensor.element_size()


def may_stay(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has its storage for itself, in memory that torch's own allocator gave."""
    storage = tensor.untyped_storage()
    return storage.nbytes() <= input_bytes(tensor) and storage.resizable()
