/* The Adam loop compiled for each ISA, and the choice between them at run time. */
#ifndef LIGHTNING_CXL_ADAM_ISA_H
#define LIGHTNING_CXL_ADAM_ISA_H

#include <stdint.h>
#include <string.h>

/* What one update needs besides the tensors; lightning_cxl/optim/reference.py says how each is computed. */
struct adam_scalars {
    float decay;         /* factor of the weight before the update: 1 - lr * weight_decay (decoupled) or 1 */
    float l2;            /* weight decay added to the gradient, or 0 */
    float lerp_weight;   /* 1 - beta1 */
    float beta2;
    float square_weight; /* 1 - beta2 */
    float bias2_sqrt;    /* sqrt(1 - beta2 ** step) */
    float eps;
    float neg_step_size; /* -lr / (1 - beta1 ** step) */
};

enum adam_isa { ADAM_BASELINE, ADAM_AVX2, ADAM_AVX512 };

/* Round to nearest even; NaN becomes the quiet NaN that torch writes. Inlined into loops of every ISA. */
static inline __attribute__((always_inline)) uint16_t adam_bfloat16(const float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value == value ? rounded : 0x7fc0u);
}

/* a * b + c rounded once, for CPUs without FMA. The product of two floats is exact in double; the sum is rounded to
 * odd there, so that the second rounding, to float, is the only one that counts (Boldo & Melquiond 2008). */
static inline __attribute__((always_inline)) float adam_fma_baseline(const float a, const float b, const float c)
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

#define ADAM_NAME(name) name##_baseline
#define ADAM_TARGET
#define ADAM_FMA(a, b, c) adam_fma_baseline(a, b, c)
#include "adam_body.h"
#undef ADAM_NAME
#undef ADAM_TARGET
#undef ADAM_FMA

#define ADAM_FMA(a, b, c) __builtin_fmaf(a, b, c)

#define ADAM_NAME(name) name##_avx2
#define ADAM_TARGET __attribute__((target("avx2,fma")))
#include "adam_body.h"
#undef ADAM_NAME
#undef ADAM_TARGET

#ifdef __clang__
#define ADAM_WIDE "" /* clang has no such attribute and takes the full width where it pays */
#else
#define ADAM_WIDE ",prefer-vector-width=512"
#endif
#define ADAM_NAME(name) name##_avx512
#define ADAM_TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl" ADAM_WIDE)))
#include "adam_body.h"
#undef ADAM_NAME
#undef ADAM_TARGET
#undef ADAM_FMA

/* Update `n` elements; `c` may be null. The caller has checked that the CPU has `isa`. */
static void adam_span(
    const enum adam_isa isa, float *w, const float *g, float *m, float *v, uint16_t *c, const int64_t n,
    const struct adam_scalars *s)
{
    switch (isa) {
    case ADAM_AVX512: adam_span_avx512(w, g, m, v, c, n, s); break;
    case ADAM_AVX2: adam_span_avx2(w, g, m, v, c, n, s); break;
    case ADAM_BASELINE: adam_span_baseline(w, g, m, v, c, n, s); break;
    }
}

/* Rounding and denormal mode of this thread (torch.set_flush_denormal): pool threads take over the caller's. */
static inline uint32_t adam_float_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void adam_set_float_mode(const uint32_t mode) { __builtin_ia32_ldmxcsr(mode); }

#endif
