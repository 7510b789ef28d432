"""`InPlaceInput`: an input that lies on its tier already and is kept where it lies, without a copy.

[Note: Inputs kept in place]
A device that computes on host memory is given inputs that may lie on their tier already: all memory of a machine with
one kind of memory does. A copy of such an input takes time and memory, and has one use: it has the old values when the
model writes to the tensor after the unit (``y = block(x); x.add_(y)``). So an input is copied until a backward has
shown that nobody writes to it, and is kept where it lies from then on:

* Position by position among the tensors of a unit's calls. `UnitForward.lasted` counts for each position the recomputes
  at which the input was the same as in its forward. One at which it was not is enough to copy that position for good.
* The first recompute compares versions and every bit of copy and source: `x.data.zero_()` and writes through numpy or
  DLPack have no version. The source's memory is kept for that. The model may drop it much earlier, so before each
  unit's call every source is looked at that only this package holds: nobody can write to it any more. It is compared
  then, and freed. One input at most lives longer than without the comparison.
* Later only versions are compared, which costs nothing. A write that begins late is an error at the recompute, like a
  write to a tensor that autograd has saved, and the position is copied from then on. The same holds where the unit
  writes to its own input, see [Note: Life of a saved input]. A late write that has no version is not seen, as in
  `torch.utils.checkpoint`: the gradients are then those of the new values.
* Only a tensor that has its storage for itself stays: of a small view all of the storage would be kept. And only
  ordinary memory: what lies in other memory, such as a file's, has an owner who may write to it unseen.
* Bytes kept where they lie count for the report like copied ones, but for no budget: nothing is taken from the system
  for them. A tier with a budget of the user's gets copies, which keep to it.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from lightning_cxl.memory.host_tensors import storage_extent
from lightning_cxl.streaming.saved_inputs import HeldInput, SavedBytes
from lightning_cxl.streaming.versions import version_of

KeepInPlace = Callable[[torch.Tensor, int, str], object | None]
"""Takes a tensor, its bytes and the unit's name. Returns what counts these bytes as long as it lives. None where the
tensor must be copied: its memory is not known to be that of the unit's tier, or is the package's own; the unit's inputs
are spread over several tiers, or wanted in page-locked memory; the tier has a budget, or DRAM stands in for it; or the
run's memory is closed."""


class History(NamedTuple):
    """Why an input is expected to keep its values."""

    position: int
    """Which one of the different tensors of the unit's call it is, from 0."""
    times: int
    """At how many recomputes the input of this position was unchanged so far."""


class InPlaceInput(HeldInput):
    """An input of units that is kept where it lies. See [Note: Inputs kept in place].

    Args:
        tensor: the input.
        unit: name, for errors.
        count: counts the bytes as long as it lives.
        saved: counts them, too.
        lasted: why there is no copy, for errors.
    """

    __slots__ = ("__weakref__", "_address", "_count", "_lasted", "_nbytes", "_saved", "_source")

    def __init__(self, tensor: torch.Tensor, unit: str, count: object, saved: SavedBytes, lasted: History) -> None:
        super().__init__(tensor, unit)
        self._lasted = lasted
        self._address = tensor.data_ptr()
        self._source = weakref.ref(tensor)
        self._count = count
        self._nbytes = input_bytes(tensor)
        self._saved = saved
        saved.add(self._nbytes)

    def __del__(self) -> None:
        """Take the bytes off the sum, unless construction failed before they were added."""
        saved = getattr(self, "_saved", None)
        if saved is not None:
            saved.freed.append(self._nbytes)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Return whether this keeps `tensor` with the values that it has now."""
        is_known = self._source() is tensor and self._version == version_of(tensor)
        return is_known and self._address == tensor.data_ptr()  # another one where `.data` has been replaced

    def why_no_copy(self) -> str:
        """Return why there is no copy, and what to do about it."""
        return (
            f"It (tensor {self._lasted.position} of the call, counted from 0) was kept without a copy since it had not "
            f"been changed in {self._lasted.times} calls before. Change a clone instead: `x = x.clone()` before the "
            "write."
        )


def input_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    return storage_extent(tensor) * tensor.element_size()
