/* What adam_body.h and blockwise_body.h need of vectors, with NEON: 4 elements at a time. See simd_avx512.h. */
#include <arm_neon.h>

#define V_WIDTH 4
#define V_ABREAST 4
typedef struct {
    uint8x16x4_t part[2];
} v4_table_long;
#define V_FLOAT float32x4_t
#define V_INT int32x4_t
#define V_UINT uint32x4_t
#define V_COUNT ((uint32x4_t){0, 1, 2, 3})
#define V_TABLE uint8x16x4_t
#define V_TABLE_LONG v4_table_long

#define v_load(p) vld1q_f32(p)
#define v_store(p, a) vst1q_f32(p, a)
#define v_load_bytes(p) v4_load_bytes(p)
#define v_store_bytes(p, a) v4_store_bytes(p, (uint32x4_t)(a))
#define v_load_halves(p) ((int32x4_t)vmovl_u16(vld1_u16(p)))
#define v_load_signed_halves(p) vmovl_s16(vld1_s16((const int16_t *)(p)))
#define v_store_halves(p, a) vst1_u16(p, vmovn_u32((uint32x4_t)(a)))
#define v_load_float16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define v_store_float16(p, a) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(a)))
#define v_set(x) vdupq_n_f32(x)
#define v_bits(a) ((int32x4_t)(a))
#define v_float(a) ((float32x4_t)(a))
#define v_from_int(a) vcvtq_f32_s32(a)
#define v_truncate(a) vcvtq_s32_f32(a)
#define v_abs_int(a) vabsq_s32(a)
#define v_max_int(a, b) vmaxq_s32(a, b)
#define v_largest_float(a) cxl_float(vmaxvq_u32(a))
#define v_max_uint(a, b) vmaxq_u32(a, b)
#define v_sqrt(a) vsqrtq_f32(a)
#define v_fma(a, b, c) vfmaq_f32(c, a, b)
#define v_min(a, b) v4_min(a, b)
#define v_table(p) vld1q_u8_x4((const uint8_t *)(p))
#define v_scaled_table(p, x) v4_scaled_table(p, x)
#define v_table_long(p) ((v4_table_long){{v_table(p), v_table((p) + 16)}})
#define v_lookup(t, i) ((float32x4_t)vqtbl4q_u8(t, v4_bytes_of((i) & 15)))
#define v_lookup_long(t, i) v4_lookup_long(t, v4_bytes_of((i) & 31))
#define v_count_greater(i, a, b) ((i) - (int32x4_t)vcgtq_f32(a, b))
#define v_with_sign(a, s) ((float32x4_t)((uint32x4_t)(a) | ((uint32x4_t)(s) & 0x80000000u))) /* a >= 0 */
#define v_store_reversed(p, a) v4_store_bytes(p, (uint32x4_t)vmaxq_s32(127 - (a), vdupq_n_s32(0)))
#define v_where_nan(x, a, b) vbslq_s32(vceqq_f32(x, x), b, a)
#define v_where_zero(x, a, b) vbslq_s32(vceqzq_s32(x), a, b)

CXL_INLINE int32x4_t v4_load_bytes(const uint8_t *from)
{
    uint32_t bytes;
    memcpy(&bytes, from, sizeof bytes);
    return (int32x4_t)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}

CXL_INLINE void v4_store_bytes(uint8_t *to, const uint32x4_t a)
{
    const uint16x4_t halves = vmovn_u32(a);
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    memcpy(to, &bytes, sizeof bytes);
}

CXL_INLINE float32x4_t v4_min(const float32x4_t a, const float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

CXL_INLINE uint8x16x4_t v4_scaled_table(const float *from, const float x)
{
    uint8x16x4_t table;
    for (int i = 0; i < 4; i++)
        table.val[i] = (uint8x16_t)vmulq_n_f32(vld1q_f32(from + 4 * i), x);
    return table;
}

/* where the four bytes of each element are in a table */
CXL_INLINE uint8x16_t v4_bytes_of(const int32x4_t index)
{
    return (uint8x16_t)((uint32x4_t)index * 0x04040404u + 0x03020100u);
}

/* a byte that is not in the second part is that of the first */
CXL_INLINE float32x4_t v4_lookup_long(const v4_table_long table, const uint8x16_t bytes)
{
    return (float32x4_t)vqtbx4q_u8(vqtbl4q_u8(table.part[0], bytes), table.part[1], bytes - 64);
}
