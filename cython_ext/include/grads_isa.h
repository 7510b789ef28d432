/* The gradient loops compiled for each ISA, and the choice between them at run time. */
#ifndef LIGHTNING_CXL_GRADS_ISA_H
#define LIGHTNING_CXL_GRADS_ISA_H

#ifdef __x86_64__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <stdint.h>
#include <string.h>

#include "number_formats.h"

/* positions in _cpu.supported_isas() */
enum grads_isa { GRADS_BASELINE, GRADS_AVX2, GRADS_AVX512, GRADS_NEON = 1 };
enum grads_operation { GRADS_MEASURE, GRADS_COPY, GRADS_ACCUMULATE };
enum { GRADS_BLOCK = 32 };
/* A thread that reads one place after the other leaves up to a third of the memory's bandwidth unused: the quarters of
 * a piece are walked side by side, a step of each in turn (measured: 128 KiB and more apart, or it gains nothing).
 * tests/numerics/reference/gradients.py has the same numbers, except for the step, which changes no result. */
enum { GRADS_PIECE = 262144, GRADS_QUARTERS = 4, GRADS_QUARTER = GRADS_PIECE / GRADS_QUARTERS };
#define GRADS_STEP(operation) ((operation) == GRADS_MEASURE ? 256 : 512)

#define GRADS_VARIANT(operation, from, to) (((operation) * 3 + (from)) * 3 + (to))
/* What is measured is bfloat16: its even and odd elements are in different vectors. */
#define GRADS_PAIRED(operation, from, to) (((operation) == GRADS_MEASURE ? (from) : (to)) == CXL_BF16)

/* eight elements; without AVX the compiler makes two registers of one */
typedef float grads_floats __attribute__((vector_size(32)));
typedef uint32_t grads_bits __attribute__((vector_size(32)));
typedef uint16_t grads_halves __attribute__((vector_size(16)));

struct grads_random {
    grads_bits low; /* a part of a product that is the same in a whole quarter, see grads_body.h */
    struct cxl_random_key key;
};

#ifdef __clang__
#define GRADS_EVERY_OTHER(low, high, i) \
    __builtin_shufflevector(low, high, i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14)
#else
#define GRADS_EVERY_OTHER(low, high, i) \
    __builtin_shuffle(low, high, (grads_bits){i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14})
#endif

/* Sum 32 lanes pairwise: lane i and lane i + 16, then i and i + 8, and so on. */
static double grads_total(const double *vectors, const int paired)
{
    double lanes[GRADS_BLOCK];
    for (int i = 0; i < GRADS_BLOCK; i++)
        lanes[paired ? (i & 16) + 2 * (i & 7) + (i >> 3 & 1) : i] = vectors[i];
    for (int half = GRADS_BLOCK / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* ---- the product of two float32 is exact in double: whether it is fused with the addition makes no difference ---- */

#ifdef __x86_64__
typedef struct {
    __m128d part[4];
} grads_lanes_baseline;

CXL_INLINE void grads_square_baseline(grads_lanes_baseline *lanes, const grads_floats values)
{
    __m128 quarters[2];
    memcpy(quarters, &values, sizeof quarters);
    for (int i = 0; i < 2; i++) {
        const __m128d low = _mm_cvtps_pd(quarters[i]), high = _mm_cvtps_pd(_mm_movehl_ps(quarters[i], quarters[i]));
        lanes->part[2 * i] = _mm_add_pd(lanes->part[2 * i], _mm_mul_pd(low, low));
        lanes->part[2 * i + 1] = _mm_add_pd(lanes->part[2 * i + 1], _mm_mul_pd(high, high));
    }
}
#elif defined(__aarch64__)
typedef struct {
    float64x2_t part[4];
} grads_lanes_baseline;

CXL_INLINE void grads_square_baseline(grads_lanes_baseline *lanes, const grads_floats values)
{
    float32x4_t halves[2];
    memcpy(halves, &values, sizeof halves);
    for (int i = 0; i < 2; i++) {
        const float64x2_t low = vcvt_f64_f32(vget_low_f32(halves[i])), high = vcvt_high_f64_f32(halves[i]);
        lanes->part[2 * i] = vfmaq_f64(lanes->part[2 * i], low, low);
        lanes->part[2 * i + 1] = vfmaq_f64(lanes->part[2 * i + 1], high, high);
    }
}
#endif

CXL_INLINE grads_floats grads_from_bfloat16_baseline(const char *source)
{
    grads_halves halves;
    memcpy(&halves, source, sizeof halves);
    return (grads_floats)(__builtin_convertvector(halves, grads_bits) << 16);
}

CXL_INLINE grads_floats grads_from_float16_baseline(const char *source)
{
    grads_halves halves;
    grads_floats values;
    memcpy(&halves, source, sizeof halves);
    for (int i = 0; i < 8; i++)
        values[i] = cxl_from_float16(halves[i]);
    return values;
}

#define GRADS_NAME(name) name##_baseline
#define GRADS_TARGET
#define GRADS_LANES grads_lanes_baseline
#define GRADS_SQUARE(lanes, values) grads_square_baseline(lanes, values)
#define GRADS_FROM_BFLOAT16(source) grads_from_bfloat16_baseline(source)
#define GRADS_FROM_FLOAT16(source) grads_from_float16_baseline(source)
#include "grads_body.h"
#undef GRADS_NAME
#undef GRADS_FROM_FLOAT16

#ifdef __aarch64__
CXL_INLINE grads_floats grads_from_float16_neon(const char *source)
{
    const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8((const uint8_t *)source));
    const float32x4_t parts[2] = {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    grads_floats values;
    memcpy(&values, parts, sizeof values);
    return values;
}

#define GRADS_NAME(name) name##_neon
#define GRADS_FROM_FLOAT16(source) grads_from_float16_neon(source)
#include "grads_body.h"
#undef GRADS_NAME
#undef GRADS_FROM_FLOAT16
#endif
#undef GRADS_TARGET
#undef GRADS_LANES
#undef GRADS_SQUARE
#undef GRADS_FROM_BFLOAT16

#ifdef __x86_64__
#define GRADS_FROM_BFLOAT16(source) \
    ((grads_floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(source))), 16))
