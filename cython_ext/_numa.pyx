# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""Reserve, place, populate and ask about host memory: the system calls of NUMA placement, without libnuma.

Every `OSError` raised here carries the kernel's errno. Nothing here decides anything: the recipe that makes
placement safe lives in `lightning_cxl/memory/resource.py`.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINVAL, ENOMEM, errno
from libc.stdint cimport uintptr_t
from libc.string cimport memset

import mmap as _mmap
import os

cdef size_t PAGE = _mmap.PAGESIZE  # the unit of move_pages; 64 KiB on some machines
NOWHERE = -1  # the key of bytes that no page backs yet

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset)
    int munmap(void *address, size_t length)
    int madvise(void *address, size_t length, int advice)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_SHARED, MAP_ANONYMOUS, MAP_NORESERVE, MAP_FIXED
    void *MAP_FAILED
    int MADV_DONTNEED, MADV_REMOVE, MADV_DONTFORK, MADV_HUGEPAGE

cdef extern from "<unistd.h>" nogil:
    long syscall(long number, ...)
    int getpid()

cdef extern from "<sys/syscall.h>" nogil:
    long SYS_mbind, SYS_move_pages

cdef enum:
    POPULATE_WRITE = 23         # MADV_POPULATE_WRITE, Linux 5.14; older libc headers lack the name
    POPULATE_STEP = 67108864    # bytes between two looks at pending signals (Ctrl-C)
    PREFERRED = 1               # MPOL_PREFERRED
    MAX_NODES = 1024
    SLOTS = 1025                # one more for pages that are nowhere
    MASK_WORDS = 16             # MAX_NODES bits
    MOVE = 2                    # MPOL_MF_MOVE
    BATCH = 1024                # pages asked about or moved in one call


cdef int _raise_errno(int code, str what) except -1:
    raise OSError(code, f"{what}: {os.strerror(code)}")


@cython.auto_pickle(False)
@cython.no_gc_clear  # the owner must outlive the last view of its bytes
cdef class Range:
    """Exports ``[address, address + nbytes)`` through the buffer protocol and keeps `owner` alive."""

    cdef readonly size_t address
    cdef readonly Py_ssize_t nbytes
    cdef readonly object owner

    def __init__(self, size_t address, Py_ssize_t nbytes, object owner):
        self.address = address
        self.nbytes = nbytes
        self.owner = owner

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, <void *> self.address, self.nbytes, 0, flags)


