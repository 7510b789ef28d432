# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""Fused Adam over many spans in one call: one pass over memory, all threads, no temporaries."""

from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t

from lightning_cxl.native import _cpu

cdef extern from "adam_isa.h" nogil:
    cdef struct adam_scalars:
        float decay
    cdef enum adam_isa:
        ADAM_BASELINE
    cdef struct adam_span:
        void* weights
        void* compute
        void* rest
        const void* grads
        void* momentum
        void* variance
        void* momentum_scale
        void* variance_scale
        int64_t numel
        int64_t row
        int64_t formats
        int64_t team
        int64_t first
    cdef enum:
        ADAM_WEIGHTS_FP32
        ADAM_WEIGHTS_SPLIT
        ADAM_STATE_8BIT
        BLOCKWISE_SIZE
    void blockwise_init() noexcept
    void adam_encode(adam_isa isa, const float* values, uint8_t* codes, float* scales, int64_t n,
                     int is_unsigned) noexcept
    void adam_decode(adam_isa isa, const uint8_t* codes, const float* scales, float* values, int64_t n,
                     int is_unsigned) noexcept

cdef extern from "adam_threads.h" nogil:
    cdef enum:
        ADAM_CHUNK
    int adam_run(const adam_span* spans, int64_t num_spans, const adam_scalars* scalars, int num_threads,
                 adam_isa isa, const int64_t* cpus, int64_t num_cpus, int64_t num_teams) noexcept

cdef enum:
    TEAMS = 1024
    CPUS = 1024  # CPU_SETSIZE
    FIELDS = sizeof(adam_span) // sizeof(int64_t)
    SCALARS = sizeof(adam_scalars) // sizeof(float)

SPAN_FIELDS = FIELDS
SCALAR_FIELDS = SCALARS
CHUNK = ADAM_CHUNK  # elements that a thread takes at a time
MAX_CPUS = CPUS  # the number that CPUs must be below

blockwise_init()


