# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Gradients over many spans in one call: measured, copied or accumulated, always in one sweep over memory."""

from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from lightning_cxl.native import _cpu

cdef extern from "grads_isa.h" nogil:
    cdef enum grads_isa:
        GRADS_BASELINE
    cdef enum grads_operation:
        GRADS_MEASURE
        GRADS_COPY
        GRADS_ACCUMULATE
    cdef enum:
        GRADS_PIECE  # elements, counted from the start of their span: what is summed before the sums of pieces are
    cdef enum cxl_float_format:
        CXL_FP32
        CXL_BF16
        CXL_FP16
    double grads_piece(grads_isa isa, int operation, int source_format, int destination_format, const char* source,
                       char* destination, int64_t n, uint64_t random_key, uint64_t offset) noexcept
    double grads_result(double total) noexcept

cdef extern from "threads.h" nogil:
    ctypedef void (*cxl_work)(void* job, int thread) noexcept
    void cxl_run_threads(int num_threads, int allowed, cxl_work work, void* job) noexcept
    int64_t cxl_take(int64_t* next) noexcept

SPAN_FIELDS = 6

cdef enum:
    FIELDS = 6
    # what a span counts at least when work is shared out: about the elements that take as long as starting a span
    SHARE = 1024
    # a span has at most 2 to this power elements: more than an address space holds
    LOG2_MAX_ELEMENTS = 47


def measure(const uint64_t[::1] spans, double[::1] results, int num_threads, str isa):
    """Return the sum of squares of every span, which is finite if and only if every element is.

    No second test is needed: the square of a finite float32 is at most 2 ** 256, and no number of them can exceed a
    double. Squares are exact, sums are double: the relative error is at most ``(2057 + pieces) * 2 ** -53`` with pieces
    of 262144 elements. A sum is 0 if and only if every element is. Where denormals are flushed
    (`torch.set_flush_denormal`), float32 and bfloat16 denormals count as 0.

    Args:
        spans: ``SPAN_FIELDS`` numbers per span: the address of the elements (IN), the address of the destination, the
            number of elements, their format (`lightning_cxl.optim.kernels.GRAD_FORMATS`), the format of the
            destination, and a random key. Here the destination must be 0; its format and the key are not used.
            Addresses are multiples of the size of an element.
        results: one number per span. OUT.
        num_threads: at least 1. The results do not depend on it, nor on the other spans of the call.
        isa: one of `_cpu.supported_isas()`. The results do not depend on it.

    Raises:
        ValueError: a table of the wrong length, an address that is null or not aligned, or an argument out of range.

    Threading: releases the GIL. Allocates 16 bytes per span and 8 per piece, nothing else.
    """
    _run(spans, results, num_threads, isa, GRADS_MEASURE)


def copy(const uint64_t[::1] spans, double[::1] results, int num_threads, str isa):
    """Copy every span to its destination and measure it in the same sweep.

    Args:
        spans: as in `measure`. The destination (OUT) has the format of the source, or is float32; the key is not
            used. A destination overlaps no other memory of the call.
        results: as in `measure`.
        num_threads: as in `measure`.
        isa: as in `measure`.

    Raises:
        ValueError: as in `measure`, or formats that do not fit, or a source that overlaps its destination; nothing is
            written then.

    Threading: releases the GIL; destinations must not overlap between concurrent calls.
    """
    _run(spans, results, num_threads, isa, GRADS_COPY)


def accumulate(const uint64_t[::1] spans, double[::1] results, int num_threads, str isa):
    """Add every span to its accumulator and measure the new accumulator, as stored, in the same sweep.

    Float32 sums are rounded once, as by torch's ``add_``. Bfloat16 sums are float32 sums rounded up or down at random,
    so that the mean is exact; `tests.numerics.reference.gradients` says with which random bits.

    Args:
        spans: as in `measure`. The destination (INOUT) is float32, or bfloat16 with a random key of 64 bits,
            which should be another one for every span and accumulation. An accumulator overlaps no other memory of the
            call.
        results: as in `measure`.
        num_threads: as in `measure`.
        isa: as in `measure`.

    Raises:
        ValueError: as in `copy`.

    Threading: releases the GIL; accumulators must not overlap between concurrent calls.
    """
    _run(spans, results, num_threads, isa, GRADS_ACCUMULATE)


cdef int _run(const uint64_t[::1] spans, double[::1] results, int num_threads, str isa, int operation) except -1:
    cdef int64_t num_spans = spans.shape[0] // FIELDS
    if spans.shape[0] % FIELDS or results.shape[0] != num_spans:
        raise ValueError(
            f"the table must have {FIELDS} numbers per span and one result each, "
            f"got {spans.shape[0]} and {results.shape[0]}"
        )
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    supported = _cpu.supported_isas()
    if isa not in supported:
        raise ValueError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(supported)}")
    cdef grads_isa code = <grads_isa> <int> supported.index(isa)
    if num_spans == 0:
        return 0
    cdef int64_t i, num_pieces = 0
    for i in range(num_spans):
        _check(&spans[i * FIELDS], i, operation)
        num_pieces += _num_pieces(&spans[i * FIELDS])
    cdef int64_t* index = <int64_t*> malloc(sizeof(int64_t) * 2 * (num_spans + 1) + sizeof(double) * num_pieces)
    if index == NULL:
        raise MemoryError(f"cannot allocate the index of {num_spans} spans")
    with nogil:
        _sweep(&spans[0], num_spans, operation, code, num_threads, index, index + num_spans + 1,
               <double*> (index + 2 * (num_spans + 1)), &results[0])
    free(index)
    return 0


