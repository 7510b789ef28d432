/* What adam_body.h and blockwise_body.h need of vectors, without any: one element at a time. See simd_avx512.h. */

#define V_WIDTH 1
#define V_ABREAST 1
#define V_FLOAT float
#define V_INT int32_t
#define V_UINT uint32_t
#define V_COUNT 0u
#define V_TABLE v1_table
#define V_TABLE_LONG v1_table
typedef struct {
    const float *row;
    float scale;
} v1_table;

#define v_load(p) (*(p))
#define v_store(p, a) (*(p) = (a))
#define v_load_bytes(p) ((int32_t)*(p))
#define v_store_bytes(p, a) (*(p) = (uint8_t)(a))
#define v_load_halves(p) ((int32_t)*(p))
#define v_load_signed_halves(p) ((int32_t)(int16_t)*(p))
#define v_store_halves(p, a) (*(p) = (uint16_t)(a))
#define v_load_float16(p) cxl_from_float16(*(p))
#define v_store_float16(p, a) (*(p) = cxl_to_float16(a))
#define v_set(x) (x)
#define v_bits(a) ((int32_t)cxl_bits(a))
#define v_float(a) cxl_float((uint32_t)(a))
#define v_from_int(a) ((float)(a))
#define v_truncate(a) ((int32_t)(a))
#define v_abs_int(a) ((a) < 0 ? -(a) : (a))
#define v_max_int(a, b) ((a) > (b) ? (a) : (b))
#define v_largest_float(a) v_float(a)
#define v_max_uint(a, b) v_max_int(a, b)
#define v_sqrt(a) __builtin_sqrtf(a)
#define v_fma(a, b, c) CXL_FMA(a, b, c)
#define v_min(a, b) v1_min(a, b)
#define v_table(p) ((v1_table){p, 1.0f})
#define v_table_long(p) ((v1_table){p, 1.0f})
#define v_scaled_table(p, x) ((v1_table){p, x})
#define v_lookup(t, i) ((t).row[(i) & 15] * (t).scale)
#define v_lookup_long(t, i) ((t).row[(i) & 31])
#define v_count_greater(i, a, b) ((i) + ((a) > (b)))
#define v_with_sign(a, s) cxl_float(cxl_bits(a) | ((uint32_t)(s) & 0x80000000u)) /* a >= 0 */
#define v_store_reversed(p, a) (*(p) = (uint8_t)((a) > 127 ? 0 : 127 - (a)))
#define v_where_nan(x, a, b) ((x) == (x) ? (b) : (a))
#define v_where_zero(x, a, b) ((x) == 0 ? (a) : (b))

CXL_INLINE float v1_min(const float a, const float b) { return a < b ? a : b; } /* b where a is NaN */
