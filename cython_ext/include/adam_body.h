/* Adam updates of one span, a pair of vectors at a time. Included once per ISA by adam_isa.h, after
 * adam_elements_body.h and blockwise_body.h.
 *
 * The formats are literals at every call: each combination becomes a loop of its own, without branches.
 */
enum { CXL_NAME(adam_step) = 2 * V_WIDTH };
#define ADAM_STEP CXL_NAME(adam_step)

/* Two times 16 random bits for elements `counter` and following: a bijection of 32 bits with full avalanche
 * (multipliers found by Wellons' hash prospector, "lowbias32"), keyed before and between its rounds. Depends on its
 * arguments alone. */
ADAM_INLINE V_UINT CXL_NAME(adam_random)(const struct cxl_random_key key, const uint32_t counter)
{
    V_UINT x = (V_COUNT + counter) ^ key.first;
    x ^= x >> 16;
    x *= 0x7feb352du;
    x += key.second;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}

/* `n` is a multiple of ADAM_STEP, and `counter` the number of the first element. */
ADAM_INLINE void CXL_NAME(adam_loop)(
    const struct adam_span *span, const int64_t n, const uint32_t counter, const struct adam_scalars *scalars,
    const int grad_format, const int weight_format, const int state_format)
{
    const struct adam_span s = *span; /* copies stay in registers */
    const struct adam_factors by = adam_factors_of(scalars);
    const int format = state_format == ADAM_STATE_FP32 ? CXL_FP32 : CXL_BF16;
    for (int64_t i = 0; i < n; i += ADAM_STEP) {
        CXL_NAME(pair) m = CXL_NAME(adam_load)(s.momentum, i, format), v = CXL_NAME(adam_load)(s.variance, i, format);
        CXL_NAME(adam_elements)(&s, i, &m, &v, &by, grad_format, weight_format, state_format == ADAM_STATE_FP32);
        if (format == CXL_FP32) {
            CXL_NAME(adam_store)((float *)s.momentum + i, m);
            CXL_NAME(adam_store)((float *)s.variance + i, v);
        } else {
            const V_UINT low = CXL_NAME(adam_random)(s.key, counter + (uint32_t)i);
            const V_UINT high = CXL_NAME(adam_random)(s.key, counter + (uint32_t)i + V_WIDTH);
            CXL_NAME(store_upper)((uint16_t *)s.momentum + i, m, (V_INT)(low & 0xffffu), (V_INT)(high & 0xffffu));
            CXL_NAME(store_upper)((uint16_t *)s.variance + i, v, (V_INT)(low >> 16), (V_INT)(high >> 16));
        }
    }
}

/* Decode and update one block; its moments go to `m` and `v`, and its scales to the span. */
ADAM_INLINE void CXL_NAME(adam_block)(
    const struct adam_span *span, const int64_t at, float *restrict m, float *restrict v,
    const struct adam_factors *by, const int grad_format, const int weight_format)
{
    const struct adam_span s = *span;
    const uint8_t *m_codes = (const uint8_t *)s.momentum + at, *v_codes = (const uint8_t *)s.variance + at;
    float *m_scale = s.momentum_scale + at / BLOCKWISE_SIZE, *v_scale = s.variance_scale + at / BLOCKWISE_SIZE;
    const CXL_NAME(blockwise_decoder) m_from = CXL_NAME(blockwise_decoder_of)(*m_scale, &blockwise_signed);
    const CXL_NAME(blockwise_decoder) v_from = CXL_NAME(blockwise_decoder_of)(*v_scale, &blockwise_unsigned);
    V_UINT m_largest = V_COUNT - V_COUNT, v_largest = m_largest;
    for (int i = 0; i < BLOCKWISE_SIZE; i += ADAM_STEP) {
        CXL_NAME(pair) momentum = {
            CXL_NAME(blockwise_decode)(m_codes + i, &m_from, 0),
            CXL_NAME(blockwise_decode)(m_codes + i + V_WIDTH, &m_from, 0)};
        CXL_NAME(pair) variance = {
            CXL_NAME(blockwise_decode)(v_codes + i, &v_from, 1),
            CXL_NAME(blockwise_decode)(v_codes + i + V_WIDTH, &v_from, 1)};
        CXL_NAME(adam_elements)(&s, at + i, &momentum, &variance, by, grad_format, weight_format, 0);
        CXL_NAME(adam_store)(m + i, momentum);
        CXL_NAME(adam_store)(v + i, variance);
        m_largest = CXL_NAME(blockwise_larger)(m_largest, momentum.low, 0);
        m_largest = CXL_NAME(blockwise_larger)(m_largest, momentum.high, 0);
        v_largest = CXL_NAME(blockwise_larger)(v_largest, variance.low, 1);
        v_largest = CXL_NAME(blockwise_larger)(v_largest, variance.high, 1);
    }
    *m_scale = v_largest_float(m_largest);
    *v_scale = v_largest_float(v_largest);
}

