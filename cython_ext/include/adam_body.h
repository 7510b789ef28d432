/* One Adam update of one span, in plain C. Included once per ISA by adam_isa.h, so there is no include guard.
 *
 * CXL_NAME(x)      appends the ISA to a function name
 * CXL_TARGET       the target attribute
 * CXL_FMA(a, b, c) a * b + c, rounded once
 *
 * The order of operations and the three fused multiply-adds are those of torch.optim.Adam on a CPU with FMA, see
 * lightning_cxl/optim/reference.py. Everything else rounds after each operation (-ffp-contract=off), which makes the
 * ISAs agree bit for bit.
 */

/* The formats are literals at every call: each combination becomes a loop of its own, without branches. */
CXL_TARGET static inline __attribute__((always_inline)) void CXL_NAME(adam_loop)(
    float *restrict w,           /* INOUT float32 master weights */
    uint16_t *restrict compute,  /* OUT   16-bit compute weights; split: INOUT upper halves */
    uint16_t *restrict rest,     /* INOUT split: remainders */
    const void *restrict grads,  /* IN    gradients */
    float *restrict m,           /* INOUT momentum, float32 (8-bit state: decoded) */
    float *restrict v,           /* INOUT variance, float32 */
    uint16_t *restrict m16,      /* INOUT momentum, bfloat16 */
    uint16_t *restrict v16,      /* INOUT variance, bfloat16 */
    const int64_t n, const struct adam_scalars *s, const struct cxl_random_key key, const uint32_t counter,
    const int grad_format, const int weight_format, const int state_format)
{
    const float decay = s->decay, l2 = s->l2, beta2 = s->beta2, square_weight = s->square_weight;
    const float bias2_sqrt = s->bias2_sqrt, eps = s->eps, neg_step_size = s->neg_step_size, scale = s->grad_scale;
    const float inverse_bias2_sqrt = 1.0f / bias2_sqrt;
    /* lerp starts from the end that is nearer, as torch's does */
    const int near = s->lerp_weight < 0.5f, add_l2 = l2 != 0.0f;
    const float lerp = near ? s->lerp_weight : s->lerp_weight - 1.0f;

    for (int64_t i = 0; i < n; i++) {
        const float weight = weight_format == ADAM_WEIGHTS_SPLIT ? cxl_split_join(compute[i], rest[i]) : w[i];
        const float scaled = adam_gradient(grads, i, grad_format) * scale;
        const float grad = add_l2 ? CXL_FMA(l2, weight, scaled) : scaled;
        const float old_m = state_format == ADAM_STATE_BF16 ? cxl_from_bfloat16(m16[i]) : m[i];
        const float old_v = state_format == ADAM_STATE_BF16 ? cxl_from_bfloat16(v16[i]) : v[i];
        const float momentum = CXL_FMA(lerp, grad - old_m, near ? old_m : grad);
        const float variance = CXL_FMA(square_weight * grad, grad, old_v * beta2);
        const float root = __builtin_sqrtf(variance);
        /* torch divides; 8-bit state is not torch's, and the divider is what its loop waits for */
        const float corrected = state_format == ADAM_STATE_8BIT ? root * inverse_bias2_sqrt : root / bias2_sqrt;
        const float denominator = corrected + eps;
        const float updated = weight * decay + neg_step_size * momentum / denominator;
        if (state_format == ADAM_STATE_BF16) {
            const uint32_t random = cxl_random(key, counter + (uint32_t)i);
            m16[i] = cxl_to_bfloat16_stochastic(momentum, random & 0xffffu);
            v16[i] = cxl_to_bfloat16_stochastic(variance, random >> 16);
        } else {
            m[i] = momentum;
            v[i] = variance;
        }
        if (weight_format == ADAM_WEIGHTS_SPLIT)
            rest[i] = cxl_split_remainder(updated);
        else
            w[i] = updated;
        if (weight_format == ADAM_WEIGHTS_FP16)
            compute[i] = cxl_to_float16(updated);
        else if (weight_format != ADAM_WEIGHTS_FP32)
            compute[i] = cxl_split_upper(updated);
    }
}

#define ADAM_CASE(G, W, S)                                                                                             \
    case ADAM_FORMATS(G, W, S):                                                                                       \
        CXL_NAME(adam_loop)(                                                                                          \
            s->weights, s->compute, s->rest, s->grads,                                                                \
            S != ADAM_STATE_BF16 ? s->momentum : 0, S != ADAM_STATE_BF16 ? s->variance : 0,                           \
            S == ADAM_STATE_BF16 ? s->momentum : 0, S == ADAM_STATE_BF16 ? s->variance : 0,                           \
            n, scalars, s->key, counter, G, W, S);                                                                    \
        break;
#define ADAM_CASES(W, S) ADAM_CASE(CXL_FP32, W, S) ADAM_CASE(CXL_BF16, W, S) ADAM_CASE(CXL_FP16, W, S)

