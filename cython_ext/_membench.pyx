# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""How fast memory is: threads that read, write and update the bytes of a kernel and do next to nothing else."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from lightning_cxl.native import _cpu

cdef extern from "membench_isa.h" nogil:
    cdef enum:
        MEM_LINE
    cdef enum mem_isa:
        MEM_BASELINE
    cdef enum mem_access:
        MEM_READ
        MEM_UPDATE
        MEM_WRITE
        MEM_WRITE_PAST
    cdef struct mem_part:
        char* address
        int64_t bytes
        mem_access access
    uint64_t mem_sweep(mem_isa isa, const mem_part* parts, int num_parts, int log2_blocks, uint64_t pattern) noexcept
    void mem_fence() noexcept
    void mem_found(uint64_t* all, uint64_t found) noexcept

cdef extern from "threads.h" nogil:
    ctypedef void (*cxl_work)(void* job, int thread) noexcept
    void cxl_run_threads(int num_threads, int allowed, cxl_work work, void* job) noexcept
    int64_t cxl_take(int64_t* next) noexcept

STREAM_FIELDS = 4
MAX_GROUP_STREAMS = 16
READ = MEM_READ
UPDATE = MEM_UPDATE
WRITE = MEM_WRITE
WRITE_PAST_CACHE = MEM_WRITE_PAST

cdef enum:
    FIELDS = 4
    # streams of one group; a chunk's parts lie on the stack of its thread
    MAX_STREAMS = 16
    # of the widest stream of a group: what a thread takes at a time (as much as in `_adam`), and a block of a chunk.
    # 512 B is the fastest from the caches and as fast as any from memory; 128 B to 256 KiB were tried, a loop over all
    # streams at once, and prefetching by hand
    CHUNK = 262144
    BLOCK = 512


def sweep(const uint64_t[::1] streams, int num_threads, str isa, uint64_t pattern=0):
    """Touch every byte of every stream once; return the OR of all words read.

    Streams of a group are walked side by side in proportion to their lengths, as a kernel walks its operands: one
    group per span of a kernel. A copy is a group that reads one stream and writes another.

    Args:
        streams: ``STREAM_FIELDS`` numbers per stream: the number of its group (not decreasing), its address, its
            bytes, and what is done: ``READ`` (IN), ``UPDATE`` (INOUT, every word XORed with `pattern`), ``WRITE``
            (OUT, every word set to `pattern`) or ``WRITE_PAST_CACHE`` (the same with non-temporal stores). At most
            16 streams per group; streams must not overlap, except reads.
        num_threads: at least 1.
        isa: one of `_cpu.supported_isas()`. The result does not depend on it.
        pattern: with 0, updates leave the contents as they are.

    Raises:
        ValueError: a table of the wrong length or order, a null address, an unknown access, or an argument out of
            range.

    Threading: releases the GIL; threads take chunks as they become free, as in `_adam.update`.
    """
    cdef int64_t num_streams = streams.shape[0] // FIELDS
    if streams.shape[0] % FIELDS:
        raise ValueError(f"the table must have {FIELDS} numbers per stream, got {streams.shape[0]}")
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    supported = _cpu.supported_isas()
    if isa not in supported:
        raise ValueError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(supported)}")
    if num_streams == 0:
        return 0
    _check(streams, num_streams)
    cdef mem_isa code = <mem_isa> <int> supported.index(isa)
    cdef uint64_t found
    cdef int64_t* index = <int64_t*> malloc(sizeof(int64_t) * 2 * (num_streams + 1))
    if index == NULL:
        raise MemoryError(f"cannot allocate the index of {num_streams} streams")
    with nogil:
        found = _sweep(&streams[0], num_streams, index, index + num_streams + 1, num_threads, code, pattern)
    free(index)
    return found


cdef int _check(const uint64_t[::1] streams, int64_t num_streams) except -1:
    cdef int64_t i, in_group = 0
    cdef const uint64_t* stream
    for i in range(num_streams):
        stream = &streams[i * FIELDS]
        in_group = in_group + 1 if i and stream[0] == stream[-FIELDS] else 1
        if i and stream[0] < stream[-FIELDS]:
            raise ValueError(f"stream {i} of group {stream[0]} follows one of group {stream[-FIELDS]}")
        if in_group > MAX_STREAMS:
            raise ValueError(f"group {stream[0]} has more than {MAX_STREAMS} streams")
        if stream[2] and not stream[1]:
            raise ValueError(f"stream {i} of {stream[2]} bytes has a null address")
        if stream[3] > MEM_WRITE_PAST:
            raise ValueError(f"stream {i} has the access {stream[3]}, which does not exist")
        if stream[3] == MEM_WRITE_PAST and stream[1] % MEM_LINE:
            raise ValueError(f"stream {i} is written past the cache: its address must be a multiple of {MEM_LINE}")
    return 0


