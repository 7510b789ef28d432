/* Decode and code one block of 8-bit optimizer state. Included once per ISA by adam_isa.h, after a simd_*.h. */

/* The tables of one block: its scale is in them. */
typedef struct {
    V_TABLE step, base;
} CXL_NAME(blockwise_decoder);

CXL_TARGET static inline __attribute__((always_inline)) CXL_NAME(blockwise_decoder) CXL_NAME(blockwise_decoder_of)(
    const float scale, const struct blockwise_map *map)
{
    const float usable = scale < 1e-38f ? 0.0f : scale; /* as in coding; a denormal product could change the sign */
    const CXL_NAME(blockwise_decoder) by = {v_scaled_table(map->step, usable), v_scaled_table(map->base, usable)};
    return by;
}

/* Decode V_WIDTH elements. */
CXL_TARGET static inline __attribute__((always_inline)) V_FLOAT CXL_NAME(blockwise_decode)(
    const uint8_t *codes, const CXL_NAME(blockwise_decoder) *by, const int is_unsigned)
{
    /* counted so that the codes of a class are the numbers of one binade; one half more is the middle of a step */
    const V_INT code = v_load_bytes(codes);
    const V_FLOAT middle = is_unsigned ? v_from_int(code) + 1.5f : v_from_int(v_abs_int(code - 127)) + 0.5f;
    const V_INT binade = v_bits(middle) >> 23;
    const V_FLOAT value = v_fma(v_lookup(by->step, binade), middle, v_lookup(by->base, binade));
    return is_unsigned ? value : v_with_sign(value, code - 127);
}

/* For the scale of a block, its largest magnitude: as bits, which are ordered like the magnitudes, NaN last. */
CXL_TARGET static inline __attribute__((always_inline)) V_UINT CXL_NAME(blockwise_larger)(
    const V_UINT largest, const V_FLOAT values, const int is_unsigned)
{
    return v_max_uint(largest, (V_UINT)(is_unsigned ? v_bits(values) : v_bits(values) & 0x7fffffff));
}

/* Code one block. Several vectors take each step of the way together: the chain from a value to its code is long, and a
 * CPU that waits for one after the other has not enough of them in view to stay busy. */
CXL_TARGET static inline __attribute__((always_inline)) void CXL_NAME(blockwise_encode_block)(
    const float *values, uint8_t *codes, const float scale, const struct blockwise_map *map, const int is_unsigned)
{
    const V_FLOAT inverse = v_set(scale < 1e-38f ? 0.0f : 1.0f / scale); /* no useful reciprocal below: all zero */
    const V_TABLE slope = v_table(map->slope), offset = v_table(map->offset), last = v_table(map->last);
    const V_TABLE_LONG threshold = v_table_long(map->threshold);
    for (int begin = 0; begin < BLOCKWISE_SIZE; begin += V_ABREAST * V_WIDTH) {
        V_FLOAT value[V_ABREAST], share[V_ABREAST], limit[V_ABREAST], number[V_ABREAST];
        V_INT class_index[V_ABREAST];
        for (int i = 0; i < V_ABREAST; i++) {
            value[i] = v_load(values + begin + i * V_WIDTH);
            const V_FLOAT magnitude = is_unsigned ? value[i] : v_float(v_bits(value[i]) & 0x7fffffff);
            share[i] = v_fma(magnitude, inverse, v_set(BLOCKWISE_SHIFT));
        }
        for (int i = 0; i < V_ABREAST; i++)
            limit[i] = v_lookup_long(threshold, v_bits(share[i]) >> 23);
        for (int i = 0; i < V_ABREAST; i++)
            class_index[i] = v_count_greater(v_bits(limit[i]), share[i], limit[i]);
        for (int i = 0; i < V_ABREAST; i++)
            number[i] = v_fma(share[i], v_lookup(slope, class_index[i]), v_lookup(offset, class_index[i]));
        for (int i = 0; i < V_ABREAST; i++)
            number[i] = v_min(number[i], v_lookup(last, class_index[i]));
        for (int i = 0; i < V_ABREAST; i++) {
            uint8_t *code = codes + begin + i * V_WIDTH;
            if (is_unsigned)
                v_store_bytes(code, v_truncate(number[i]));
            else
                v_store_reversed(code, v_truncate(v_with_sign(number[i], ~v_bits(value[i]))));
        }
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
        V_UINT largest = V_COUNT - V_COUNT;
        for (int k = 0; k < BLOCKWISE_SIZE; k += V_WIDTH)
            largest = CXL_NAME(blockwise_larger)(largest, v_load(block + k), is_unsigned);
        const float scale = scales[i / BLOCKWISE_SIZE] = v_largest_float(largest);
        CXL_NAME(blockwise_encode_block)(block, coded, scale, map, is_unsigned);
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
        const CXL_NAME(blockwise_decoder) by = CXL_NAME(blockwise_decoder_of)(scales[i / BLOCKWISE_SIZE], map);
        for (int k = 0; k < BLOCKWISE_SIZE; k += V_WIDTH)
            v_store(block + k, CXL_NAME(blockwise_decode)(coded + k, &by, is_unsigned));
        memcpy(values + i, block, count * sizeof *block);
    }
}
