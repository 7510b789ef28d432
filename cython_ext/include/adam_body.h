/* One Adam update of one span, in plain C. Included once per ISA by adam_isa.h, so there is no include guard.
 *
 * ADAM_NAME(x)      appends the ISA to a function name
 * ADAM_TARGET       the target attribute
 * ADAM_FMA(a, b, c) a * b + c, rounded once
 *
 * The order of operations and the three fused multiply-adds are those of torch.optim.Adam on a CPU with FMA, see
 * lightning_cxl/optim/reference.py. Everything else rounds after each operation (-ffp-contract=off), which makes the
 * ISAs agree bit for bit.
 */

/* `l2`, `near` and `store` are literals at every call: each combination becomes a loop of its own, without branches. */
ADAM_TARGET static inline __attribute__((always_inline)) void ADAM_NAME(adam_loop)(
    float *restrict w,          /* INOUT master weights */
    const float *restrict g,    /* IN    gradients */
    float *restrict m,          /* INOUT momentum */
    float *restrict v,          /* INOUT variance */
    uint16_t *restrict c,       /* OUT   bfloat16 compute weights, unused unless `store` */
    const int64_t n, const struct adam_scalars *s, const int l2, const int near, const int store)
{
    const float decay = s->decay, weight_decay = s->l2, beta2 = s->beta2, square_weight = s->square_weight;
    const float bias2_sqrt = s->bias2_sqrt, eps = s->eps, neg_step_size = s->neg_step_size;
    /* lerp starts from the end that is nearer, as torch's does */
    const float lerp = near ? s->lerp_weight : s->lerp_weight - 1.0f;

    for (int64_t i = 0; i < n; i++) {
        const float grad = l2 ? ADAM_FMA(weight_decay, w[i], g[i]) : g[i];
        const float momentum = ADAM_FMA(lerp, grad - m[i], near ? m[i] : grad);
        const float variance = ADAM_FMA(square_weight * grad, grad, v[i] * beta2);
        const float denominator = __builtin_sqrtf(variance) / bias2_sqrt + eps;
        const float weight = w[i] * decay + neg_step_size * momentum / denominator;
        m[i] = momentum;
        v[i] = variance;
        w[i] = weight;
        if (store)
            c[i] = adam_bfloat16(weight);
    }
}

ADAM_TARGET static void ADAM_NAME(adam_span)(
    float *w, const float *g, float *m, float *v, uint16_t *c, const int64_t n, const struct adam_scalars *s)
{
    const int near = s->lerp_weight < 0.5f;
    switch ((s->l2 != 0.0f) << 2 | near << 1 | (c != 0)) {
    case 0: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 0, 0, 0); break;
    case 1: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 0, 0, 1); break;
    case 2: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 0, 1, 0); break;
    case 3: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 0, 1, 1); break;
    case 4: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 1, 0, 0); break;
    case 5: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 1, 0, 1); break;
    case 6: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 1, 1, 0); break;
    case 7: ADAM_NAME(adam_loop)(w, g, m, v, c, n, s, 1, 1, 1); break;
    }
}