cdef struct sweep_job:
    const uint64_t* streams
    int64_t num_groups
    const int64_t* firsts
    const int64_t* starts
    mem_isa isa
    uint64_t pattern
    int64_t num_chunks
    int64_t next_chunk
    uint64_t found


cdef uint64_t _sweep(const uint64_t* streams, int64_t num_streams, int64_t* firsts, int64_t* starts,
                     int num_threads, mem_isa isa, uint64_t pattern) noexcept nogil:
    """Lay the groups end to end, each as long as its widest stream, and cut the line into chunks."""
    cdef int64_t i, num_chunks, num_groups = 0
    cdef sweep_job job
    for i in range(num_streams):
        if i == 0 or streams[i * FIELDS] != streams[(i - 1) * FIELDS]:
            firsts[num_groups] = i
            starts[num_groups + 1] = 0
            num_groups += 1
        starts[num_groups] = max(starts[num_groups], <int64_t> streams[i * FIELDS + 2])
    firsts[num_groups] = num_streams
    starts[0] = 0
    for i in range(num_groups):
        starts[i + 1] = starts[i] + (starts[i + 1] + MEM_LINE - 1) // MEM_LINE * MEM_LINE
    num_chunks = (starts[num_groups] + CHUNK - 1) // CHUNK
    job.streams, job.num_groups, job.firsts, job.starts = streams, num_groups, firsts, starts
    job.isa, job.pattern, job.num_chunks = isa, pattern, num_chunks
    job.next_chunk, job.found = 0, 0
    cxl_run_threads(<int> max(1, min(num_chunks, num_threads)), num_threads, _take_chunks, &job)
    return job.found


cdef void _take_chunks(void* argument, int thread) noexcept nogil:
    cdef sweep_job* job = <sweep_job*> argument
    cdef int64_t chunk = cxl_take(&job.next_chunk)
    cdef uint64_t found = 0
    while chunk < job.num_chunks:
        found |= _sweep_chunk(job.streams, job.num_groups, job.firsts, job.starts, chunk * CHUNK, job.isa, job.pattern)
        chunk = cxl_take(&job.next_chunk)
    mem_found(&job.found, found)


cdef uint64_t _sweep_chunk(const uint64_t* streams, int64_t num_groups, const int64_t* firsts, const int64_t* starts,
                           int64_t begin, mem_isa isa, uint64_t pattern) noexcept nogil:
    """Sweep the part of every group that lies in ``[begin, begin + CHUNK)`` of the line."""
    cdef mem_part parts[MAX_STREAMS]
    cdef int64_t low = 0, high = num_groups, middle, width, left, right, i
    cdef const uint64_t* stream
    cdef uint64_t found = 0
    cdef int blocks
    while high - low > 1:  # the last group that starts at or before `begin`
        middle = (low + high) // 2
        if starts[middle] <= begin:
            low = middle
        else:
            high = middle
    while low < num_groups and starts[low] < begin + CHUNK:
        width = starts[low + 1] - starts[low]
        left = max(begin - starts[low], <int64_t> 0)
        right = min(begin + CHUNK - starts[low], width)
        for i in range(firsts[low], firsts[low + 1]):
            stream = &streams[i * FIELDS]
            parts[i - firsts[low]].address = <char*> <uintptr_t> stream[1] + _share(stream[2], left, width)
            parts[i - firsts[low]].bytes = _share(stream[2], right, width) - _share(stream[2], left, width)
            parts[i - firsts[low]].access = <mem_access> stream[3]
        blocks = 0
        while <int64_t> BLOCK << blocks < right - left:
            blocks += 1
        found |= mem_sweep(isa, parts, <int> (firsts[low + 1] - firsts[low]), blocks, pattern)
        low += 1
    mem_fence()
    return found


cdef inline int64_t _share(int64_t nbytes, int64_t position, int64_t width) noexcept nogil:
    """Return how much of a stream lies before `position` of `width`, in whole cache lines."""
    if position >= width:
        return nbytes
    # a double is exact enough: any cut does, as long as both sides compute the same one
    return <int64_t> (<double> nbytes / <double> width * <double> position) // MEM_LINE * MEM_LINE
