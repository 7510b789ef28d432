/* pairs_body.h with AVX-512: 32 numbers of 16 bits at a time, which one permutation widens or narrows. */
#define PAIR_INLINE CXL_TARGET static inline __attribute__((always_inline))

typedef struct {
    v16_float low, high;
} pair_avx512;

/* Places in two rows of 32 halves. To widen, the first row are lower and the second upper halves: */
static const uint16_t pair_widen_low[32] __attribute__((aligned(64))) = {
    0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
    8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
static const uint16_t pair_widen_high[32] __attribute__((aligned(64))) = {
    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
    24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};
static const uint16_t pair_lower[32] __attribute__((aligned(64))) = {
    0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
    32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
static const uint16_t pair_upper[32] __attribute__((aligned(64))) = {
    1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};

PAIR_INLINE pair_avx512 pair_widen(const __m512i lower, const __m512i upper)
{
    return (pair_avx512){
        (v16_float)_mm512_permutex2var_epi16(lower, _mm512_load_si512(pair_widen_low), upper),
        (v16_float)_mm512_permutex2var_epi16(lower, _mm512_load_si512(pair_widen_high), upper)};
}

PAIR_INLINE pair_avx512 load_bfloat16_avx512(const uint16_t *from)
{
    return pair_widen(_mm512_setzero_si512(), _mm512_loadu_si512(from));
}

PAIR_INLINE pair_avx512 load_split_avx512(const uint16_t *upper, const uint16_t *remainders)
{
    const __m512i high = _mm512_loadu_si512(upper), low = _mm512_loadu_si512(remainders);
    const __m512i magnitude = _mm512_and_si512(high, _mm512_set1_epi16(0x7fff));
    const __mmask32 zero = _mm512_testn_epi16_mask(magnitude, magnitude);
    const __mmask32 number = _mm512_cmple_epi16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    const __m512i usable = _mm512_mask_max_epi16(low, zero, low, _mm512_setzero_si512());
    return pair_widen(usable, _mm512_mask_add_epi16(high, number, high, _mm512_srai_epi16(usable, 15)));
}

PAIR_INLINE void store_lower_avx512(uint16_t *to, const pair_avx512 values)
{
    _mm512_storeu_si512(
        to, _mm512_permutex2var_epi16((__m512i)values.low, _mm512_load_si512(pair_lower), (__m512i)values.high));
}

PAIR_INLINE __m512i pair_rounded(const v16_float value, const v16_int added)
{
    const __m512 whole = (__m512)value;
    const __m512i bits = (__m512i)value, sum = _mm512_add_epi32(bits, (__m512i)added);
    return _mm512_mask_or_epi32(
        sum, _mm512_cmp_ps_mask(whole, whole, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}

PAIR_INLINE void store_upper_avx512(
    uint16_t *to, const pair_avx512 values, const v16_int added_low, const v16_int added_high)
{
    const __m512i low = pair_rounded(values.low, added_low), high = pair_rounded(values.high, added_high);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(low, _mm512_load_si512(pair_upper), high));
}

#undef PAIR_INLINE
