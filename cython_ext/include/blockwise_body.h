/* Decode and code one block of 8-bit optimizer state. Included once per ISA by adam_isa.h, after a simd_*.h. */

CXL_TARGET static inline __attribute__((always_inline)) void CXL_NAME(blockwise_decode)(
    const uint8_t *restrict codes, /* IN  (256) */
    float *restrict values,        /* OUT (256) */
    const float scale, const struct blockwise_map *map, const int is_unsigned)
{
    const float usable = scale < 1e-38f ? 0.0f : scale; /* as in coding; a denormal product could change the sign */
    const V_TABLE step = v_scaled_table(map->step, usable), base = v_scaled_table(map->base, usable);
    for (int i = 0; i < BLOCKWISE_SIZE; i += V_WIDTH) {
        /* counted so that the codes of a class are the numbers of one binade; one half more is the middle of a step */
        const V_INT code = v_load_bytes(codes + i);
        const V_INT number = is_unsigned ? code + 1 : v_abs_int(code - 127);
        const V_FLOAT middle = v_from_int(number) + 0.5f;
        const V_INT binade = v_bits(middle) >> 23;
        const V_FLOAT value = v_fma(v_lookup(step, binade), middle, v_lookup(base, binade));
        v_store(values + i, is_unsigned ? value : v_with_sign(value, code - 127));
    }
}

/* The scale of a block: its largest magnitude. */
CXL_TARGET static inline __attribute__((always_inline)) float CXL_NAME(blockwise_scale)(
    const float *restrict values) /* IN (256) */
{
    uint32_t largest = 0; /* as bits: ordered like the magnitudes, NaN last */
    for (int i = 0; i < BLOCKWISE_SIZE; i++) {
        const uint32_t magnitude = cxl_bits(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return cxl_float(largest);
}

CXL_TARGET static inline __attribute__((always_inline)) void CXL_NAME(blockwise_encode)(
    const float *restrict values, /* IN  (256) */
    uint8_t *restrict codes,      /* OUT (256) */
    const float scale, const struct blockwise_map *map, const int is_unsigned)
{
    /* a smaller scale has no useful reciprocal: all zero */
    const float inverse = scale < 1e-38f ? 0.0f : 1.0f / scale;
    const V_TABLE slope = v_table(map->slope), offset = v_table(map->offset), last = v_table(map->last);
    const V_TABLE_LONG threshold = v_table_long(map->threshold);
    for (int i = 0; i < BLOCKWISE_SIZE; i += V_WIDTH) {
        const V_FLOAT value = v_load(values + i);
        const V_FLOAT magnitude = is_unsigned ? value : v_float(v_bits(value) & 0x7fffffff);
        const V_FLOAT share = v_fma(magnitude, v_set(inverse), v_set(BLOCKWISE_SHIFT));
        const V_FLOAT limit = v_lookup_long(threshold, v_bits(share) >> 23);
        const V_INT class_index = v_count_greater(v_bits(limit), share, limit);
        const V_FLOAT line = v_fma(share, v_lookup(slope, class_index), v_lookup(offset, class_index));
        const V_FLOAT number = v_min(line, v_lookup(last, class_index));
        if (is_unsigned)
            v_store_bytes(codes + i, v_truncate(number));
        else
            v_store_signed(codes + i, v_truncate(v_with_sign(number, v_bits(value))));
    }
}

CXL_TARGET static void CXL_NAME(blockwise_encode_all)(
    const float *values, uint8_t *codes, float *scales, const int64_t n, const int is_unsigned)
{
    const struct blockwise_map *map = is_unsigned ? &blockwise_unsigned : &blockwise_signed;
    for (int64_t i = 0; i < n; i += BLOCKWISE_SIZE) {
        const size_t count = (size_t)(n - i < BLOCKWISE_SIZE ? n - i : BLOCKWISE_SIZE);
        float block[BLOCKWISE_SIZE] = {0};
        uint8_t coded[BLOCKWISE_SIZE];
        memcpy(block, values + i, count * sizeof *block);
        const float scale = scales[i / BLOCKWISE_SIZE] = CXL_NAME(blockwise_scale)(block);
        if (is_unsigned)
            CXL_NAME(blockwise_encode)(block, coded, scale, map, 1);
        else
            CXL_NAME(blockwise_encode)(block, coded, scale, map, 0);
        memcpy(codes + i, coded, count);
    }
}

CXL_TARGET static void CXL_NAME(blockwise_decode_all)(
    const uint8_t *codes, const float *scales, float *values, const int64_t n, const int is_unsigned)
{
    const struct blockwise_map *map = is_unsigned ? &blockwise_unsigned : &blockwise_signed;
    for (int64_t i = 0; i < n; i += BLOCKWISE_SIZE) {
        const size_t count = (size_t)(n - i < BLOCKWISE_SIZE ? n - i : BLOCKWISE_SIZE);
        float block[BLOCKWISE_SIZE];
        uint8_t coded[BLOCKWISE_SIZE] = {0};
        memcpy(coded, codes + i, count);
        if (is_unsigned)
            CXL_NAME(blockwise_decode)(coded, block, scales[i / BLOCKWISE_SIZE], map, 1);
        else
            CXL_NAME(blockwise_decode)(coded, block, scales[i / BLOCKWISE_SIZE], map, 0);
        memcpy(values + i, block, count * sizeof *block);
    }
}
