/* What adam_body.h and blockwise_body.h need of vectors, with AVX2: 8 elements at a time. See simd_avx512.h. */
#include <immintrin.h>

#define V_WIDTH 8
#define V_ABREAST 2
typedef float v8_float __attribute__((vector_size(32)));
typedef int32_t v8_int __attribute__((vector_size(32)));
typedef uint32_t v8_uint __attribute__((vector_size(32)));
typedef struct {
    __m256 part[2];
} v8_table;
typedef struct {
    __m256 part[4];
} v8_table_long;
#define V_FLOAT v8_float
#define V_INT v8_int
#define V_UINT v8_uint
#define V_COUNT ((v8_uint){0, 1, 2, 3, 4, 5, 6, 7})
#define V_TABLE v8_table
#define V_TABLE_LONG v8_table_long

#define v_load(p) ((v8_float)_mm256_loadu_ps(p))
#define v_store(p, a) _mm256_storeu_ps(p, (__m256)(a))
#define v_load_bytes(p) ((v8_int)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#define v_store_bytes(p, a) v8_store_bytes(p, (__m256i)(a))
#define v_load_halves(p) ((v8_int)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define v_load_signed_halves(p) ((v8_int)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define v_store_halves(p, a) v8_store_halves(p, (__m256i)(a))
#define v_load_float16(p) ((v8_float)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p))))
#define v_store_float16(p, a) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph((__m256)(a), _MM_FROUND_TO_NEAREST_INT))
#define v_set(x) ((v8_float)_mm256_set1_ps(x))
#define v_bits(a) ((v8_int)(a))
#define v_float(a) ((v8_float)(a))
#define v_from_int(a) ((v8_float)_mm256_cvtepi32_ps((__m256i)(a)))
#define v_truncate(a) ((v8_int)_mm256_cvttps_epi32((__m256)(a)))
#define v_abs_int(a) ((v8_int)_mm256_abs_epi32((__m256i)(a)))
#define v_max_int(a, b) ((v8_int)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define v_largest_float(a) v8_largest_float((__m256i)(a))
#define v_max_uint(a, b) ((v8_uint)_mm256_max_epu32((__m256i)(a), (__m256i)(b)))
#define v_sqrt(a) ((v8_float)_mm256_sqrt_ps((__m256)(a)))
#define v_fma(a, b, c) ((v8_float)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define v_min(a, b) ((v8_float)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define v_table(p) ((v8_table){{_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8)}})
#define v_scaled_table(p, x)                                                                                           \
    ((v8_table){{_mm256_mul_ps(_mm256_loadu_ps(p), _mm256_set1_ps(x)),                                                 \
                 _mm256_mul_ps(_mm256_loadu_ps((p) + 8), _mm256_set1_ps(x))}})
#define v_table_long(p)                                                                                                \
    ((v8_table_long){{_mm256_loadu_ps(p), _mm256_loadu_ps((p) + 8), _mm256_loadu_ps((p) + 16),                         \
                      _mm256_loadu_ps((p) + 24)}})
#define v_lookup(t, i) v8_lookup((t).part[0], (t).part[1], (__m256i)(i))
#define v_lookup_long(t, i) v8_lookup_long(t, (__m256i)(i))
#define v_count_greater(i, a, b) ((i) - (v8_int)_mm256_cmp_ps((__m256)(a), (__m256)(b), _CMP_GT_OQ))
#define v_with_sign(a, s) /* a >= 0 */                                                                                 \
    ((v8_float)_mm256_or_ps((__m256)(a), _mm256_and_ps((__m256)(s), _mm256_set1_ps(-0.0f))))
#define v_store_reversed(p, a) v8_store_bytes(p, _mm256_max_epi32((__m256i)(127 - (a)), _mm256_setzero_si256()))
#define v_where_nan(x, a, b) v8_blend(b, a, (__m256i)_mm256_cmp_ps((__m256)(x), (__m256)(x), _CMP_UNORD_Q))
#define v_where_zero(x, a, b) v8_blend(b, a, _mm256_cmpeq_epi32((__m256i)(x), _mm256_setzero_si256()))

#define V8_INLINE static inline __attribute__((always_inline, target("avx2,fma")))

V8_INLINE v8_int v8_blend(const v8_int a, const v8_int b, const __m256i mask)
{
    return (v8_int)_mm256_blendv_epi8((__m256i)a, (__m256i)b, mask);
}

V8_INLINE float v8_largest_float(const __m256i a)
{
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(x));
}

V8_INLINE void v8_store_halves(uint16_t *p, const __m256i a)
{
    const __m256i masked = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
    const __m128i low = _mm256_castsi256_si128(masked), high = _mm256_extracti128_si256(masked, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}

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