/* every CPU with AVX2 has F16C, which is older and ignores the denormal mode, as cxl_from_float16 does */
#define GRADS_FROM_FLOAT16(source) ((grads_floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source))))

typedef struct {
    __m256d low, high;
} grads_lanes_avx2;

#define GRADS_NAME(name) name##_avx2
#define GRADS_TARGET __attribute__((target("avx2,fma,f16c")))
#define GRADS_LANES grads_lanes_avx2
#define GRADS_SQUARE(lanes, values)                                                                                    \
    do {                                                                                                               \
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128((__m256)(values)));                                 \
        const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps((__m256)(values), 1));                              \
        (lanes)->low = _mm256_fmadd_pd(low, low, (lanes)->low);                                                        \
        (lanes)->high = _mm256_fmadd_pd(high, high, (lanes)->high);                                                    \
    } while (0)
#include "grads_body.h"
#undef GRADS_NAME
#undef GRADS_TARGET
#undef GRADS_LANES
#undef GRADS_SQUARE

typedef struct {
    __m512d all;
} grads_lanes_avx512;

#define GRADS_NAME(name) name##_avx512
#define GRADS_TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")))
#define GRADS_LANES grads_lanes_avx512
#define GRADS_SQUARE(lanes, values)                                                                                    \
    do {                                                                                                               \
        const __m512d all = _mm512_cvtps_pd((__m256)(values));                                                         \
        (lanes)->all = _mm512_fmadd_pd(all, all, (lanes)->all);                                                        \
    } while (0)
#include "grads_body.h"
#undef GRADS_NAME
#undef GRADS_TARGET
#undef GRADS_LANES
#undef GRADS_SQUARE
#undef GRADS_FROM_BFLOAT16
#undef GRADS_FROM_FLOAT16
#endif

/* Process one piece of a span, from element `offset` on, and return its sum of squares. The caller has checked that the
 * CPU has `isa` and that the formats fit the operation. */
static double grads_piece(
    const enum grads_isa isa, const int operation, const int from, const int to, const char *source, char *destination,
    const int64_t n, const uint64_t random_key, const uint64_t offset)
{
    /* as tests/numerics/reference/rounding.py: what is above 32 bits of a counter changes the key */
    const uint64_t pair = offset / 2;
    const uint32_t first = (uint32_t)pair;
    const struct cxl_random_key key = {
        (uint32_t)random_key, (uint32_t)(random_key >> 32) + (uint32_t)(pair >> 32) * CXL_FAR};
    switch (isa) {
#ifdef __x86_64__
    case GRADS_AVX512: return grads_piece_avx512(operation, from, to, source, destination, n, key, first);
    case GRADS_AVX2: return grads_piece_avx2(operation, from, to, source, destination, n, key, first);
#elif defined(__aarch64__)
    case GRADS_NEON: return grads_piece_neon(operation, from, to, source, destination, n, key, first);
#endif
    default: break;
    }
    return grads_piece_baseline(operation, from, to, source, destination, n, key, first);
}

/* One NaN for all: which of several a CPU hands on depends on the order of operands. */
static inline double grads_result(const double sum) { return sum == sum ? sum : __builtin_nan(""); }

#endif