@cython.auto_pickle(False)
cdef class Mapping:
    """One mapping of this process, private and anonymous; unmapped when the object dies.

    Only addresses are reserved: the kernel backs a page when it is populated or first touched.

    Args:
        nbytes: size, rounded up to whole pages.
        alignment: of the first byte, a power of two of at least one page.
        inherit: whether a forked child sees the memory (copy on write). Otherwise it does not exist there.
    """

    cdef readonly size_t address
    cdef readonly size_t nbytes
    cdef int _pid
    cdef bint _inherit

    def __cinit__(self, size_t nbytes, size_t alignment=PAGE, bint inherit=False):
        cdef size_t length, head
        cdef char *base
        if nbytes == 0 or alignment < PAGE or alignment & (alignment - 1):
            raise ValueError(f"cannot map {nbytes} bytes aligned to {alignment}")
        if nbytes > <size_t> 1 << 62 or alignment > <size_t> 1 << 40:
            raise OSError(ENOMEM, f"cannot map {nbytes} bytes: beyond the address space")
        nbytes = (nbytes + PAGE - 1) // PAGE * PAGE
        length = nbytes + alignment
        with nogil:
            base = <char *> mmap(NULL, length, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if base == <char *> MAP_FAILED:
            _raise_errno(errno, f"cannot reserve {nbytes} bytes of addresses")
        head = (alignment - <uintptr_t> base % alignment) % alignment
        if head:
            munmap(base, head)
        if length > head + nbytes:
            munmap(base + head + nbytes, length - head - nbytes)
        self.address = <size_t> (base + head)
        self.nbytes = nbytes
        self._pid = getpid()
        self._inherit = inherit
        if not inherit and madvise(<void *> self.address, nbytes, MADV_DONTFORK) != 0:
            _raise_errno(errno, "cannot keep a mapping out of forked children")

    def __dealloc__(self):
        # in a forked child these addresses may hold something else by now
        if self.address and self._pid == getpid():
            with nogil:
                munmap(<void *> self.address, self.nbytes)

    cdef char *_at(self, size_t offset, size_t nbytes) except NULL:
        if offset % PAGE or offset > self.nbytes or nbytes > self.nbytes - offset:
            raise ValueError(f"[{offset}, {offset + nbytes}) is not a page-aligned part of {self.nbytes} mapped bytes")
        return <char *> self.address + offset

    def prefer(self, size_t offset, size_t nbytes, int node_id):
        """Ask for pages of `node_id` from now on (``mbind`` with ``MPOL_PREFERRED``, which never kills).

        Raises:
            OSError: the kernel, a container or a cpuset refuses.
        """
        cdef char *start = self._at(offset, nbytes)
        cdef unsigned long mask[MASK_WORDS]
        if not 0 <= node_id < MAX_NODES:
            raise OSError(EINVAL, f"cannot prefer node {node_id}: no such node")
        memset(mask, 0, sizeof(mask))
        mask[node_id // 64] = 1UL << (node_id % 64)
        if syscall(SYS_mbind, start, nbytes, <int> PREFERRED, mask, <unsigned long> MAX_NODES + 1, 0) != 0:
            _raise_errno(errno, f"mbind to node {node_id}")

    def advise_huge(self, size_t offset, size_t nbytes):
        """Ask for transparent huge pages; False where the kernel has none."""
        return madvise(self._at(offset, nbytes), nbytes, MADV_HUGEPAGE) == 0

    def populate(self, size_t offset, size_t nbytes):
        """Back every page of a part now, keeping its contents; releases the GIL and stays open to Ctrl-C.

        Raises:
            OSError: ENOMEM, EFAULT or EHWPOISON from the kernel; pages backed so far stay backed.
        """
        cdef char *start = self._at(offset, nbytes)
        cdef size_t done = 0, step
        cdef int code = 0
        while done < nbytes:
            step = min(nbytes - done, <size_t> POPULATE_STEP)
            with nogil:
                code = _populate(start + done, step)
            if code:
                _raise_errno(code, f"cannot back {nbytes} bytes with memory")
            done += step
            PyErr_CheckSignals()

    def discard(self, size_t offset, size_t nbytes):
        """Give the pages of a part back to the kernel; the addresses stay and read as zero."""
        cdef char *start = self._at(offset, nbytes)
        cdef int failed
        with nogil:
            failed = madvise(start, nbytes, MADV_DONTNEED)
        if failed:
            _raise_errno(errno, f"cannot give {nbytes} bytes back")

    def show(self, size_t offset, size_t nbytes, int fd, long file_offset):
        """Let a part show bytes of a file; what was in it before is gone.

        Its pages are the file's in the page cache until someone writes to them: a page that is written to becomes
        memory of this process, and the file never gets it.

        Args:
            offset: of the part, whole pages.
            nbytes: of the part, whole pages.
            fd: open for reading; it may be closed afterwards.
            file_offset: of the first byte, whole pages. Beyond the end of the file an access ends the process.

        Raises:
            OSError: the kernel refuses; the part then reads as zeros.
        """
        if file_offset < 0 or file_offset % PAGE:
            raise ValueError(f"offset {file_offset} of a file is not a multiple of {PAGE}")
        cdef int code = self._replace(self._whole_pages(offset, nbytes), nbytes, 0, fd, file_offset)
        if code:
            self._replace(self._at(offset, nbytes), nbytes, MAP_ANONYMOUS, -1, 0)  # else the addresses may be lost
            _raise_errno(code, f"cannot show {nbytes} bytes of a file")

    def hide(self, size_t offset, size_t nbytes):
        """Let a part show no file any more: it reads as zeros, and takes memory only where it is written to."""
        cdef int code = self._replace(self._whole_pages(offset, nbytes), nbytes, MAP_ANONYMOUS, -1, 0)
        if code:
            _raise_errno(code, f"cannot reserve {nbytes} bytes of addresses again")

    cdef char *_whole_pages(self, size_t offset, size_t nbytes) except NULL:
        if nbytes == 0 or nbytes % PAGE:
            raise ValueError(f"{nbytes} bytes are not whole pages")
        return self._at(offset, nbytes)

    cdef int _replace(self, char *start, size_t nbytes, int more_flags, int fd, long file_offset) noexcept:
        """Map something else at addresses of this mapping; return errno."""
        cdef char *at
        cdef int code = 0
        with nogil:
            at = <char *> mmap(start, nbytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE | more_flags, fd, file_offset)
            if at == <char *> MAP_FAILED:
                code = errno
            elif not self._inherit and madvise(start, nbytes, MADV_DONTFORK) != 0:
                code = errno
        return code


cdef int _populate(char *start, size_t nbytes) noexcept nogil:
    cdef size_t offset = 0
    cdef volatile char *byte
    if madvise(start, nbytes, POPULATE_WRITE) == 0:
        return 0
    if errno != EINVAL:
        return errno
    while offset < nbytes:  # before Linux 5.14: touch each page, writing what it holds
        byte = <volatile char *> (start + offset)
        byte[0] = byte[0]
        offset += PAGE
    return 0


cdef int _query(size_t first_page, size_t num_pages, void **pages, int *status) noexcept nogil:
    """Fill `status` with the node of each of up to BATCH pages, negative where no page is; return errno."""
    cdef size_t i
    for i in range(num_pages):
        pages[i] = <void *> (first_page + i * PAGE)
    if syscall(SYS_move_pages, 0, num_pages, pages, NULL, status, 0) != 0:
        return errno
    return 0


def page_nodes(size_t address, size_t nbytes):
    """Ask the kernel where the pages of ``[address, address + nbytes)`` are.

    Returns:
        Bytes per node id, counting only bytes inside the range; key -1: not backed by memory yet.

    Raises:
        OSError: the kernel or a container refuses to say.
    """
    cdef size_t counts[SLOTS]
    cdef void *pages[BATCH]
    cdef int status[BATCH]
    cdef size_t page = address // PAGE * PAGE, end = address + nbytes, num_pages, i, begin, stop
    cdef int code, node
    memset(counts, 0, sizeof(counts))
    while page < end and nbytes:
        num_pages = min((end - page + PAGE - 1) // PAGE, <size_t> BATCH)
        with nogil:
            code = _query(page, num_pages, pages, status)
        if code:
            _raise_errno(code, "move_pages (asking where pages are)")
        for i in range(num_pages):
            begin = max(page + i * PAGE, address)
            stop = min(page + (i + 1) * PAGE, end)
            node = status[i]
            counts[node if 0 <= node < MAX_NODES else MAX_NODES] += stop - begin
        page += num_pages * PAGE
        PyErr_CheckSignals()
    found = {node: counts[node] for node in range(MAX_NODES) if counts[node]}
    if counts[MAX_NODES]:
        found[NOWHERE] = counts[MAX_NODES]
    return found


def gather_pages(size_t address, size_t nbytes, int node_id):
    """Move the backed pages of a page-aligned range that lie elsewhere to `node_id`, as far as it has room.

    The kernel reclaims file cache on that node for the move and never kills for it. Ask `page_nodes` afterwards.

    Raises:
        OSError: the kernel or a container refuses to move pages at all.
    """
    cdef void *pages[BATCH]
    cdef int status[BATCH]
    cdef int nodes[BATCH]
    cdef size_t page = address, end = address + nbytes, num_pages, i, num_moves
    cdef int code
    while page < end:
        num_pages = min((end - page + PAGE - 1) // PAGE, <size_t> BATCH)
        with nogil:
            code = _query(page, num_pages, pages, status)
            num_moves = 0
            for i in range(num_pages):
                if status[i] >= 0 and status[i] != node_id:
                    pages[num_moves] = pages[i]
                    nodes[num_moves] = node_id
                    num_moves += 1
            # a positive result counts pages that could not be moved, ENOMEM: the node is full
            if code == 0 and num_moves and syscall(SYS_move_pages, 0, num_moves, pages, nodes, status, MOVE) < 0:
                code = errno
        if code == ENOMEM:
            return
        if code:
            _raise_errno(code, f"move_pages to node {node_id}")
        page += num_pages * PAGE
        PyErr_CheckSignals()
