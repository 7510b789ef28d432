/* The last elements of a span, fewer than a loop takes at a time, in a place of their own. */
#ifndef LIGHTNING_CXL_ADAM_TAIL_H
#define LIGHTNING_CXL_ADAM_TAIL_H

#include "adam_types.h"

/* They, and everything that belongs to them. */
struct adam_padded {
    float weights[BLOCKWISE_SIZE], grads[BLOCKWISE_SIZE], momentum[BLOCKWISE_SIZE], variance[BLOCKWISE_SIZE];
    uint16_t compute[BLOCKWISE_SIZE], rest[BLOCKWISE_SIZE];
};

/* Copy `n` elements, if there are any, and fill up to `size` with the last of them. */
static inline void *adam_fill(void *to, const void *from, const size_t n, const size_t size, const size_t bytes)
{
    if (!from)
        return NULL;
    memcpy(to, from, n * bytes);
    for (size_t i = n; i < size; i++)
        memcpy((char *)to + i * bytes, (char *)to + (n - 1) * bytes, bytes);
    return to;
}

/* Return a span of `size` elements: `n` of `s`, and the last of them again and again, which changes no maximum. */
static inline struct adam_span adam_pad(
    const struct adam_span *s, struct adam_padded *padded, const size_t n, const size_t size)
{
    const size_t state_bytes = adam_state_bytes[s->formats >> 4];
    struct adam_span whole = *s;
    whole.weights = adam_fill(padded->weights, s->weights, n, size, 4);
    whole.grads = adam_fill(padded->grads, s->grads, n, size, (size_t)cxl_bytes((int)(s->formats & 3)));
    whole.compute = adam_fill(padded->compute, s->compute, n, size, 2);
    whole.rest = adam_fill(padded->rest, s->rest, n, size, 2);
    whole.momentum = adam_fill(padded->momentum, s->momentum, n, size, state_bytes);
    whole.variance = adam_fill(padded->variance, s->variance, n, size, state_bytes);
    return whole;
}

/* Copy what an update has written back. */
static inline void adam_unpad(const struct adam_span *s, const struct adam_span *whole, const size_t n)
{
    const size_t state_bytes = adam_state_bytes[s->formats >> 4];
    if (s->weights)
        memcpy(s->weights, whole->weights, n * 4);
    if (s->compute)
        memcpy(s->compute, whole->compute, n * 2);
    if (s->rest)
        memcpy(s->rest, whole->rest, n * 2);
    memcpy(s->momentum, whole->momentum, n * state_bytes);
    memcpy(s->variance, whole->variance, n * state_bytes);
}

#endif
