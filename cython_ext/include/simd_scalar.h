/* What blockwise_body.h needs of vectors, without any: one element at a time. See simd_avx512.h. */

#define V_WIDTH 1
#define V_FLOAT float
#define V_INT int32_t
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
#define v_set(x) (x)
#define v_bits(a) ((int32_t)cxl_bits(a))
#define v_float(a) cxl_float((uint32_t)(a))
#define v_from_int(a) ((float)(a))
#define v_truncate(a) ((int32_t)(a))
#define v_abs_int(a) ((a) < 0 ? -(a) : (a))
#define v_fma(a, b, c) CXL_FMA(a, b, c)
#define v_min(a, b) v1_min(a, b)
#define v_table(p) ((v1_table){p, 1.0f})
#define v_table_long(p) ((v1_table){p, 1.0f})
#define v_scaled_table(p, x) ((v1_table){p, x})
#define v_lookup(t, i) ((t).row[(i) & 15] * (t).scale)
#define v_lookup_long(t, i) ((t).row[(i) & 31])
#define v_count_greater(i, a, b) ((i) + ((a) > (b)))
#define v_with_sign(a, s) cxl_float(cxl_bits(a) | ((uint32_t)(s) & 0x80000000u)) /* a >= 0 */
#define v_store_signed(p, a) (*(p) = (uint8_t)((a) < -127 ? 0 : (a) + 127))

CXL_INLINE float v1_min(const float a, const float b) { return a < b ? a : b; } /* b where a is NaN */
