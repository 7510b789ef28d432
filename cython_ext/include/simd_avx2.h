/* What blockwise_body.h needs of vectors, with AVX2: 8 elements at a time. See simd_avx512.h. */
#include <immintrin.h>

#define V_WIDTH 8
typedef float v8_float __attribute__((vector_size(32)));
typedef int32_t v8_int __attribute__((vector_size(32)));
typedef struct {
    __m256 part[2];
} v8_table;
typedef struct {
    __m256 part[4];
} v8_table_long;
#define V_FLOAT v8_float
#define V_INT v8_int
#define V_TABLE v8_table
#define V_TABLE_LONG v8_table_long

#define v_load(p) ((v8_float)_mm256_loadu_ps(p))
#define v_store(p, a) _mm256_storeu_ps(p, (__m256)(a))
#define v_load_bytes(p) ((v8_int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define v_store_bytes(p, a) v8_store_bytes(p, (__m256i)(a))
#define v_set(x) ((v8_float)_mm256_set1_ps(x))
#define v_bits(a) ((v8_int)(a))
#define v_float(a) ((v8_float)(a))
#define v_from_int(a) ((v8_float)_mm256_cvtepi32_ps((__m256i)(a)))
#define v_truncate(a) ((v8_int)_mm256_cvttps_epi32((__m256)(a)))
#define v_abs_int(a) ((v8_int)_mm256_abs_epi32((__m256i)(a)))
#define v_fma(a, b, c) ((v8_float)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define v_min(a, b) ((v8_float)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define v_table(p) ((v8_table){{_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8)}})
#define v_scaled_table(p, x)                                                                                           \
    ((v8_table){{_mm256_mul_ps(_mm256_loadu_ps(p), _mm256_set1_ps(x)), _mm256_mul_ps(_mm256_loadu_ps((p) + 8), _mm256_set1_ps(x))}})
#define v_table_long(p)                                                                                                \
    ((v8_table_long){{_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8), _mm256_loadu_ps((p) + 16), _mm256_loadu_ps((p) + 24)}})
#define v_lookup(t, i) v8_lookup((t).part[0], (t).part[1], (__m256i)(i))
#define v_lookup_long(t, i) v8_lookup_long(t, (__m256i)(i))
#define v_count_greater(i, a, b) ((i) - (v8_int)_mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_GT_OQ))
#define v_with_sign(a, s) ((v8_float)_mm256_or_ps((__m256)(a), _mm256_and_ps((__m256)(s), _mm256_set1_ps(-0.0f)))) /* a >= 0 */
#define v_store_signed(p, a) v8_store_bytes(p, _mm256_max_epi32((__m256i)((a) + 127), _mm256_setzero_si256()))

#define V8_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

V8_INLINE void v8_store_bytes(uint8_t *p, const __m256i a)
{
    const __m256i lowest = _mm256_set1_epi32(0xff), masked = _mm256_and_si256(a, lowest);
    const __m128i shorts = _mm_packus_epi32(_mm256_castsi256_si128(masked), _mm256_extracti128_si256(masked, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(shorts, shorts));
}

/* bit 3 of the index chooses the part, its lower 3 bits the element */
V8_INLINE v8_float v8_lookup(const __m256 low, const __m256 high, const __m256i index)
{
    return (v8_float)_mm256_blendv_ps(
        _mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
        _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

V8_INLINE v8_float v8_lookup_long(const v8_table_long table, const __m256i index)
{
    return (v8_float)_mm256_blendv_ps(
        (__m256)v8_lookup(table.part[0], table.part[1], index), (__m256)v8_lookup(table.part[2], table.part[3], index),
        _mm256_castsi256_ps(_mm256_slli_epi32(index, 27)));
}