def update(const uint64_t[::1] spans, const float[::1] scalars, int num_threads, str isa, const int64_t[::1] cpus=None):
    """Apply one Adam update in place to every span.

    Per element it reads the gradient and reads and writes weights (float32, or bfloat16 and remainder), momentum and
    variance (float32, bfloat16 or 8 bit), and writes 16-bit compute weights where there are some: 28 B with float32
    throughout, 22 B with bfloat16 gradients and split weights, 11 B with 8-bit state then.

    Args:
        spans: ``SPAN_FIELDS`` numbers per span, the fields of ``struct adam_span`` in order: the addresses of weights,
            compute weights, remainders, gradients, momentum, variance and of the scales of the last two (0 where the
            format has none), the random key, the number of elements, the row of `scalars`, the formats
            (`lightning_cxl.optim.kernels.pack`), the team, 0 or more, and the number of the first element in its
            tensor, a multiple of ``CHUNK``. Spans must not overlap.
        scalars: ``SCALAR_FIELDS`` numbers per row, the fields of ``struct adam_scalars`` in order.
        num_threads: at least 1. The result does not depend on it.
        isa: one of `_cpu.supported_isas()`. The result does not depend on it.
        cpus: pairs of team and CPU. Threads are divided over the teams by their share of the work; each runs on the
            CPUs of its team that it may use, and takes the spans of other teams when its own are done. None: threads
            run anywhere.

    Raises:
        ValueError: a table of the wrong length, a null address, a row or format that does not exist, or an argument out
            of range.
        MemoryError: no memory for the index of the spans.

    Threading: releases the GIL; spans must not overlap between concurrent calls.
    """
    cdef int64_t num_spans = spans.shape[0] // FIELDS, num_teams, num_cpus = 0
    cdef int failed
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
    cdef const adam_span* table = <const adam_span*> &spans[0]
    num_teams = _check(table, num_spans, scalars.shape[0] // SCALARS)
    if cpus is not None:
        num_cpus = cpus.shape[0] // 2
        num_teams = max(num_teams, _check_cpus(cpus))
    with nogil:
        failed = adam_run(table, num_spans, <const adam_scalars*> &scalars[0], num_threads, code,
                          &cpus[0] if num_cpus else NULL, num_cpus, num_teams)
    if failed:
        raise MemoryError(f"cannot allocate the index of {num_spans} spans")


def quantize(const float[::1] values, uint8_t[::1] codes, float[::1] scales, bint is_unsigned, str isa):
    """Code float32 numbers as 8-bit state, in blocks of 256 with one scale each.

    Args:
        values: not negative where `is_unsigned`. IN.
        codes: as many. OUT.
        scales: one per block, the last of which may be shorter. OUT.
        is_unsigned: the map of the variance; else that of the momentum.
        isa: one of `_cpu.supported_isas()`. The result does not depend on it.

    Raises:
        ValueError: lengths do not fit together.
    """
    _check_blocks(values.shape[0], codes.shape[0], scales.shape[0])
    cdef adam_isa code = _isa_code(isa)
    if values.shape[0]:
        with nogil:
            adam_encode(code, &values[0], &codes[0], &scales[0], values.shape[0], is_unsigned)


def dequantize(const uint8_t[::1] codes, const float[::1] scales, float[::1] values, bint is_unsigned, str isa):
    """Decode 8-bit state; the counterpart of `quantize`."""
    _check_blocks(values.shape[0], codes.shape[0], scales.shape[0])
    cdef adam_isa code = _isa_code(isa)
    if values.shape[0]:
        with nogil:
            adam_decode(code, &codes[0], &scales[0], &values[0], values.shape[0], is_unsigned)


def next_steps(const uint64_t[::1] steps, float[::1] values):
    """Report every step count plus 1; the counts stay as they are until `store_steps`.

    Args:
        steps: addresses of float32 numbers. IN.
        values: as many numbers. OUT.

    Raises:
        ValueError: different lengths or a null address.
    """
    cdef Py_ssize_t i
    _check_steps(steps, values)
    for i in range(steps.shape[0]):
        values[i] = (<const float*> <uintptr_t> steps[i])[0] + 1


def store_steps(const uint64_t[::1] steps, const float[::1] values):
    """Set every step count, when the update that it counts has been made; the counterpart of `next_steps`."""
    cdef Py_ssize_t i
    _check_steps(steps, values)
    for i in range(steps.shape[0]):
        (<float*> <uintptr_t> steps[i])[0] = values[i]


cdef int _check_steps(const uint64_t[::1] steps, const float[::1] values) except -1:
    cdef Py_ssize_t i
    if steps.shape[0] != values.shape[0]:
        raise ValueError(f"got {steps.shape[0]} addresses and room for {values.shape[0]} values")
    for i in range(steps.shape[0]):
        if not steps[i]:
            raise ValueError(f"step count {i} has a null address")
    return 0


cdef adam_isa _isa_code(str isa) except *:
    supported = _cpu.supported_isas()
    if isa not in supported:
        raise ValueError(f"isa {isa!r} cannot be used: this CPU supports {', '.join(supported)}")
    return <adam_isa> <int> supported.index(isa)


cdef int64_t _check(const adam_span* spans, int64_t num_spans, int64_t num_rows) except -1:
    """Return the number of teams."""
    cdef int64_t i, weights, teams = 0
    cdef const adam_span* span
    cdef bint missing
    for i in range(num_spans):
        span = &spans[i]
        if span.row < 0 or span.row >= num_rows:
            raise ValueError(f"span {i} names row {span.row} of {num_rows} rows of scalars")
        weights = span.formats >> 2 & 3
        if span.formats < 0 or span.formats & 3 == 3 or span.formats >> 4 > ADAM_STATE_8BIT:
            raise ValueError(f"span {i} has unknown formats {span.formats}")
        if span.numel < 0 or not 0 <= span.team < TEAMS:
            raise ValueError(f"span {i} has {span.numel} elements and team {span.team} of at most {TEAMS} teams")
        if span.first < 0 or span.first % ADAM_CHUNK:
            raise ValueError(f"span {i} begins at element {span.first}: it must be a multiple of {ADAM_CHUNK}")
        missing = not span.grads or not span.momentum or not span.variance
        missing |= (not span.compute or not span.rest) if weights == ADAM_WEIGHTS_SPLIT else not span.weights
        missing |= weights != ADAM_WEIGHTS_FP32 and not span.compute
        if span.formats >> 4 == ADAM_STATE_8BIT:
            missing |= not span.momentum_scale or not span.variance_scale
        if span.numel and missing:
            raise ValueError(f"span {i} of {span.numel} elements has a null address")
        teams = max(teams, span.team + 1)
    return teams


cdef int64_t _check_cpus(const int64_t[::1] cpus) except -1:
    """Return the number of teams."""
    cdef Py_ssize_t i
    cdef int64_t teams = 0
    if cpus.shape[0] % 2:
        raise ValueError(f"cpus must be pairs of team and CPU, got {cpus.shape[0]} numbers")
    for i in range(0, cpus.shape[0], 2):
        if not 0 <= cpus[i] < TEAMS or not 0 <= cpus[i + 1] < CPUS:
            raise ValueError(f"CPU {cpus[i + 1]} of team {cpus[i]}: at most {TEAMS} teams and {CPUS} CPUs")
        teams = max(teams, cpus[i] + 1)
    return teams


cdef int _check_blocks(Py_ssize_t values, Py_ssize_t codes, Py_ssize_t scales) except -1:
    cdef Py_ssize_t blocks = (values + BLOCKWISE_SIZE - 1) // BLOCKWISE_SIZE
    if codes != values or scales != blocks:
        raise ValueError(f"{values} values need {values} codes and {blocks} scales, got {codes} and {scales}")
    return 0