cdef int _check(const uint64_t* span, int64_t i, int operation) except -1:
    cdef uint64_t n = span[2], source_bytes, destination_bytes
    if n >> LOG2_MAX_ELEMENTS:
        raise ValueError(f"span {i} has {n} elements, more than there can be")
    if span[3] > CXL_FP16:
        raise ValueError(f"span {i} has the format {span[3]}, which does not exist")
    if operation == GRADS_MEASURE and span[1]:
        raise ValueError(f"span {i} has a destination, but measuring writes nothing")
    if operation == GRADS_ACCUMULATE and span[4] != CXL_FP32 and span[4] != CXL_BF16:
        raise ValueError(f"span {i} cannot be added to an accumulator of format {span[4]}")
    if operation != GRADS_MEASURE and operation != GRADS_ACCUMULATE and span[4] != CXL_FP32 and span[4] != span[3]:
        raise ValueError(f"span {i} has the format {span[3]}: it cannot be copied to format {span[4]}")
    if n and not (span[0] and (span[1] or operation == GRADS_MEASURE)):
        raise ValueError(f"span {i} of {n} elements has a null address")
    source_bytes = 4 if span[3] == CXL_FP32 else 2
    destination_bytes = 4 if span[4] == CXL_FP32 else 2
    if span[0] % source_bytes or span[1] % destination_bytes:
        raise ValueError(f"span {i} has an address that is not a multiple of the size of its elements")
    if span[0] < span[1] + n * destination_bytes and span[1] < span[0] + n * source_bytes and span[1]:
        raise ValueError(f"span {i} overlaps its own destination")
    return 0


cdef inline int64_t _num_pieces(const uint64_t* span) noexcept nogil:
    return <int64_t> (span[2] + GRADS_PIECE - 1) // GRADS_PIECE


cdef struct sweep_job:
    const uint64_t* spans
    int64_t num_spans
    int operation
    grads_isa isa
    int64_t* starts
    int64_t* firsts
    double* sums
    int64_t num_shares
    int64_t next_share


cdef void _sweep(const uint64_t* spans, int64_t num_spans, int operation, grads_isa isa, int num_threads,
                 int64_t* starts, int64_t* firsts, double* sums, double* results) noexcept nogil:
    """Lay all spans end to end and let the threads take, share after share of this line, the pieces that begin there.

    Shares are handed out as threads become free, because spans on different tiers take different time. The sums of
    pieces are added in their order, so that a result does not depend on who computed them.
    """
    cdef int64_t i, k, num_shares
    cdef double total
    cdef sweep_job job
    starts[0] = firsts[0] = 0
    for i in range(num_spans):
        starts[i + 1] = starts[i] + (<int64_t> spans[i * FIELDS + 2] + SHARE - 1) // SHARE * SHARE
        firsts[i + 1] = firsts[i] + _num_pieces(&spans[i * FIELDS])
    num_shares = (starts[num_spans] + GRADS_PIECE - 1) // GRADS_PIECE
    job.spans, job.num_spans, job.operation, job.isa = spans, num_spans, operation, isa
    job.starts, job.firsts, job.sums = starts, firsts, sums
    job.num_shares, job.next_share = num_shares, 0
    cxl_run_threads(<int> max(1, min(num_shares, num_threads)), num_threads, _take_shares, &job)
    for i in range(num_spans):
        total = 0
        for k in range(firsts[i], firsts[i + 1]):
            total = total + sums[k]
        results[i] = grads_result(total)


cdef void _take_shares(void* argument, int thread) noexcept nogil:
    cdef sweep_job* job = <sweep_job*> argument
    cdef int64_t share = cxl_take(&job.next_share)
    while share < job.num_shares:
        _sweep_share(job.spans, job.num_spans, job.operation, job.isa, job.starts, job.firsts, job.sums,
                     share * GRADS_PIECE)
        share = cxl_take(&job.next_share)


cdef void _sweep_share(const uint64_t* spans, int64_t num_spans, int operation, grads_isa isa, const int64_t* starts,
                       const int64_t* firsts, double* sums, int64_t begin) noexcept nogil:
    """Process every piece that begins in ``[begin, begin + GRADS_PIECE)`` of the line: at most one of a span."""
    cdef int64_t low = 0, high = num_spans, middle, number, offset, count
    cdef const uint64_t* span
    while high - low > 1:  # the last span that starts at or before `begin`
        middle = (low + high) // 2
        if starts[middle] <= begin:
            low = middle
        else:
            high = middle
    while low < num_spans and starts[low] < begin + GRADS_PIECE:
        span = &spans[low * FIELDS]
        number = (begin - starts[low] + GRADS_PIECE - 1) // GRADS_PIECE if begin > starts[low] else 0
        offset = number * GRADS_PIECE
        count = min(<int64_t> span[2] - offset, <int64_t> GRADS_PIECE)
        if count > 0:
            sums[firsts[low] + number] = grads_piece(
                isa, operation, <int> span[3], <int> span[4],
                <const char*> <uintptr_t> span[0] + offset * (4 if span[3] == CXL_FP32 else 2),
                <char*> <uintptr_t> span[1] + (offset * (4 if span[4] == CXL_FP32 else 2) if span[1] else 0),
                count, span[5], offset,
            )
        low += 1
