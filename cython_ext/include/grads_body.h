/* One piece of one span of gradients: one sweep reads, writes and sums the squares. Included once per ISA by
 * grads_isa.h, so there is no include guard.
 *
 * GRADS_NAME(x)         appends the ISA to a function name
 * GRADS_TARGET          the target attribute
 * GRADS_LANES           eight doubles, in the vectors of the ISA
 * GRADS_SQUARE(l, x)    adds the squares of eight float32 to eight lanes, exact up to the addition
 * GRADS_FROM_BFLOAT16(p), GRADS_FROM_FLOAT16(p)   eight 16-bit elements as float32
 *
 * Work goes by blocks of 32 elements. Element i of a block is added to lane i, whatever the format, so that a sum
 * depends on the values and their order only. Vectors are written out, eight elements each: GCC 12 turns loops that mix
 * element sizes into shuffles, or does not vectorise them at all.
 *
 * `operation`, `from` and `to` are literals at every call: each combination becomes a loop of its own.
 */

#define GRADS_LOCAL GRADS_TARGET static inline __attribute__((always_inline))
/* Eight elements in order. */
GRADS_LOCAL grads_floats GRADS_NAME(grads_load)(const char *source, const int format)
{
    grads_floats values;
    if (format == CXL_FP32)
        memcpy(&values, source, sizeof values);
    else
        values = format == CXL_BF16 ? GRADS_FROM_BFLOAT16(source) : GRADS_FROM_FLOAT16(source);
    return values;
}

/* Sixteen elements: the even ones and the odd ones. With bfloat16 these are the lower and the upper halves of words,
 * which takes fewer instructions than widening in order. */
GRADS_LOCAL void GRADS_NAME(grads_load_pairs)(
    grads_floats *even, grads_floats *odd, const char *source, const int format)
{
    if (format == CXL_BF16) {
        grads_bits pairs;
        memcpy(&pairs, source, sizeof pairs);
        *even = (grads_floats)(pairs << 16);
        *odd = (grads_floats)(pairs & 0xffff0000u);
    } else {
        const grads_floats low = GRADS_NAME(grads_load)(source, format);
        const grads_floats high = GRADS_NAME(grads_load)(source + 8 * cxl_bytes(format), format);
        *even = GRADS_EVERY_OTHER(low, high, 0);
        *odd = GRADS_EVERY_OTHER(low, high, 1);
    }
}

GRADS_LOCAL struct grads_random GRADS_NAME(grads_random_of)(const struct cxl_random_key key, const uint32_t first)
{
    const uint32_t shared = first ^ key.first;
    const grads_bits low = (grads_bits){0, 1, 2, 3, 4, 5, 6, 7} ^ ((shared ^ shared >> 16) & 7u);
    return (struct grads_random){low * 0x7feb352du, key};
}

/* The random bits (adam_random) of eight pairs of elements: lower halves for the even elements, upper for the odd ones.
 * `first`, the number of the first pair, is a multiple of eight. Its upper half, which the first shift brings down, is
 * the same in a whole quarter. So the first product is split: `low` has that of the lower three bits, once per step. */
GRADS_LOCAL void GRADS_NAME(grads_random)(
    grads_bits *even, grads_bits *odd, const struct grads_random *random, const uint32_t first)
{
    const uint32_t shared = first ^ random->key.first;
    grads_bits x = random->low + (((shared ^ shared >> 16) & ~7u) * 0x7feb352du + random->key.second);
    x ^= x >> 15;
    x *= 0x846ca68bu;
    *odd = x >> 16;
    *even = (x ^ *odd) & 0xffffu;
}

/* Stochastic rounding of eight sums; the results stay in the upper halves. A sum that is NaN is a quiet one. The
 * random bits could carry out of its fraction, but not where the lower half is zero, as in a sum of bfloat16. */
GRADS_LOCAL grads_bits GRADS_NAME(grads_round)(const grads_floats sums, const grads_bits random, const int from)
{
    const grads_bits added = from == CXL_BF16 ? random : random & (grads_bits)(sums == sums);
    return ((grads_bits)sums + added) & 0xffff0000u;
}

