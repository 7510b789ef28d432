/* What the Adam kernels are given: a row of numbers per step, and a span of elements with its formats. */
#ifndef LIGHTNING_CXL_ADAM_TYPES_H
#define LIGHTNING_CXL_ADAM_TYPES_H

#include "blockwise_tables.h"
#include "number_formats.h"

/* What one update needs besides the tensors; tests/numerics/reference/adam.py says how each is computed. */
struct adam_scalars {
    float decay;         /* factor of the weight before the update: 1 - lr * weight_decay (decoupled) or 1 */
    float l2;            /* weight decay added to the gradient, or 0 */
    float lerp_weight;   /* 1 - beta1 */
    float beta2;
    float square_weight; /* 1 - beta2 */
    float bias2_sqrt;    /* sqrt(1 - beta2 ** step) */
    float eps;
    float neg_step_size; /* -lr / (1 - beta1 ** step) */
    float grad_scale;    /* factor of the gradient, before anything else: unscaling and clipping */
};

/* The same, prepared for the loops. */
struct adam_factors {
    float decay, l2, beta2, square_weight, grad_scale;
    int add_l2;
    int near; /* lerp starts from the end that is nearer, as torch's does */
    float lerp;
    float bias2_sqrt, eps, neg_step_size; /* float32 state: as torch has it */
    float eps_scaled, neg_step_scaled;    /* other state: multiplied by bias2_sqrt, which saves a division */
};

static inline struct adam_factors adam_factors_of(const struct adam_scalars *s)
{
    const int near = s->lerp_weight < 0.5f;
    return (struct adam_factors){
        .decay = s->decay, .l2 = s->l2, .beta2 = s->beta2, .square_weight = s->square_weight,
        .grad_scale = s->grad_scale, .add_l2 = s->l2 != 0.0f, .near = near,
        .lerp = near ? s->lerp_weight : s->lerp_weight - 1.0f, .bias2_sqrt = s->bias2_sqrt, .eps = s->eps,
        .neg_step_size = s->neg_step_size, .eps_scaled = s->eps * s->bias2_sqrt,
        .neg_step_scaled = s->neg_step_size * s->bias2_sqrt};
}

/* lightning_cxl/optim/kernels.py has the same numbers */
enum adam_weights {
    ADAM_WEIGHTS_FP32,  /* float32 */
    ADAM_WEIGHTS_BF16,  /* float32 master weights, bfloat16 compute weights written beside them */
    ADAM_WEIGHTS_FP16,  /* the same with float16 */
    ADAM_WEIGHTS_SPLIT, /* bfloat16 compute weights and 16-bit remainders: together the float32 master weights */
};
enum adam_state { ADAM_STATE_FP32, ADAM_STATE_BF16, ADAM_STATE_8BIT };

#define ADAM_FORMATS(grad, weights, state) ((grad) | (weights) << 2 | (state) << 4)

/* One row of the table of spans that Python fills: 14 numbers of 8 bytes. */
struct adam_span {
    float *weights;        /* INOUT, null with split weights */
    uint16_t *compute;     /* OUT, INOUT with split weights, null with float32 ones */
    uint16_t *rest;        /* INOUT, split weights only */
    const void *grads;     /* IN */
    void *momentum;        /* INOUT float32, bfloat16 or 8-bit codes */
    void *variance;        /* INOUT likewise */
    float *momentum_scale; /* INOUT per block, 8-bit state only */
    float *variance_scale; /* INOUT likewise */
    struct cxl_random_key key; /* of stochastic rounding, bfloat16 state only */
    int64_t numel;
    int64_t row;     /* of the scalars */
    int64_t formats; /* ADAM_FORMATS */
    int64_t team;    /* group of threads that takes it first */
    int64_t first;   /* number of its first element, for the random bits: a tensor may be cut into spans */
};

enum { ADAM_TILE = 4 * BLOCKWISE_SIZE }; /* elements with 8-bit state that are decoded at a time */

static const size_t adam_state_bytes[] = {4, 2, 1};

/* The rest of a span, from element `offset` on; with 8-bit state `offset` is a whole number of blocks. */
static inline struct adam_span adam_span_at(const struct adam_span *s, const int64_t offset)
{
    const int64_t state_offset = offset * (int64_t)adam_state_bytes[s->formats >> 4];
    struct adam_span rest = *s;
    rest.weights += s->weights ? offset : 0;
    rest.compute += s->compute ? offset : 0;
    rest.rest += s->rest ? offset : 0;
    rest.grads = (const char *)s->grads + offset * cxl_bytes((int)(s->formats & 3));
    rest.momentum = (char *)s->momentum + state_offset;
    rest.variance = (char *)s->variance + state_offset;
    rest.momentum_scale += s->momentum_scale ? offset / BLOCKWISE_SIZE : 0;
    rest.variance_scale += s->variance_scale ? offset / BLOCKWISE_SIZE : 0;
    return rest;
}

#endif
