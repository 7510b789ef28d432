# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Fused Adam over many spans in one call: one pass over memory, all threads, no temporaries."""

from cython.parallel cimport parallel, prange
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc

from lightning_cxl import _cpu

cdef extern from "adam_isa.h" nogil:
    cdef struct adam_scalars:
        float decay
    cdef enum adam_isa:
        ADAM_BASELINE
        ADAM_AVX2
        ADAM_AVX512
    void adam_span(adam_isa isa, float* w, const float* g, float* m, float* v, uint16_t* c, int64_t n,
                   const adam_scalars* s) noexcept
    uint32_t adam_float_mode() noexcept
    void adam_set_float_mode(uint32_t mode) noexcept

SPAN_FIELDS = 7
SCALAR_FIELDS = 8

cdef enum:
    FIELDS = 7
    SCALARS = 8
    # elements: a chunk is what one thread takes at a time, a multiple of ALIGN so that no cache line is shared
    CHUNK = 65536
    ALIGN = 64


def update(const uint64_t[::1] spans, const float[::1] scalars, int num_threads, str isa):
    """Apply one Adam update in place to every span.

    Reads 16 B and writes 12 B per element, 14 B with compute weights.

    Args:
        spans: ``SPAN_FIELDS`` numbers per span: the addresses of weights (float32, INOUT), gradients (float32, IN),
            momentum and variance (float32, INOUT) and compute weights (bfloat16, OUT, or 0 for none), the number of
            elements, and the index of the span's row in `scalars`. Spans must not overlap.
        scalars: ``SCALAR_FIELDS`` numbers per row, the fields of ``struct adam_scalars`` in order.
        num_threads: at least 1. The result does not depend on it.
        isa: one of `_cpu.supported_isas()`. The result does not depend on it.

    Raises:
        ValueError: a table of the wrong length, a null address, a row that does not exist, or an argument out of range.

    Threading: releases the GIL; spans must not overlap between concurrent calls.
    """
    cdef int64_t num_spans = spans.shape[0] // FIELDS
    if spans.shape[0] % FIELDS or scalars.shape[0] % SCALARS:
        raise ValueError(
            f"the tables must have {FIELDS} numbers per span and {SCALARS} per row of scalars, "
            f"got {spans.shape[0]} and {scalars.shape[0]}"
        )
    if num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {num_threads}")
    cdef adam_isa code = _isa_code(isa)
    if num_spans == 0:
        return
    _check(spans, num_spans, scalars.shape[0] // SCALARS)
    cdef int64_t* starts = <int64_t*> malloc(sizeof(int64_t) * (num_spans + 1))
    if starts == NULL:
        raise MemoryError(f"cannot allocate the index of {num_spans} spans")
    with nogil:
        _update(&spans[0], num_spans, <const adam_scalars*> &scalars[0], starts, num_threads, code)
    free(starts)


def advance(const uint64_t[::1] steps, float[::1] values):
    """Add 1 to every step count and report the new ones.

    Args:
        steps: addresses of float32 numbers. INOUT.
        values: as many numbers. OUT.

    Raises:
        ValueError: different lengths or a null address.
    """
    cdef Py_ssize_t i
    cdef float* step
    if steps.shape[0] != values.shape[0]:
        raise ValueError(f"got {steps.shape[0]} addresses and room for {values.shape[0]} values")
    for i in range(steps.shape[0]):
        if not steps[i]:
            raise ValueError(f"step count {i} has a null address")
    for i in range(steps.shape[0]):
        step = <float*> <uintptr_t> steps[i]
        step[0] += 1
        values[i] = step[0]


cdef adam_isa _isa_code(str isa) except *:
    supported = _cpu.supported_isas()
    if isa not in supported:
        raise ValueError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(supported)}")
    return ADAM_AVX512 if isa == "avx512" else ADAM_AVX2 if isa == "avx2" else ADAM_BASELINE


cdef int _check(const uint64_t[::1] spans, int64_t num_spans, int64_t num_rows) except -1:
    cdef int64_t i
    cdef const uint64_t* span
    for i in range(num_spans):
        span = &spans[i * FIELDS]
        if span[6] >= <uint64_t> num_rows:
            raise ValueError(f"span {i} names row {span[6]} of {num_rows} rows of scalars")
        if span[5] and not (span[0] and span[1] and span[2] and span[3]):
            raise ValueError(f"span {i} of {span[5]} elements has a null address")
    return 0


cdef void _update(const uint64_t* spans, int64_t num_spans, const adam_scalars* scalars, int64_t* starts,
                  int num_threads, adam_isa isa) noexcept nogil:
    """Lay all spans end to end, cut the line into chunks, and let the threads take chunk after chunk.

    Chunks are handed out as threads become free, because spans on different tiers take different time.
    """
    cdef int64_t i, chunk, num_chunks
    cdef uint32_t mode = adam_float_mode(), own_mode = mode
    starts[0] = 0
    for i in range(num_spans):
        starts[i + 1] = starts[i] + (<int64_t> spans[i * FIELDS + 5] + ALIGN - 1) // ALIGN * ALIGN
    num_chunks = (starts[num_spans] + CHUNK - 1) // CHUNK
    if num_chunks < num_threads:
        num_threads = <int> num_chunks if num_chunks else 1
    with parallel(num_threads=num_threads):
        own_mode = adam_float_mode()
        adam_set_float_mode(mode)
        for chunk in prange(num_chunks, schedule="dynamic", chunksize=1):
            _update_chunk(spans, num_spans, scalars, starts, chunk * CHUNK, isa)
        adam_set_float_mode(own_mode)


cdef void _update_chunk(const uint64_t* spans, int64_t num_spans, const adam_scalars* scalars, const int64_t* starts,
                        int64_t begin, adam_isa isa) noexcept nogil:
    """Update the part of every span that lies in ``[begin, begin + CHUNK)`` of the line."""
    cdef int64_t low = 0, high = num_spans, middle, offset, count
    cdef const uint64_t* span
    while high - low > 1:  # the last span that starts at or before `begin`
        middle = (low + high) // 2
        if starts[middle] <= begin:
            low = middle
        else:
            high = middle
    while low < num_spans and starts[low] < begin + CHUNK:
        span = &spans[low * FIELDS]
        offset = begin - starts[low] if begin > starts[low] else 0
        count = min(<int64_t> span[5], begin + CHUNK - starts[low]) - offset
        if count > 0:
            adam_span(
                isa,
                <float*> <uintptr_t> span[0] + offset,
                <const float*> <uintptr_t> span[1] + offset,
                <float*> <uintptr_t> span[2] + offset,
                <float*> <uintptr_t> span[3] + offset,
                (<uint16_t*> <uintptr_t> span[4] + offset) if span[4] else NULL,
                count,
                &scalars[span[6]],
            )
        low += 1