/* Eight elements whose destination, if any, is not bfloat16. */
GRADS_LOCAL void GRADS_NAME(grads_eight)(
    GRADS_LANES *lanes, const char *source, char *destination, const int operation, const int from, const int to)
{
    grads_floats values = GRADS_NAME(grads_load)(source, from);
    if (operation == GRADS_ACCUMULATE)
        values = GRADS_NAME(grads_load)(destination, to) + values;
    if (operation != GRADS_MEASURE && to == CXL_FP32)
        memcpy(destination, &values, sizeof values);
    else if (operation == GRADS_COPY)
        memcpy(destination, source, sizeof(grads_halves));
    GRADS_SQUARE(lanes, values);
}

/* Sixteen elements that are bfloat16, in the source to measure or in the destination. */
GRADS_LOCAL void GRADS_NAME(grads_sixteen)(
    GRADS_LANES *even_lanes, GRADS_LANES *odd_lanes, const char *source, char *destination, const int operation,
    const int from, const struct grads_random *random, const uint32_t first)
{
    grads_floats even, odd, pairs;
    GRADS_NAME(grads_load_pairs)(&even, &odd, source, from);
    if (operation == GRADS_ACCUMULATE) {
        grads_floats even_sums, odd_sums;
        grads_bits even_random, odd_random;
        GRADS_NAME(grads_random)(&even_random, &odd_random, random, first);
        GRADS_NAME(grads_load_pairs)(&even_sums, &odd_sums, destination, CXL_BF16);
        even = (grads_floats)GRADS_NAME(grads_round)(even_sums + even, even_random, from);
        odd = (grads_floats)GRADS_NAME(grads_round)(odd_sums + odd, odd_random, from);
        pairs = (grads_floats)((grads_bits)even >> 16 | (grads_bits)odd);
    } else if (operation != GRADS_MEASURE) {
        memcpy(&pairs, source, sizeof pairs);
    }
    if (operation != GRADS_MEASURE)
        memcpy(destination, &pairs, sizeof pairs);
    GRADS_SQUARE(even_lanes, even);
    GRADS_SQUARE(odd_lanes, odd);
}

GRADS_LOCAL void GRADS_NAME(grads_block)(
    GRADS_LANES *lanes, const char *source, char *destination, const int operation, const int from, const int to,
    const struct grads_random *random, const uint32_t first)
{
    const int64_t read = cxl_bytes(from), write = operation == GRADS_MEASURE ? 0 : cxl_bytes(to);
    if (GRADS_PAIRED(operation, from, to)) {
        GRADS_NAME(grads_sixteen)(lanes, lanes + 1, source, destination, operation, from, random, first);
        GRADS_NAME(grads_sixteen)(
            lanes + 2, lanes + 3, source + 16 * read, destination + 16 * write, operation, from, random, first + 8);
    } else {
        GRADS_NAME(grads_eight)(lanes, source, destination, operation, from, to);
        GRADS_NAME(grads_eight)(lanes + 1, source + 8 * read, destination + 8 * write, operation, from, to);
        GRADS_NAME(grads_eight)(lanes + 2, source + 16 * read, destination + 16 * write, operation, from, to);
        GRADS_NAME(grads_eight)(lanes + 3, source + 24 * read, destination + 24 * write, operation, from, to);
    }
}

/* All blocks of a piece, whose quarters are walked side by side. What is left at its end becomes a block padded with
 * zeros, which add nothing. */