/* Update `n` elements; those of `s` are the first, and `counter` their number in the span. */
CXL_TARGET static void CXL_NAME(adam_update)(
    const struct adam_span *s, const int64_t n, const uint32_t counter, const struct adam_scalars *scalars)
{
    switch (s->formats) {
        ADAM_CASES(ADAM_WEIGHTS_FP32, ADAM_STATE_FP32)
        ADAM_CASES(ADAM_WEIGHTS_BF16, ADAM_STATE_FP32)
        ADAM_CASES(ADAM_WEIGHTS_FP16, ADAM_STATE_FP32)
        ADAM_CASES(ADAM_WEIGHTS_SPLIT, ADAM_STATE_FP32)
        ADAM_CASES(ADAM_WEIGHTS_FP32, ADAM_STATE_BF16)
        ADAM_CASES(ADAM_WEIGHTS_BF16, ADAM_STATE_BF16)
        ADAM_CASES(ADAM_WEIGHTS_FP16, ADAM_STATE_BF16)
        ADAM_CASES(ADAM_WEIGHTS_SPLIT, ADAM_STATE_BF16)
        ADAM_CASES(ADAM_WEIGHTS_FP32, ADAM_STATE_8BIT) /* decoded */
        ADAM_CASES(ADAM_WEIGHTS_BF16, ADAM_STATE_8BIT)
        ADAM_CASES(ADAM_WEIGHTS_FP16, ADAM_STATE_8BIT)
        ADAM_CASES(ADAM_WEIGHTS_SPLIT, ADAM_STATE_8BIT)
    }
}
#undef ADAM_CASE
#undef ADAM_CASES

/* Update up to ADAM_TILE elements with 8-bit state: decode into the first-level cache, update there, code again. */
CXL_TARGET static inline __attribute__((always_inline)) void CXL_NAME(adam_tile)(
    const struct adam_span *s, const int64_t n, const struct adam_scalars *scalars)
{
    float m[ADAM_TILE] __attribute__((aligned(64))), v[ADAM_TILE] __attribute__((aligned(64)));
    const int64_t blocks = (n + BLOCKWISE_SIZE - 1) / BLOCKWISE_SIZE;
    uint8_t *m_codes = s->momentum, *v_codes = s->variance;
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t at = i * BLOCKWISE_SIZE;
        CXL_NAME(blockwise_decode)(m_codes + at, m + at, s->momentum_scale[i], &blockwise_signed, 0);
        CXL_NAME(blockwise_decode)(v_codes + at, v + at, s->variance_scale[i], &blockwise_unsigned, 1);
    }
    struct adam_span decoded = *s;
    decoded.momentum = m;
    decoded.variance = v;
    CXL_NAME(adam_update)(&decoded, n, 0, scalars);
    /* all scales before the first code: each takes long and nothing else waits for it */
    for (int64_t i = 0; i < blocks; i++) {
        s->momentum_scale[i] = CXL_NAME(blockwise_scale)(m + i * BLOCKWISE_SIZE);
        s->variance_scale[i] = CXL_NAME(blockwise_scale)(v + i * BLOCKWISE_SIZE);
    }
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t at = i * BLOCKWISE_SIZE;
        CXL_NAME(blockwise_encode)(m + at, m_codes + at, s->momentum_scale[i], &blockwise_signed, 0);
        CXL_NAME(blockwise_encode)(v + at, v_codes + at, s->variance_scale[i], &blockwise_unsigned, 1);
    }
}

CXL_TARGET static void CXL_NAME(adam_update_8bit)(
    const struct adam_span *s, const int64_t n, const struct adam_scalars *scalars)
{
    const int64_t whole = n / BLOCKWISE_SIZE * BLOCKWISE_SIZE;
    for (int64_t i = 0; i < whole; i += ADAM_TILE) {
        const struct adam_span tile = adam_span_at(s, i);
        CXL_NAME(adam_tile)(&tile, whole - i < ADAM_TILE ? whole - i : ADAM_TILE, scalars);
    }
    if (whole < n) { /* the last block is not full: fill a copy of its codes up with zero */
        struct adam_span tile = adam_span_at(s, whole);
        uint8_t m_codes[BLOCKWISE_SIZE], v_codes[BLOCKWISE_SIZE], *m_home = tile.momentum, *v_home = tile.variance;
        const size_t count = (size_t)(n - whole);
        memset(m_codes, 127, sizeof m_codes);
        memset(v_codes, 0, sizeof v_codes);
        tile.momentum = memcpy(m_codes, m_home, count);
        tile.variance = memcpy(v_codes, v_home, count);
        CXL_NAME(adam_tile)(&tile, n - whole, scalars);
        memcpy(m_home, m_codes, count);
        memcpy(v_home, v_codes, count);
    }
}
