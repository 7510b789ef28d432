/* 16-bit floats, split master weights and the random bits of stochastic rounding.
 *
 * Plain C without a target and `always_inline`: each takes the target of the loop that calls it, and all ISAs give the
 * same bits. lightning_cxl/optim/formats.py defines every function in plain torch.
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

/* ---- bfloat16: the upper half of a float32 ---- */

CXL_INLINE float cxl_from_bfloat16(const uint16_t half) { return cxl_float((uint32_t)half << 16); }

/* Up or down, with a probability that makes the expected result exact. `random`: 16 uniform bits. */
CXL_INLINE uint16_t cxl_to_bfloat16_stochastic(const float value, const uint32_t random)
{
    const uint32_t bits = cxl_bits(value);
    return (uint16_t)(value == value ? (bits + random) >> 16 : (bits >> 16) | 0x40u);
}

/* ---- split master weights: compute weight and remainder together are one float32 ---- */

/* The compute weight: nearest bfloat16, ties away from zero. With ties to even, a remainder of one half would not tell
 * whether the upper half was rounded up. A NaN may have its payload in the lower half: the quiet bit keeps it NaN. */
CXL_INLINE uint16_t cxl_split_upper(const float value)
{
    const uint32_t bits = cxl_bits(value);
    return (uint16_t)(value == value ? (bits + 0x8000u) >> 16 : (bits >> 16) | 0x40u);
}

CXL_INLINE uint16_t cxl_split_remainder(const float value) { return (uint16_t)cxl_bits(value); }

/* The float32 again. A remainder of at least one half says that the upper half was rounded up, except beside zero,
 * where only a weight that someone else set to zero can have one: it is zero. NaN is not rounded. */
CXL_INLINE float cxl_split_join(const uint16_t upper, const uint16_t remainder)
{
    const uint32_t magnitude = upper & 0x7fffu, high = (uint32_t)upper << 16;
    const uint32_t joined = high + (uint32_t)(int32_t)(int16_t)remainder;
    const uint32_t number = (magnitude == 0u) & (remainder >= 0x8000u) ? high : joined;
    return cxl_float(magnitude > 0x7f80u ? high | remainder : number);
}

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

/* Two times 16 random bits for element `counter`: a bijection of 32 bits with full avalanche (multipliers found by
 * Wellons' hash prospector, "lowbias32"), keyed before and between its rounds. Depends on nothing but its arguments. */
CXL_INLINE uint32_t cxl_random(const struct cxl_random_key key, const uint32_t counter)
{
    uint32_t x = counter ^ key.first;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x += key.second;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

#endif
