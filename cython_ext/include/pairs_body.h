/* Two vectors of numbers that are stored in 16 bits, or in 16 and 16. Included once per ISA after a simd_*.h, except
 * for AVX-512, which has pairs_avx512.h: there one permutation widens or narrows both vectors.
 * lightning_cxl/optim/kernels.py and tests/numerics/reference/rounding.py define every function in torch.
 *
 * Split master weights: compute weight and remainder together are one float32. The compute weight is the nearest
 * bfloat16, ties away from zero: with ties to even, a remainder of one half would not tell whether the upper half was
 * rounded up. A NaN may have its payload in the lower half: the quiet bit keeps it NaN.
 */
#define PAIR_INLINE CXL_TARGET static inline __attribute__((always_inline))

typedef struct {
    V_FLOAT low, high; /* elements 0 to V_WIDTH - 1 and following */
} CXL_NAME(pair);

PAIR_INLINE V_INT CXL_NAME(upper_halves)(const uint16_t *from) { return (V_INT)((V_UINT)v_load_halves(from) << 16); }

PAIR_INLINE CXL_NAME(pair) CXL_NAME(load_bfloat16)(const uint16_t *from)
{
    return (CXL_NAME(pair)){
        v_float(CXL_NAME(upper_halves)(from)), v_float(CXL_NAME(upper_halves)(from + V_WIDTH))};
}

/* The float32 again. A remainder of at least one half says that the upper half was rounded up, except beside zero,
 * where only a weight that someone else set to zero can have one: it is zero. NaN is not rounded. */
PAIR_INLINE V_FLOAT CXL_NAME(join_half)(const uint16_t *upper, const uint16_t *remainders)
{
    const V_INT high = CXL_NAME(upper_halves)(upper), rest = v_load_signed_halves(remainders);
    const V_INT usable = v_where_zero(high & 0x7fffffff, v_max_int(rest, rest - rest), rest);
    const V_INT whole = (V_INT)((V_UINT)high + (V_UINT)usable);
    return v_float(v_where_nan(v_float(high), high | (rest & 0xffff), whole));
}

PAIR_INLINE CXL_NAME(pair) CXL_NAME(load_split)(const uint16_t *upper, const uint16_t *remainders)
{
    return (CXL_NAME(pair)){
        CXL_NAME(join_half)(upper, remainders), CXL_NAME(join_half)(upper + V_WIDTH, remainders + V_WIDTH)};
}

/* Lower halves: the remainders of split weights. */
PAIR_INLINE void CXL_NAME(store_lower)(uint16_t *to, const CXL_NAME(pair) values)
{
    v_store_halves(to, v_bits(values.low));
    v_store_halves(to + V_WIDTH, v_bits(values.high));
}

PAIR_INLINE V_INT CXL_NAME(rounded)(const V_FLOAT value, const V_INT added)
{
    const V_UINT sum = (V_UINT)v_bits(value) + (V_UINT)added; /* of a NaN it may overflow */
    return v_where_nan(value, v_bits(value) | 0x400000, (V_INT)sum);
}

/* Upper halves after adding one half to the lower ones: nearest, ties away from zero. After adding 16 random bits: up
 * or down, with a probability that makes the expected result exact. */
PAIR_INLINE void CXL_NAME(store_upper)(
    uint16_t *to, const CXL_NAME(pair) values, const V_INT added_low, const V_INT added_high)
{
    v_store_halves(to, (V_INT)((V_UINT)CXL_NAME(rounded)(values.low, added_low) >> 16));
    v_store_halves(to + V_WIDTH, (V_INT)((V_UINT)CXL_NAME(rounded)(values.high, added_high) >> 16));
}

#undef PAIR_INLINE