GRADS_LOCAL double GRADS_NAME(grads_loop)(
    const char *restrict source, char *restrict destination, const int64_t n, const int operation, const int from,
    const int to, const struct cxl_random_key key, const uint32_t first)
{
    const int64_t read = cxl_bytes(from), write = operation == GRADS_MEASURE ? 0 : cxl_bytes(to);
    GRADS_LANES lanes[GRADS_QUARTERS][4] = {0};
    double total = 0.0;
    for (int64_t step = 0; step < GRADS_QUARTER && step < n; step += GRADS_STEP(operation))
        for (int q = 0; q < GRADS_QUARTERS; q++) {
            const int64_t begin = q * (int64_t)GRADS_QUARTER + step;
            const int64_t end = begin + GRADS_STEP(operation) < n ? begin + GRADS_STEP(operation) : n;
            const struct grads_random random = GRADS_NAME(grads_random_of)(key, first + (uint32_t)(begin / 2));
            GRADS_LANES here[4]; /* in registers */
            memcpy(here, lanes[q], sizeof here);
            for (int64_t i = begin; i + GRADS_BLOCK <= end; i += GRADS_BLOCK)
                GRADS_NAME(grads_block)(
                    here, source + i * read, destination + i * write, operation, from, to, &random,
                    first + (uint32_t)(i / 2));
            memcpy(lanes[q], here, sizeof here);
        }
    const int64_t whole = n / GRADS_BLOCK * GRADS_BLOCK;
    if (whole < n) {
        const struct grads_random random = GRADS_NAME(grads_random_of)(key, first + (uint32_t)(whole / 2));
        char in[4 * GRADS_BLOCK] = {0}, out[4 * GRADS_BLOCK] = {0};
        memcpy(in, source + whole * read, (size_t)((n - whole) * read));
        if (operation == GRADS_ACCUMULATE)
            memcpy(out, destination + whole * write, (size_t)((n - whole) * write));
        GRADS_NAME(grads_block)(
            lanes[whole / GRADS_QUARTER], in, out, operation, from, to, &random, first + (uint32_t)(whole / 2));
        if (operation != GRADS_MEASURE)
            memcpy(destination + whole * write, out, (size_t)((n - whole) * write));
    }
    for (int q = 0; q < GRADS_QUARTERS; q++) {
        double sums[GRADS_BLOCK];
        memcpy(sums, lanes[q], sizeof sums);
        total += grads_total(sums, GRADS_PAIRED(operation, from, to));
    }
    return total;
}

/* The sum of squares of one piece; `destination` and `to` are not used to measure. `first` counts pairs of elements. */
GRADS_TARGET static double GRADS_NAME(grads_piece)(
    const int operation, const int from, const int to, const char *source, char *destination, const int64_t n,
    const struct cxl_random_key key, const uint32_t first)
{
#define GRADS_CASE(o, f, t) \
    case GRADS_VARIANT(o, f, t): return GRADS_NAME(grads_loop)(source, destination, n, o, f, t, key, first)
    switch (GRADS_VARIANT(operation, from, operation == GRADS_MEASURE ? CXL_FP32 : to)) {
        GRADS_CASE(GRADS_MEASURE, CXL_FP32, CXL_FP32);
        GRADS_CASE(GRADS_MEASURE, CXL_BF16, CXL_FP32);
        GRADS_CASE(GRADS_MEASURE, CXL_FP16, CXL_FP32);
        GRADS_CASE(GRADS_COPY, CXL_FP32, CXL_FP32);
        GRADS_CASE(GRADS_COPY, CXL_BF16, CXL_FP32);
        GRADS_CASE(GRADS_COPY, CXL_BF16, CXL_BF16);
        GRADS_CASE(GRADS_COPY, CXL_FP16, CXL_FP32);
        GRADS_CASE(GRADS_COPY, CXL_FP16, CXL_FP16);
        GRADS_CASE(GRADS_ACCUMULATE, CXL_FP32, CXL_FP32);
        GRADS_CASE(GRADS_ACCUMULATE, CXL_BF16, CXL_FP32);
        GRADS_CASE(GRADS_ACCUMULATE, CXL_FP16, CXL_FP32);
        GRADS_CASE(GRADS_ACCUMULATE, CXL_FP32, CXL_BF16);
        GRADS_CASE(GRADS_ACCUMULATE, CXL_BF16, CXL_BF16);
        GRADS_CASE(GRADS_ACCUMULATE, CXL_FP16, CXL_BF16);
    }
#undef GRADS_CASE
    return __builtin_nan(""); /* the caller has refused every other combination */
}

#undef GRADS_LOCAL