/* 8-bit state; `n` is a multiple of BLOCKWISE_SIZE. Some blocks are updated before they are coded, because coding waits
 * for the scale, which is known last. */
ADAM_INLINE void CXL_NAME(adam_blocks)(
    const struct adam_span *s, const int64_t n, const struct adam_scalars *scalars, const int grad_format,
    const int weight_format)
{
    const struct adam_factors by = adam_factors_of(scalars);
    float m[ADAM_TILE] __attribute__((aligned(64))), v[ADAM_TILE] __attribute__((aligned(64)));
    for (int64_t at = 0; at < n; at += ADAM_TILE) {
        const int64_t size = n - at < ADAM_TILE ? n - at : ADAM_TILE;
        for (int64_t i = 0; i < size; i += BLOCKWISE_SIZE)
            CXL_NAME(adam_block)(s, at + i, m + i, v + i, &by, grad_format, weight_format);
        uint8_t *m_codes = (uint8_t *)s->momentum + at, *v_codes = (uint8_t *)s->variance + at;
        for (int64_t i = 0; i < size; i += BLOCKWISE_SIZE) {
            const int64_t block = (at + i) / BLOCKWISE_SIZE;
            CXL_NAME(blockwise_encode_block)(m + i, m_codes + i, s->momentum_scale[block], &blockwise_signed, 0);
            CXL_NAME(blockwise_encode_block)(v + i, v_codes + i, s->variance_scale[block], &blockwise_unsigned, 1);
        }
    }
}

#define ADAM_CASE(G, W, S)                                                                                             \
    case ADAM_FORMATS(G, W, S):                                                                                        \
        CXL_NAME(adam_loop)(s, n, counter, scalars, G, W, S);                                                          \
        break;
#define ADAM_BLOCKS_CASE(G, W)                                                                                         \
    case ADAM_FORMATS(G, W, ADAM_STATE_8BIT):                                                                          \
        CXL_NAME(adam_blocks)(s, n, scalars, G, W);                                                                    \
        break;

/* Update `n` elements; those of `s` are the first, and `counter` their number in the span. Whole pairs of vectors, and
 * with 8-bit state whole blocks. */
CXL_TARGET static void CXL_NAME(adam_update_whole)(
    const struct adam_span *s, const int64_t n, const uint32_t counter, const struct adam_scalars *scalars)
{
#define ADAM_CASES(W)                                                                                                  \
    ADAM_CASE(CXL_FP32, W, ADAM_STATE_FP32) ADAM_CASE(CXL_BF16, W, ADAM_STATE_FP32)                                    \
    ADAM_CASE(CXL_FP16, W, ADAM_STATE_FP32) ADAM_CASE(CXL_FP32, W, ADAM_STATE_BF16)                                    \
    ADAM_CASE(CXL_BF16, W, ADAM_STATE_BF16) ADAM_CASE(CXL_FP16, W, ADAM_STATE_BF16)                                    \
    ADAM_BLOCKS_CASE(CXL_FP32, W) ADAM_BLOCKS_CASE(CXL_BF16, W) ADAM_BLOCKS_CASE(CXL_FP16, W)
    switch (s->formats) {
        ADAM_CASES(ADAM_WEIGHTS_FP32)
        ADAM_CASES(ADAM_WEIGHTS_BF16)
        ADAM_CASES(ADAM_WEIGHTS_FP16)
        ADAM_CASES(ADAM_WEIGHTS_SPLIT)
    }
}
#undef ADAM_CASE
#undef ADAM_BLOCKS_CASE
#undef ADAM_CASES
#undef ADAM_INLINE

CXL_TARGET static void CXL_NAME(adam_update)(
    const struct adam_span *s, const int64_t n, const uint32_t counter, const struct adam_scalars *scalars)
{
    const int64_t unit = s->formats >> 4 == ADAM_STATE_8BIT ? BLOCKWISE_SIZE : ADAM_STEP, whole = n / unit * unit;
    CXL_NAME(adam_update_whole)(s, whole, counter, scalars);
    if (whole < n) {
        const struct adam_span last = adam_span_at(s, whole);
        struct adam_padded padded;
        const struct adam_span filled = adam_pad(&last, &padded, (size_t)(n - whole), (size_t)unit);
        CXL_NAME(adam_update_whole)(&filled, unit, counter + (uint32_t)whole, scalars);
        adam_unpad(&last, &filled, (size_t)(n - whole));
    }
}
#undef ADAM_STEP
