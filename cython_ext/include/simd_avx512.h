/* What adam_body.h and blockwise_body.h need of vectors, with AVX-512: 16 elements at a time. */
#include <immintrin.h>

#define V_WIDTH 16
#define V_ABREAST 4
typedef float v16_float __attribute__((vector_size(64)));
typedef int32_t v16_int __attribute__((vector_size(64)));
typedef uint32_t v16_uint __attribute__((vector_size(64)));
typedef struct {
    __m512 low, high;
} v16_table_long;
#define V_FLOAT v16_float
#define V_INT v16_int
#define V_UINT v16_uint
#define V_COUNT ((v16_uint){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#define V_TABLE __m512
#define V_TABLE_LONG v16_table_long

#define v_load(p) ((v16_float)_mm512_loadu_ps(p))
#define v_store(p, a) _mm512_storeu_ps(p, (__m512)(a))
#define v_load_bytes(p) ((v16_int)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define v_store_bytes(p, a) _mm_storeu_si128((__m128i *)(p), _mm512_cvtepi32_epi8((__m512i)(a)))
/* 16-bit numbers: with zeros or with the sign above them, and the lower halves of integers */
#define v_load_halves(p) ((v16_int)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#define v_load_signed_halves(p) ((v16_int)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#define v_store_halves(p, a) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtepi32_epi16((__m512i)(a)))
#define v_load_float16(p) ((v16_float)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p))))
#define v_store_float16(p, a)                                                                                          \
    _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph((__m512)(a), _MM_FROUND_TO_NEAREST_INT))
#define v_set(x) ((v16_float)_mm512_set1_ps(x))
#define v_bits(a) ((v16_int)(a))
#define v_float(a) ((v16_float)(a))
#define v_from_int(a) ((v16_float)_mm512_cvtepi32_ps((__m512i)(a)))
#define v_truncate(a) ((v16_int)_mm512_cvttps_epi32((__m512)(a)))
#define v_abs_int(a) ((v16_int)_mm512_abs_epi32((__m512i)(a)))
#define v_max_int(a, b) ((v16_int)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))
#define v_largest_float(a) cxl_float((uint32_t)_mm512_reduce_max_epu32((__m512i)(a)))
#define v_max_uint(a, b) ((v16_uint)_mm512_max_epu32((__m512i)(a), (__m512i)(b)))
#define v_sqrt(a) ((v16_float)_mm512_sqrt_ps((__m512)(a)))
#define v_fma(a, b, c) ((v16_float)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define v_min(a, b) ((v16_float)_mm512_min_ps((__m512)(a), (__m512)(b))) /* b where a is NaN */
#define v_table(p) _mm512_loadu_ps(p)
#define v_scaled_table(p, x) _mm512_mul_ps(_mm512_loadu_ps(p), _mm512_set1_ps(x))
#define v_table_long(p) ((v16_table_long){_mm512_loadu_ps(p), _mm512_loadu_ps((p) + 16)})
/* by the lower 4 and 5 bits of the index */
#define v_lookup(t, i) ((v16_float)_mm512_permutexvar_ps((__m512i)(i), t))
#define v_lookup_long(t, i) ((v16_float)_mm512_permutex2var_ps((t).low, (__m512i)(i), (t).high))
/* i + (a > b) */
#define v_count_greater(i, a, b)                                                                                       \
    ((v16_int)_mm512_mask_add_epi32(                                                                                   \
        (__m512i)(i), _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_GT_OQ), (__m512i)(i), _mm512_set1_epi32(1)))
/* a with the sign bit of the integer s */
#define v_with_sign(a, s) \
    ((v16_float)_mm512_ternarylogic_epi32((__m512i)(a), (__m512i)(s), _mm512_set1_epi32((int)0x80000000), 0xd8))
/* bytes 127 - a, and 0 where that would be less */
#define v_store_reversed(p, a)                                                                                         \
    _mm_storeu_si128((__m128i *)(p), _mm_xor_si128(_mm512_cvtsepi32_epi8((__m512i)(a)), _mm_set1_epi8(127)))
/* a where x is NaN, or an integer zero; else b */
#define v_where_nan(x, a, b)                                                                                           \
    ((v16_int)_mm512_mask_mov_epi32(                                                                                   \
        (__m512i)(b), _mm512_cmp_ps_mask((__m512)(x), (__m512)(x), _CMP_UNORD_Q), (__m512i)(a)))
#define v_where_zero(x, a, b)                                                                                          \
    ((v16_int)_mm512_mask_mov_epi32((__m512i)(b), _mm512_testn_epi32_mask((__m512i)(x), (__m512i)(x)), (__m512i)(a)))
