/* The Adam loops compiled for each ISA, and the choice between them at run time. */
#ifndef LIGHTNING_CXL_ADAM_ISA_H
#define LIGHTNING_CXL_ADAM_ISA_H

#include "adam_tail.h"

/* positions in _cpu.supported_isas() */
enum adam_isa { ADAM_BASELINE, ADAM_AVX2, ADAM_AVX512, ADAM_NEON = 1 };

/* a * b + c rounded once, for CPUs without FMA. The product of two floats is exact in double; the sum is rounded to
 * odd there, so that the second rounding, to float, is the only one that counts (Boldo & Melquiond 2008). */
CXL_INLINE float adam_fma_baseline(const float a, const float b, const float c)
{
    const double product = (double)a * (double)b, addend = (double)c;
    double sum = product + addend;
    const double back = sum - product;
    const double lost = (product - (sum - back)) + (addend - back);
    int64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    /* lost is NaN when the sum is not finite: both comparisons are false and the sum stays */
    const int64_t away = (lost > 0.0) == (sum > 0.0) ? 1 : -1;
    bits += ((lost > 0.0) | (lost < 0.0)) & !(bits & 1) ? away : 0;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
}

#define CXL_NAME(name) name##_baseline
#define CXL_TARGET
#define CXL_FMA(a, b, c) adam_fma_baseline(a, b, c)
#include "simd_scalar.h"
#include "pairs_body.h"
#include "blockwise_body.h"
#include "adam_elements_body.h"
#include "adam_body.h"
#include "simd_end.h"
#undef CXL_NAME
#undef CXL_TARGET
#undef CXL_FMA

#define CXL_FMA(a, b, c) __builtin_fmaf(a, b, c)

#ifdef __x86_64__
#define CXL_NAME(name) name##_avx2
#define CXL_TARGET __attribute__((target("avx2,fma,f16c")))
#include "simd_avx2.h"
#include "pairs_body.h"
#include "blockwise_body.h"
#include "adam_elements_body.h"
#include "adam_body.h"
#include "simd_end.h"
#undef CXL_NAME
#undef CXL_TARGET

#ifdef __clang__
#define CXL_WIDE "" /* clang has no such attribute and takes the full width where it pays */
#else
#define CXL_WIDE ",prefer-vector-width=512"
#endif
#define CXL_NAME(name) name##_avx512
#define CXL_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl" CXL_WIDE)))
#include "simd_avx512.h"
#include "pairs_avx512.h"
#include "blockwise_body.h"
#include "adam_elements_body.h"
#include "adam_body.h"
#include "simd_end.h"
#undef CXL_NAME
#undef CXL_TARGET

#define ADAM_CALL(isa, function, ...)                                                                                  \
    switch (isa) {                                                                                                     \
    case ADAM_AVX512: function##_avx512(__VA_ARGS__); break;                                                           \
    case ADAM_AVX2: function##_avx2(__VA_ARGS__); break;                                                               \
    default: function##_baseline(__VA_ARGS__); break;                                                                  \
    }
#elif defined(__aarch64__)
#define CXL_NAME(name) name##_neon
#define CXL_TARGET
#include "simd_neon.h"
#include "pairs_body.h"
#include "blockwise_body.h"
#include "adam_elements_body.h"
#include "adam_body.h"
#include "simd_end.h"
#undef CXL_NAME
#undef CXL_TARGET

#define ADAM_CALL(isa, function, ...)                                                                                  \
    switch (isa) {                                                                                                     \
    case ADAM_NEON: function##_neon(__VA_ARGS__); break;                                                               \
    default: function##_baseline(__VA_ARGS__); break;                                                                  \
    }
#endif
#undef CXL_FMA

/* Code `n` float32 numbers as 8-bit state, and back. */
static void adam_encode(
    const enum adam_isa isa, const float *values, uint8_t *codes, float *scales, const int64_t n, const int is_unsigned)
{
    ADAM_CALL(isa, blockwise_encode_all, values, codes, scales, n, is_unsigned)
}

static void adam_decode(
    const enum adam_isa isa, const uint8_t *codes, const float *scales, float *values, const int64_t n,
    const int is_unsigned)
{
    ADAM_CALL(isa, blockwise_decode_all, codes, scales, values, n, is_unsigned)
}

/* Update elements `offset` to `offset + n` of a span. The caller has checked that the CPU has `isa`. */
static void adam_update(
    const enum adam_isa isa, const struct adam_span *span, const int64_t offset, const int64_t n,
    const struct adam_scalars *scalars)
{
    struct adam_span part = adam_span_at(span, offset);
    const uint64_t counter = (uint64_t)(span->first + offset);
    const int64_t before_wrap = (int64_t)((1ull << 32) - (uint32_t)counter);
    const int64_t now = n < before_wrap ? n : before_wrap;
    part.key.second += (uint32_t)(counter >> 32) * CXL_FAR; /* the loops count in 32 bits */
    ADAM_CALL(isa, adam_update, &part, now, (uint32_t)counter, scalars)
    if (now < n)
        adam_update(isa, span, offset + now, n - now, scalars);
}

#endif
