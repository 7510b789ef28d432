/* The Adam update of a pair of vectors. Included once per ISA by adam_isa.h, after a simd_*.h and a pairs_*.h, so there
 * is no include guard.
 *
 * CXL_NAME(x)  appends the ISA to a function name
 * CXL_TARGET   the target attribute
 *
 * The order of operations and the three fused multiply-adds are those of torch.optim.Adam on a CPU with FMA, see
 * tests/numerics/reference/adam.py. Everything else rounds after each operation (-ffp-contract=off), which makes the
 * ISAs agree bit for bit.
 */
#define ADAM_INLINE CXL_TARGET static inline __attribute__((always_inline))

ADAM_INLINE CXL_NAME(pair) CXL_NAME(adam_load)(const void *from, const int64_t i, const int format)
{
    const float *full = (const float *)from + i;
    const uint16_t *half = (const uint16_t *)from + i;
    if (format == CXL_FP32)
        return (CXL_NAME(pair)){v_load(full), v_load(full + V_WIDTH)};
    if (format == CXL_FP16)
        return (CXL_NAME(pair)){v_load_float16(half), v_load_float16(half + V_WIDTH)};
    return CXL_NAME(load_bfloat16)(half);
}

ADAM_INLINE void CXL_NAME(adam_store)(float *to, const CXL_NAME(pair) values)
{
    v_store(to, values.low);
    v_store(to + V_WIDTH, values.high);
}

ADAM_INLINE CXL_NAME(pair) CXL_NAME(adam_load_weights)(
    const struct adam_span *s, const int64_t i, const int weight_format)
{
    return weight_format == ADAM_WEIGHTS_SPLIT ? CXL_NAME(load_split)(s->compute + i, s->rest + i)
                                               : CXL_NAME(adam_load)(s->weights, i, CXL_FP32);
}

ADAM_INLINE void CXL_NAME(adam_store_weights)(
    const struct adam_span *s, const int64_t i, const CXL_NAME(pair) weights, const int weight_format)
{
    if (weight_format == ADAM_WEIGHTS_SPLIT)
        CXL_NAME(store_lower)(s->rest + i, weights);
    else
        CXL_NAME(adam_store)(s->weights + i, weights);
    if (weight_format == ADAM_WEIGHTS_FP16) {
        v_store_float16(s->compute + i, weights.low);
        v_store_float16(s->compute + i + V_WIDTH, weights.high);
    } else if (weight_format != ADAM_WEIGHTS_FP32) {
        const V_INT half = v_bits(v_set(0.0f)) + 0x8000;
        CXL_NAME(store_upper)(s->compute + i, weights, half, half);
    }
}

/* Return the new weights. */
ADAM_INLINE V_FLOAT CXL_NAME(adam_vector)(
    const V_FLOAT weight, const V_FLOAT unscaled, V_FLOAT *m, V_FLOAT *v, const struct adam_factors *by,
    const int exact)
{
    const V_FLOAT scaled = unscaled * by->grad_scale;
    const V_FLOAT grad = by->add_l2 ? v_fma(v_set(by->l2), weight, scaled) : scaled;
    *m = v_fma(v_set(by->lerp), grad - *m, by->near ? *m : grad);
    *v = v_fma(by->square_weight * grad, grad, *v * by->beta2);
    const V_FLOAT root = v_sqrt(*v);
    if (exact)
        return weight * by->decay + by->neg_step_size * *m / (root / by->bias2_sqrt + by->eps);
    return v_fma(weight, v_set(by->decay), by->neg_step_scaled * *m / (root + by->eps_scaled));
}

/* Update elements `i` and following of a span, and their momentum and variance. */
ADAM_INLINE void CXL_NAME(adam_elements)(
    const struct adam_span *s, const int64_t i, CXL_NAME(pair) *m, CXL_NAME(pair) *v, const struct adam_factors *by,
    const int grad_format, const int weight_format, const int exact)
{
    const CXL_NAME(pair) grad = CXL_NAME(adam_load)(s->grads, i, grad_format);
    const CXL_NAME(pair) old = CXL_NAME(adam_load_weights)(s, i, weight_format);
    const CXL_NAME(pair) updated = {
        CXL_NAME(adam_vector)(old.low, grad.low, &m->low, &v->low, by, exact),
        CXL_NAME(adam_vector)(old.high, grad.high, &m->high, &v->high, by, exact)};
    CXL_NAME(adam_store_weights)(s, i, updated, weight_format);
}
