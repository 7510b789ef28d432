"""Page-lock memory and register it with the device's driver, so that copies can run beside compute.

Pin after placing: see [Note: Placing Pages Safely]. A long-term pin moves pages out of a zone of movable memory, which
CXL memory often is, silently to another node; so the kernel is asked again afterwards.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_cxl.errors import LightningCXLWarning, PinnedMemoryError
from lightning_cxl.memory.numa import PAGE_BYTES, PageNodes
from lightning_cxl.memory.resource import Buffer, MemoryResource
from lightning_cxl.native._numa import page_nodes
from lightning_cxl.units import format_bytes

# One copy must not cross the border of two registrations, so a chunk is larger than any sane tensor; the driver fails
# above 128 GiB, where the size of its page tables no longer fits an int (open-gpu-kernel-modules, PR 1234).
_CHUNK_BYTES = 16 * 2**30


class PinnedResource:
    """Page-locks every buffer of `upstream`; put a pool above it, for this is slow.

    The first failure makes it pass on pageable memory from then on, with one warning.

    Args:
        upstream: gives the memory; populated already.
        register: page-locks (address, nbytes), raising `PinnedMemoryError`; of a `DeviceType`.
        unregister: undoes it, given the address.
        required: raise `PinnedMemoryError` on a failure instead.
        where: asks where pages are, after pinning; None on a machine where they can only be in one place.
        chunk_bytes: most bytes of one registration.
    """

    def __init__(
        self,
        upstream: MemoryResource,
        register: Callable[[int, int], None],
        unregister: Callable[[int], None],
        *,
        required: bool = False,
        where: PageNodes | None = page_nodes,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self.failure = ""
        """Why memory stays pageable from now on; empty as long as it is page-locked."""
        self._upstream = upstream
        self._required = required
        self._register = register
        self._unregister = unregister
        self._where = where
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[int, list[int]] = {}  # buffer address -> addresses registered
        self._pid = os.getpid()

    def allocate(self, nbytes: int, *, alignment: int = PAGE_BYTES) -> Buffer:
        """Return a pinned buffer, or a pageable one after a failure.

        Raises:
            TierFullError: `upstream` is exhausted.
            PinnedMemoryError: pinning failed and is required; nothing stays allocated.
        """
        if not self.failure and nbytes:
            try:
                return self._allocate_pinned(nbytes, alignment)
            except PinnedMemoryError as error:
                if self._required:
                    raise
                self.failure = str(error)
            warnings.warn(
                f"{self.failure} Memory stays pageable: copies to and from it wait.", LightningCXLWarning, stacklevel=2
            )
        return self._upstream.allocate(nbytes, alignment=alignment)

    def deallocate(self, buffer: Buffer) -> None:
        """Unregister a dying buffer; `upstream` gets its own buffer back afterwards by itself."""
        for address in self._chunks.pop(buffer.address, ()):
            if os.getpid() == self._pid:  # a forked child has neither the memory nor the driver
                self._unregister(address)

    def _allocate_pinned(self, nbytes: int, alignment: int) -> Buffer:
        inner = self._upstream.allocate(nbytes, alignment=max(alignment, PAGE_BYTES))
        # from here on the new buffer's death unregisters what was registered
        chunks = self._chunks[inner.address] = []
        buffer = Buffer(inner.address, nbytes, inner.spans, self, inner)
        for offset in range(0, nbytes, self._chunk_bytes):
            with page_locking(nbytes):
                self._register(buffer.address + offset, min(self._chunk_bytes, nbytes - offset))
            chunks.append(buffer.address + offset)
        check_nodes(buffer, self._where)
        return buffer


@contextmanager
def page_locking(nbytes: int) -> Iterator[None]:
    """Return a region in which `nbytes` are page-locked: a refusal says there how much, and what to do."""
    try:
        yield
    except PinnedMemoryError as error:
        raise PinnedMemoryError(
            f"cannot page-lock {format_bytes(nbytes)} for the device: {error}. Raise the limit `ulimit -l` (of a "
            "container `--ulimit memlock=-1`) or the memory of the container or of WSL, or set pin_memory=False."
        ) from error


def check_nodes(buffer: Buffer, where: PageNodes | None) -> None:
    """Check that a buffer that has been page-locked lies where it did before.

    Args:
        buffer: its spans say where.
        where: asks where pages are; None where they can only be in one place.

    Raises:
        PinnedMemoryError: some have moved.
    """
    if where is None:
        return
    nodes = Counter[int]()
    for span in buffer.spans:
        nodes[span.node_id] += span.nbytes
    found = where(buffer.address, buffer.nbytes)
    moved = {node: size - nodes[node] for node, size in found.items() if size > nodes[node]}
    if moved:
        raise PinnedMemoryError(
            f"page-locking moved {format_bytes(sum(moved.values()))} of {format_bytes(buffer.nbytes)} on nodes "
            f"{sorted(nodes)} to nodes {sorted(moved)}: their memory is online as movable. Bring it online with "
            f"`daxctl online-memory --no-movable`, or set pin_memory=False."
        )
