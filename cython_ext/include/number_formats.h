/* Bits of numbers, float16 without instructions for it, the key of random bits, and the mode floats are rounded in.
 *
 * Plain C without a target and `always_inline`: each takes the target of the loop that calls it, and all ISAs give the
 * same bits. The other 16-bit formats are in pairs_body.h and grads_body.h.
 */
#ifndef LIGHTNING_CXL_NUMBER_FORMATS_H
#define LIGHTNING_CXL_NUMBER_FORMATS_H

#include <stdint.h>
#include <string.h>

#define CXL_INLINE static inline __attribute__((always_inline))

CXL_INLINE uint32_t cxl_bits(const float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

CXL_INLINE float cxl_float(const uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* lightning_cxl/optim/kernels.py has the same numbers */
enum cxl_float_format { CXL_FP32, CXL_BF16, CXL_FP16 };

CXL_INLINE int64_t cxl_bytes(const int format) { return format == CXL_FP32 ? 4 : 2; }

/* ---- float16: integer arithmetic for what is normal, one exact float operation for what is not ---- */

CXL_INLINE float cxl_from_float16(const uint16_t half)
{
    const uint32_t shifted = (uint32_t)(half & 0x7fffu) << 13, exponent = shifted & 0x0f800000u;
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    /* zero and denormals: 2^-14 with the fraction beside it, minus 2^-14; never a denormal float32 on the way */
    const uint32_t small = cxl_bits(cxl_float(shifted + 0x38800000u) - cxl_float(0x38800000u));
    const uint32_t large = shifted + (exponent == 0x0f800000u ? 0x70000000u : 0x38000000u);
    return cxl_float(sign | (exponent == 0u ? small : large));
}

/* Nearest, ties to even; NaN becomes a quiet NaN. */
CXL_INLINE uint16_t cxl_to_float16(const float value)
{
    const uint32_t bits = cxl_bits(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
    /* below 2^-14: adding 0.5 rounds at the last bit of a float16 denormal */
    const uint32_t small = cxl_bits(cxl_float(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t finite = magnitude < 0x38800000u ? small : normal;
    const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (magnitude >= 0x47800000u ? large : finite));
}

/* ---- counter-based random bits ---- */

/* What one span's rounding at one step depends on; mixed from seed, parameter, role and step by the caller. */
struct cxl_random_key {
    uint32_t first, second;
};

/* How far the key moves every 2^32 elements: neighbouring keys would give related numbers. */
#define CXL_FAR 0x9e3779b9u

#endif
